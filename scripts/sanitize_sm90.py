"""Small calls of every Hopper kernel of csrc/sm90, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python scripts/sanitize_sm90.py [PART ...]

Tools memcheck, racecheck, synccheck and initcheck. One line a part: "ok", "FAILED" or "skipped" and why; the exit
status is 1 when a result is not what torch computes in fp64, within the kernels' accuracy, or a call fails. What the
sanitizer finds is in its own report and exit status. ``--list`` names the parts.

Not here: the exchange through peer memory (csrc/gpu). Its ranks wait for each other, and the sanitizer runs kernels one
after the other; tests/ops/test_peer_exchange.py runs it on threads under a race detector.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # each tensor ends where its allocation ends
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from rl_kernel.ops.linear_logp import linear_logp, sm90
from rl_kernel.ops.linear_logp.policy import linear_policy_loss
from rl_kernel.registry import Request

BF16, F32 = torch.bfloat16, torch.float32
PARTS: dict[str, Callable[[], str | None]] = {}


def part(name: str) -> Callable[[Callable[[], str | None]], Callable[[], str | None]]:
    """Registers a function that returns why it was skipped, or ``None``."""

    def register(run: Callable[[], str | None]) -> Callable[[], str | None]:
        PARTS[name] = run
        return run

    return register


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to("cuda", BF16)


def close(found: torch.Tensor, right: torch.Tensor, limit: float = 2**-7) -> None:
    """The largest error over the largest value; a NaN is an error."""
    error = float((found.double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1e-30))
    if not error <= limit:
        raise AssertionError(f"error {error:.2e} above {limit:.2e}")


def grad(x: torch.Tensor) -> torch.Tensor:
    if x.grad is None:
        raise AssertionError("no gradient has arrived")
    return x.grad


def few_rows(tokens: int, segments: int) -> None:
    k = 256 * max(segments, 2)
    x, w = normal(tokens, k, seed=1), normal(72, k, seed=2)
    right = x.double() @ w.double().T
    for rows, per_processor, dependent in ((32, 1, False), (32, 2, True), (64, 1, True)):
        if rows == 64 and segments > 1:
            continue
        for dtype in (BF16, F32):
            out = torch.empty(tokens, 72, dtype=dtype, device="cuda")
            torch.ops.rlk.sm90_few_rows(x, w, segments, rows, per_processor, dependent, out)
            close(out, right)


for _tokens, _segments in ((5, 1), (16, 4), (30, 1), (33, 1), (64, 2), (64, 8), (90, 4)):
    part(f"few_rows M={_tokens} S={_segments}")(functools.partial(few_rows, _tokens, _segments))


def segments(count: int) -> None:
    k = 256 * count
    for m, n, transposed, parts in ((130, 264, False, 1), (70, 520, True, 2)):
        a, b = normal(m, k, seed=1), normal(*((k, n) if transposed else (n, k)), seed=2)
        out = torch.empty(m, n, dtype=F32 if transposed else BF16, device="cuda")
        torch.ops.rlk.sm90_segments(a, b, transposed, count, parts, out)
        close(out, a.double() @ (b.double() if transposed else b.double().T))


for _count in (2, 4, 8):
    part(f"segments S={_count}")(functools.partial(segments, _count))


@part("library")
def named_algorithm() -> str | None:
    from rl_kernel import cublaslt
    from rl_kernel.ops.linear import sm90 as linear
    from rl_kernel.triton_utils import launch_row

    if (cublaslt.version() or 0) // 100 != linear.ALGORITHM_VERSION:
        return f"numbers of algorithms are those of cuBLASLt 13.1, here it is {cublaslt.version()}"
    row = launch_row("linear_library_4096x4096_sm90", 128)
    x, w = normal(128, 512, seed=1), normal(512, 512, seed=2)
    out = torch.empty(128, 512, dtype=BF16, device="cuda")
    try:
        torch.ops.rlk.sm90_library(x, w, *(row[name] for name in linear.ALGORITHM), out)
    except RuntimeError as error:
        if "no such algorithm" in str(error):
            return str(error).splitlines()[0]
        raise
    close(out, x.double() @ w.double().T)
    return None


TOKENS, HIDDEN, ROWS, VOCABULARY = 300, 128, 1040, 1001


def operands(ignored: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h, w = normal(TOKENS, HIDDEN, seed=1), normal(ROWS, HIDDEN, seed=2, scale=0.1)
    t = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(3))
    t[5 : 5 + ignored] = -100
    return h, w, t.cuda()


def reference(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, temperature: torch.Tensor) -> list[torch.Tensor]:
    """logp, entropy, dH, dW of the sum of both over the tokens that take part, in fp64."""
    h, w = h.double().requires_grad_(), w.double().requires_grad_()
    z = torch.log_softmax(h @ w[:VOCABULARY].T / temperature.double()[:, None], -1)
    part_taken = (t >= 0).double()
    value = z.gather(1, t.clamp(min=0)[:, None])[:, 0] * part_taken
    entropy = -(z.exp() * z).sum(-1) * part_taken
    (value.sum() + entropy.sum()).backward()
    return [value.detach(), entropy.detach(), grad(h), grad(w)]


def both(mib: int, grad_segments: int | None, main_grad: bool, ignored: int = 9) -> None:
    h, w, t = operands(ignored)
    temperature = torch.linspace(0.7, 1.3, TOKENS).cuda()
    right = reference(h, w, t, temperature)
    before, sm90.WORKSPACE_BYTES = sm90.WORKSPACE_BYTES, mib << 20
    try:
        hidden, weight = h.requires_grad_(), w.requires_grad_()
        if main_grad:
            for name, value in (("main_grad", torch.zeros(w.shape, device="cuda")), ("grad_added_to_main_grad", False)):
                setattr(weight, name, value)
        out = linear_logp(
            hidden, weight, t, temperature=temperature, global_vocab_size=VOCABULARY, grad_segments=grad_segments,
            accumulate_main_grad=main_grad, backend="sm90",
        )  # fmt: skip
        (out.logp.sum() + out.entropy.sum()).backward()
    finally:
        sm90.WORKSPACE_BYTES = before
    dw = getattr(weight, "main_grad") if main_grad else grad(weight)  # noqa: B009 - Megatron's attribute
    for found, expected in zip((out.logp, out.entropy, grad(hidden), dw), right, strict=True):
        close(found.detach(), expected, 2**-5)


part("linear_logp kept")(functools.partial(both, 512, None, False))
part("linear_logp recompute")(functools.partial(both, 0, None, False))
part("linear_logp kept, all rows")(functools.partial(both, 512, None, False, 0))
part("linear_logp recompute, all rows")(functools.partial(both, 0, None, False, 0))
part("linear_logp kept, 2 segments")(functools.partial(both, 512, 2, False))
part("linear_logp recompute, 8 segments")(functools.partial(both, 0, 8, False))
part("linear_logp main_grad")(functools.partial(both, 512, None, True))


@part("linear_logp kept, gradients beside the products")
def beside() -> None:
    """Without a gradient by entropy. 33 units of columns, the first one made in front of the products; two of rows."""
    for tokens, rows in ((300, 16900), (1100, 8500), (384, 16900)):  # the last one ends as bf16 rows in their places
        h, w = normal(tokens, 64, seed=1), normal(rows, 64, seed=2, scale=0.1)
        t = torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(3)).cuda()
        t[7:20] = -100
        exact = [x.double().requires_grad_() for x in (h, w)]
        z = torch.log_softmax(exact[0] @ exact[1].T / 0.7, -1)
        (z.gather(1, t.clamp(min=0)[:, None])[:, 0] * (t >= 0)).sum().backward()
        hidden, weight = h.requires_grad_(), w.requires_grad_()
        linear_logp(hidden, weight, t, temperature=0.7, backend="sm90").logp.sum().backward()
        for found, right in zip((hidden, weight), exact, strict=True):
            close(grad(found), grad(right), 2**-5)


@part("products with tokens as columns")
def tokens_as_columns() -> None:
    """dH with tokens as columns of its tiles (176 and 2 x 160), and dW without the last zeros."""
    for tokens in (169, 300):
        d, w, h = normal(tokens, 16456, seed=1), normal(16456, 136, seed=2, scale=0.1), normal(tokens, 136, seed=3)
        dh, dw = torch.empty(tokens, 136, device="cuda"), torch.empty(16456, 136, dtype=BF16, device="cuda")
        sm90.products(d, w, h, dh=dh, dw=dw)
        close(dh, d.double() @ w.double())
        close(dw, d.double().T @ h.double())


@part("linear_logp forward alone")
def forward_alone() -> None:
    h, w, t = operands(ignored=0)
    right = reference(h, w, t, torch.ones(TOKENS, device="cuda"))
    with torch.no_grad():
        found = linear_logp(h, w, t, global_vocab_size=VOCABULARY, backend="sm90")
    close(found.logp, right[0], 2**-5)
    close(found.entropy, right[1], 2**-5)


@part("statistics with carried rows")
def carried_rows() -> None:
    """256 + 28 rows: the last ones come along with the tiles of the others, where enough take part."""
    for tokens, active in ((284, 284), (284, 270), (284, 200), (412, 400)):
        h, w = normal(tokens, 320, seed=1), normal(ROWS, 320, seed=2, scale=0.1)
        t = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(3)).cuda()
        leaves = -(-VOCABULARY // 128)
        stats, target = torch.zeros(3, tokens, leaves, device="cuda"), torch.zeros(tokens, device="cuda")
        kept = sm90.new_kept(tokens, VOCABULARY, torch.device("cuda"))
        ints = torch.tensor([active, 0], dtype=torch.int32, device="cuda")
        torch.ops.rlk.sm90_statistics(
            h, w[:VOCABULARY], t, None, 0, VOCABULARY, ints[:1], 0, ints[1:], stats, target, kept
        )
        logits = (h.double() @ w[:VOCABULARY].double().T)[:active]
        close(target[:active], logits.gather(1, t[:active, None])[:, 0])
        close(stats[0, :active].amax(1), logits.amax(1))
        for leaf in range(leaves):
            part_of = logits[:, leaf * 128 : (leaf + 1) * 128]
            e = (part_of - part_of.amax(1, keepdim=True)).exp()
            close(stats[1, :active, leaf], e.sum(1))
            close(stats[2, :active, leaf], (e * (part_of - part_of.amax(1, keepdim=True))).sum(1))
            close(kept[:active, leaf * 128 : (leaf + 1) * 128], e)


@part("statistics with carried rows of many tiles")
def carried_rows_alone() -> None:
    """Nothing is kept: carried logits meet in memory several times in each cluster."""
    h, w = normal(284, 320, seed=1), normal(20000, 320, seed=2, scale=0.1)
    t = torch.randint(0, 20000, (284,), generator=torch.Generator().manual_seed(3)).cuda()
    with torch.no_grad():
        found = linear_logp(h, w, t, backend="sm90")
    right = torch.log_softmax(h.double() @ w.double().T, -1)
    close(found.logp, right.gather(1, t[:, None])[:, 0], 2**-5)
    close(found.entropy, -(right.exp() * right).sum(-1), 2**-5)


@part("linear_logp of a shard")
def shard() -> None:
    """What a rank with half of the vocabulary computes, merged with the other half's statistics."""
    h, w, t = operands(ignored=0)
    right = reference(h, w, t, torch.ones(TOKENS, device="cuda"))
    half = 512
    stats, target = [], torch.zeros(TOKENS, device="cuda")
    for first, last in ((0, half), (half, VOCABULARY)):
        local = torch.where((t >= first) & (t < last), t - first, -1)
        leaves, own = sm90.leaf_stats(h, w[first : first + half], None, local, last - first)
        stats.append(leaves.double())
        target += own
    m, s, _ = torch.cat(stats, -1)
    top = m.max(-1, keepdim=True).values
    close(target.double() - top[:, 0] - ((m - top).exp() * s).sum(-1).log(), right[0], 2**-5)


@part("statistics of logits, tree, finish")
def given_logits() -> None:
    h, w, t = operands(ignored=0)
    right = reference(h, w, t, torch.ones(TOKENS, device="cuda"))
    logits = (h.double() @ w.double().T).float()
    leaves = -(-VOCABULARY // 128)
    stats, target = torch.empty(3, TOKENS, leaves, device="cuda"), torch.zeros(TOKENS, device="cuda")
    torch.ops.rlk.sm90_logits_statistics(logits, t, None, VOCABULARY, stats, target)
    top = stats[0].max(-1).values
    # Leaves 0 to 3 and 4 to 7, which one merge joins.
    nodes, out = torch.empty(3, 2, TOKENS, device="cuda"), torch.empty(4, TOKENS, device="cuda")
    ranges = torch.tensor([[0, 4], [4, leaves]], dtype=torch.int32, device="cuda")
    torch.ops.rlk.sm90_tree_nodes(stats, top, ranges, nodes)
    merges = torch.tensor([[0, 1]], dtype=torch.int32, device="cuda")
    torch.ops.rlk.sm90_finish(nodes, merges, 0, top, target, out)
    close(out[0], right[0], 2**-10)
    close(out[2], right[1], 2**-10)


def loss(mib: int, one_kernel: str, ignored: int = 9) -> None:
    h, w, t = operands(ignored)
    old, advantages = torch.full((TOKENS,), -6.0, device="cuda"), torch.linspace(-1, 1, TOKENS).cuda()
    exact = [x.double().requires_grad_() for x in (h, w)]
    z = torch.log_softmax(exact[0] @ exact[1][:VOCABULARY].T, -1)
    taken = (t >= 0).double()
    entropy = -(z.exp() * z).sum(-1)
    ratio = (z.gather(1, t.clamp(min=0)[:, None])[:, 0] - old).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.01 * entropy
    right = -(taken * objective / 37.0).sum()
    (right * 3).backward()
    before, sm90.WORKSPACE_BYTES = sm90.WORKSPACE_BYTES, mib << 20
    os.environ["RLK_SM90_TOKEN_LOSS"] = one_kernel
    try:
        hidden, weight = h.requires_grad_(), w.requires_grad_()
        value, _, _ = linear_policy_loss(
            hidden, weight, t, old, advantages, normalizer=37.0, entropy_weight=0.01, global_vocab_size=VOCABULARY,
            backend="sm90",
        )  # fmt: skip
        (value * 3).backward()
    finally:
        sm90.WORKSPACE_BYTES = before
        del os.environ["RLK_SM90_TOKEN_LOSS"]
    close(value.detach(), right.detach(), 2**-5)
    for found, double in zip((hidden, weight), exact, strict=True):
        close(grad(found), grad(double), 2**-4)


part("linear_policy_loss")(functools.partial(loss, 512, "1"))
part("linear_policy_loss, all rows")(functools.partial(loss, 512, "1", 0))
part("linear_policy_loss in chunks")(functools.partial(loss, 0, "1"))
part("linear_policy_loss, loss by torch")(functools.partial(loss, 512, "0"))


@part("weights of tokens")
def weights() -> None:
    t = operands()[2]
    mask = torch.linspace(0.1, 1.0, TOKENS, device="cuda")
    for own in (mask, None):
        plain = torch.ones_like(mask) if own is None else mask
        close(torch.ops.rlk.sm90_token_weights(t, -100, own), plain.masked_fill(t == -100, 0.0), 0.0)


@part("exp, log")
def elementary() -> None:
    x = torch.linspace(-20, 20, 1001, device="cuda")
    y = torch.empty_like(x)
    torch.ops.rlk.sm90_exp(x, y)
    close(y, x.double().exp())
    torch.ops.rlk.sm90_log(y, y)
    close(y, x)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="a name, or what names start with; default: all")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    wanted = arguments.parts or [""]
    chosen = [name for name in PARTS if any(name == w or (w not in PARTS and name.startswith(w)) for w in wanted)]
    if arguments.list:
        print("\n".join(chosen))
        return 0
    if not chosen:
        parser.error(f"no part starts with {arguments.parts}; --list names them")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("needs an H100 or H200")
    missing = sm90.supports(Request("linear_logp", "sm90", BF16))
    if missing:
        parser.error(missing)
    failed = 0
    for name in chosen:
        start, note = time.monotonic(), "ok"
        try:
            reason = PARTS[name]()
            torch.cuda.synchronize()
            note = f"skipped: {reason}" if reason else "ok"
        except Exception as error:  # noqa: BLE001 - the next part says whether the device still works
            failed, note = 1, f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            traceback.print_exc(limit=-3)
        print(f"{name}: {note} ({time.monotonic() - start:.1f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
