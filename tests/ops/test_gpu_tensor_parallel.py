"""Two GPUs, tensor parallel 2 against tensor parallel 1 with the same segments: forward and backward, bit for bit."""

from __future__ import annotations

import os

import pytest
import torch

from rl_kernel import column_parallel_linear, embedding, linear
from rl_kernel.ops import collectives

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32
TOKENS, HIDDEN, WIDE = 384, 1024, 3072


def wrong(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    view = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return int((a.contiguous().view(view) != b.contiguous().view(view)).sum())


def normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=generator) * scale).to(BF16)


def run(function, inputs: list[torch.Tensor], dy: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients of ``inputs``."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def share(x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return x.chunk(2, dim)[rank].contiguous()


def differences(name: str, left: list[torch.Tensor], right: list[torch.Tensor]) -> dict[str, int]:
    parts = ("y", "dx", "dw")
    found = {f"{name} {part}": wrong(a, b) for part, a, b in zip(parts, left, right, strict=True)}
    return {key: count for key, count in found.items() if count}


def _row(group) -> dict:
    rank, bad = group.rank(), {}
    for tokens in (2, 64, TOKENS):
        x, w = normal(tokens, WIDE, seed=1), normal(HIDDEN, WIDE, seed=2, scale=0.02)
        dy = normal(tokens, HIDDEN, seed=3)
        for segments in (2, 4, 8):
            y, dx, dw = run(lambda x, w, s=segments: linear(x, w, segments=s), [x, w], dy)
            own = [share(x, 1, rank), share(w, 1, rank)]
            for sp in (False, True):
                expected = [share(y, 0, rank) if sp else y, share(dx, 1, rank), share(dw, 1, rank)]
                found = run(
                    lambda x, w, s=segments, sp=sp: linear(x, w, segments=s, tp_group=group, sequence_parallel=sp),
                    own,
                    share(dy, 0, rank) if sp else dy,
                )
                bad |= differences(f"row T={tokens} S={segments} SP={sp}", found, expected)
    return bad


def _column(group) -> dict:
    rank, bad = group.rank(), {}
    x, w = normal(TOKENS, HIDDEN, seed=1), normal(WIDE, HIDDEN, seed=2, scale=0.02)
    dy = normal(TOKENS, WIDE, seed=3)
    for segments in (2, 4):
        y, dx, dw = run(lambda x, w, s=segments: column_parallel_linear(x, w, grad_segments=s), [x, w], dy)
        for sp in (False, True):
            expected = [share(y, 1, rank), share(dx, 0, rank) if sp else dx, share(dw, 0, rank)]
            found = run(
                lambda x, w, s=segments, sp=sp: column_parallel_linear(
                    x, w, grad_segments=s, tp_group=group, sequence_parallel=sp
                ),
                [share(x, 0, rank) if sp else x, share(w, 0, rank)],
                share(dy, 1, rank),
            )
            bad |= differences(f"column S={segments} SP={sp}", found, expected)
    # A gate half and an up half, each sharded on its own.
    rows = torch.cat([part.chunk(2)[rank] for part in torch.arange(WIDE, device="cuda").chunk(2)])
    y, dx, dw = run(lambda x, w: column_parallel_linear(x, w, grad_segments=2, parts=2), [x, w], dy)
    found = run(
        lambda x, w: column_parallel_linear(x, w, grad_segments=2, parts=2, tp_group=group),
        [x, w[rows].contiguous()],
        dy[:, rows].contiguous(),
    )
    return bad | differences("gate_up", found, [y[:, rows], dx, dw[rows]])


def _embedding(group) -> dict:
    rank, bad = group.rank(), {}
    vocabulary = 2048
    generator = torch.Generator(device="cuda").manual_seed(4)
    ids = torch.randint(0, vocabulary, (TOKENS,), device="cuda", generator=generator)
    w, dy = normal(vocabulary, HIDDEN, seed=5), normal(TOKENS, HIDDEN, seed=6)
    y, dw = run(lambda w: embedding(ids, w), [w], dy)
    for sp in (False, True):
        found = run(
            lambda w, sp=sp: embedding(
                ids, w, tp_group=group, vocab_start_index=rank * vocabulary // 2, sequence_parallel=sp
            ),
            [share(w, 0, rank)],
            share(dy, 0, rank) if sp else dy,
        )
        expected = [share(y, 0, rank) if sp else y, share(dw, 0, rank)]
        for part, a, b in zip(("y", "dw"), found, expected, strict=True):
            if wrong(a, b):
                bad[f"embedding SP={sp} {part}"] = wrong(a, b)
    return bad


def _linear_logp(group) -> dict:
    from rl_kernel import registry
    from rl_kernel.ops.linear_logp import linear_logp, sm90, tiles
    from rl_kernel.ops.linear_logp.policy import linear_policy_loss

    rank, bad, ran = group.rank(), {}, []
    tokens, hidden, rows, vocabulary = 1000, 512, 20480, 20300
    h, w = normal(tokens, hidden, seed=1), normal(rows, hidden, seed=2, scale=0.02)
    generator = torch.Generator(device="cuda").manual_seed(3)
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=generator)
    some = targets.clone()
    some[7:11] = -100
    upstream = [torch.randn(tokens, device="cuda", generator=generator) for _ in range(3)]
    own = share(w, 0, rank)
    common = {"temperature": 0.7, "global_vocab_size": vocabulary, "grad_segments": 2}
    sharded = {**common, "tp_group": group, "vocab_start_index": rank * rows // 2}

    def both(weight: torch.Tensor, taken: torch.Tensor, **arguments) -> list[torch.Tensor]:
        a, b = h.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear_logp(a, b, taken, **arguments)
        return [x.detach() for x in out] + list(torch.autograd.grad(tuple(out), (a, b), upstream))

    def policy(weight: torch.Tensor, taken: torch.Tensor, **arguments) -> list[torch.Tensor]:
        a, b = h.clone().requires_grad_(), weight.clone().requires_grad_()
        old, advantages = upstream[0].mul(0.01).sub(10), upstream[1]
        loss, logp, _ = linear_policy_loss(a, b, taken, old, advantages, **arguments)
        return [logp, *torch.autograd.grad(loss, (a, b))]  # the loss is a sum over chunks of tokens, for people

    before = sm90.WORKSPACE_BYTES, tiles.KEPT_BYTES
    missing = sm90.supports(registry.Request("linear_logp", "sm90", BF16))
    # Of 20300 columns 32 MiB hold the first block, and all of a rank's half; 4 MiB hold nothing.
    schedules = [("library", 512, both), ("library", 32, both), ("triton", 512, both), ("triton", 4, both)]
    if missing is None:
        schedules += [("sm90", 512, both), ("sm90", 1, both), ("sm90", 512, policy), ("sm90", 8, policy)]
    for backend, mib, call in schedules:
        for taken in (some, targets):
            name = f"{backend} {mib} MiB {call.__name__}, {'some' if taken is some else 'all'} rows"
            try:
                sm90.WORKSPACE_BYTES = tiles.KEPT_BYTES = mib << 20
                one, two = call(w, taken, backend=backend, **common), call(own, taken, backend=backend, **sharded)
            finally:
                sm90.WORKSPACE_BYTES, tiles.KEPT_BYTES = before
            one[-1] = share(one[-1], 0, rank)
            counts = [wrong(a, b) for a, b in zip(two, one, strict=True)]
            ran.append(name)
            if any(counts):
                bad[name] = counts
    return {"bad": bad, "ran": ran, "missing": missing}


def _control(group) -> dict[str, int]:
    """Another number of segments is another sum."""
    x, w = normal(TOKENS, WIDE, seed=1), normal(HIDDEN, WIDE, seed=2, scale=0.02)
    own = [share(x, 1, group.rank()), share(w, 1, group.rank())]
    two = linear(*own, segments=2, tp_group=group, out_dtype=F32)
    return {
        "against one segment": wrong(two, linear(x, w, segments=1, out_dtype=F32)),
        "against two": wrong(two, linear(x, w, segments=2, out_dtype=F32)),
    }


def _gathering(group, function: str):
    """The same through NCCL's gather."""
    from tests.ops.test_gpu_collectives import forced

    with forced(group, "gather"):
        return globals()[function](group)


@pytest.mark.parametrize("function", [_row, _column, _embedding], ids=lambda f: f.__name__.strip("_"))
def test_two_ranks_equal_one(two_gpus, function):
    assert two_gpus.run(function) == [{}, {}]


@pytest.mark.parametrize("function", ["_row", "_column", "_embedding"])
def test_two_ranks_equal_one_without_peer_memory(two_gpus, function):
    assert two_gpus.run(_gathering, function) == [{}, {}]


def test_linear_logp_of_two_ranks_equals_one(two_gpus):
    for found in two_gpus.run(_linear_logp):
        assert not found["bad"] and len(found["ran"]) >= 8, found
        assert len(found["ran"]) == 16 or found["missing"], found


def test_segments_are_a_contract_field(two_gpus):
    for found in two_gpus.run(_control):
        assert found["against two"] == 0 and found["against one segment"] > 1000, found


def _report(group) -> dict:
    x = torch.ones(8, device="cuda")
    collectives.all_reduce(x, group)
    return collectives.report()[group.group_name]


def test_peer_memory_was_used(two_gpus):
    """Unless the environment says otherwise, two GPUs of one machine use peer memory."""
    expected = "gather" if os.environ.get("RLK_COLLECTIVES") == "gather" else "peer"
    for found in two_gpus.run(_report):
        assert found["path"] == expected, found
