"""Numbers of tokens, sequences and keys compile no kernel anew: a step of a run meets a new number every time.

Triton makes a kernel for each class of an integer argument (1, a multiple of 16, anything else), for each alignment of
a pointer and for each constant. Its own binder says which, without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the binder", allow_module_level=True)

import triton
import triton.language as tl

from rl_kernel import audit, triton_utils

OPS = Path(__file__).parents[2] / "rl_kernel" / "ops"
BF16, F32 = torch.bfloat16, torch.float32
TOKENS = (1, 7, 16, 796, 1820, 6827, 8192)
SEQUENCES = (1, 2, 16, 5, 33, 128, 200)
H, HEADS, KV_HEADS, D, VOCAB = 4096, 32, 8, 128, 151936
FAMILIES = ["sm90", "gfx942"]


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype)


def part(*shape, dtype=F32):
    """A tensor that begins anywhere: rows of a batch are often a part of a longer tensor."""
    numel = torch.Size(shape).numel()
    return torch.empty(numel + 1, dtype=dtype)[1:].view(shape)


def ids(tokens):
    return torch.zeros(tokens + 1, dtype=torch.int64)[1:]


def backend(op, module="triton"):
    return importlib.import_module(f"rl_kernel.ops.{op}.{module}")


def over_2_gib(family, elements):
    """AMD's buffer instructions reach 2 GiB: for larger tensors there is another kernel."""
    return family == "gfx942" and elements * 4 >= 1 << 31


def linear(family, t, batch):
    op = backend("linear")
    yield row("linear", t), lambda: op.matmul(empty(t, H), empty(2 * H, H))
    yield row("linear", t), lambda: op.dgrad(empty(t, H), empty(H, 2 * H))
    yield None, lambda: op.wgrad(empty(t, H), empty(t, 2 * H))
    for segments in (2, 8):
        yield (segments, row("linear_segments", t)), lambda s=segments: op.matmul(empty(t, H), empty(H, H), segments=s)


def row(table, size):
    """Allowed: the launch table has a row for each class of sizes."""
    return sorted(triton_utils.launch_row(table, size).items())


def elementwise(family, t, batch):
    norm, rope, swiglu, embedding = (backend(name) for name in ("rms_norm", "rope", "swiglu", "embedding"))
    yield None, lambda: norm.forward(empty(t, H), empty(H), 1e-6, empty(t, H))
    yield None, lambda: norm.forward(empty(t, H), empty(H), 1e-6)
    yield "heads", lambda: norm.forward(empty(t, HEADS, D), empty(D), 1e-6)
    yield None, lambda: norm.backward(empty(t, H), empty(t, H), empty(t, H), empty(H), part(t))
    yield "no dres", lambda: norm.backward(empty(t, H), None, empty(t, H), empty(H), part(t))
    cache, qkv = empty(1000, D, dtype=F32), empty(t, HEADS + 2 * KV_HEADS, D)
    q, k = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS]
    # Allowed: few tokens are spread over more programs, and many are served whole.
    spread = rope._blocks(t, KV_HEADS, D, triton_utils.launch_row("rope", HEADS))
    whole = triton_utils.launch_row("qk_norm_rope", HEADS)["least"] <= t
    yield (spread, whole), lambda: rope.qk_norm_forward(q, k, empty(D), empty(D), 1e-6, ids(t), cache)
    spread = rope._blocks(t, HEADS, D, triton_utils.launch_row("rope", HEADS))
    yield spread, lambda: rope.backward(empty(t, HEADS, D), ids(t), cache)
    rstd = part(t, HEADS + KV_HEADS)
    yield None, lambda: rope.qk_norm_backward(empty(t, HEADS, D), q, empty(D), rstd[:, :HEADS], ids(t), cache)
    yield None, lambda: swiglu.forward(empty(t, 6 * H))
    yield None, lambda: swiglu.backward(empty(t, 3 * H), empty(t, 6 * H))
    yield None, lambda: embedding.forward(ids(t), empty(1000, H))
    yield None, lambda: embedding.backward(empty(t, H), ids(t), 1000)
    yield None, lambda: backend("collectives").reduce_parts(empty(4, t, H, dtype=F32), BF16)


def attention(family, t, batch):
    op, cu = backend("attention"), torch.zeros(batch + 2, dtype=torch.int32)[1:]
    q, kv, lse = empty(t, HEADS, D), empty(t, KV_HEADS, D), empty(t, HEADS, dtype=F32)
    yield "packed", lambda: op.varlen_forward(q, kv, kv, cu)
    yield None, lambda: op.varlen_backward(q, q, kv, kv, q, lse, cu)
    cache = empty(100, 16, KV_HEADS, D)
    lens, table = part(batch, dtype=torch.int32), torch.zeros((batch, 63 + t), dtype=torch.int32)
    for split in (True, False):
        yield (
            (split, row("attention_decode", batch)),
            lambda s=split: op.paged_forward(q, cache, cache, table, cu, lens, split=s, max_seq_len=t + 1),
        )
    if family == "sm90":
        forward, backward = backend("attention", "sm90_forward").forward, backend("attention", "sm90_backward").backward
        yield None, lambda: forward(q, kv, kv, cu, cu, 0.1, HEADS // KV_HEADS)
        yield None, lambda: backward(q, q, kv, kv, q, lse, cu, cu, 0.1, HEADS // KV_HEADS)


def logp(family, t, batch):
    op, size = backend("logp"), over_2_gib(family, t * VOCAB)
    x, temperature = empty(t, VOCAB, dtype=F32), part(t)
    leaves = VOCAB // 128
    stats, three = empty(3, t, leaves, dtype=F32), part(3, t)
    yield size, lambda: op.leaf_stats(x, temperature, VOCAB)
    yield None, lambda: op.whole_rows(stats, temperature)
    yield size, lambda: op.write_dlogits(x, temperature, ids(t), three, three, VOCAB, empty(t, VOCAB, dtype=F32))
    yield size, lambda: op.log_softmax(x, temperature, three[:2], VOCAB)
    yield None, lambda: op.tree_nodes(stats, temperature, [(0, 1024), (0, 1023), (1, 1024)], 3)
    for first in range(3):
        yield None, lambda s=first: op.finish(torch.zeros(3, 2, t), [], s, temperature, temperature)
    sampling, seeds = backend("sampling"), part(t, dtype=torch.int64)
    yield size, lambda: sampling.sample(x, temperature, part(t, dtype=torch.float64), VOCAB)
    yield ("given", size), lambda: sampling.draw(x, part(t, dtype=torch.float64))
    yield None, lambda: sampling.fill_uniforms(seeds, seeds, empty(t, dtype=torch.float64))


def linear_logp(family, t, batch):
    op, vocab = backend("linear_logp"), 19072
    hidden, weight, temperature, three = empty(t, H), empty(vocab, H), part(t), part(3, t)
    size = row("linear", t)
    yield size, lambda: op.leaf_stats(hidden, weight, temperature, ids(t), vocab)
    yield (
        ("backward", size),
        lambda: op.backward(hidden, weight, temperature, ids(t), three, three, [(0, vocab)]),
    )

    def both(kept):
        op.tiles.leaf_stats(op.linear, hidden, weight, temperature, ids(t), vocab, kept)
        op.tiles.backward(op.linear, hidden, weight, temperature, ids(t), three, three, [(0, vocab)], kept=kept)

    for ranges in ([(0, 16384), (16384, vocab)], [(0, vocab)]):
        yield (
            ("kept", size),
            lambda ranges=ranges: both(op.tiles.Kept(t, ranges, hidden.device)),
        )


GROUPS = [linear, elementwise, attention, logp, linear_logp]


def kernels_of(group, family):
    """What each kernel is compiled for, by call and size class: sets, as a call may launch a kernel more than once."""
    found = defaultdict(lambda: defaultdict(set))
    for tokens, sequences in zip(TOKENS, SEQUENCES):
        with audit.record(family):
            calls = list(group(family, tokens, min(sequences, tokens)))
        for number, (size, call) in enumerate(calls):
            with audit.record(family) as launches:
                call()
            keys = defaultdict(set)
            for launch in launches:
                keys[launch.name].add(launch.identity(family))
            for name, those in keys.items():
                found[name][number, repr(size)].add(frozenset(those))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_no_number_of_tokens_has_a_kernel_of_its_own(group, family):
    for name, classes in kernels_of(group, family).items():
        for case, keys in classes.items():
            assert len(keys) == 1, f"{name} {case}:\n" + "\n\n".join("\n".join(sorted(some)) for some in keys)


def test_every_launched_kernel_is_covered():
    launched = {
        f"{path.parent.name}.{path.stem}.{name}"
        for path in OPS.glob("*/*.py")
        for name in re.findall(r"^ +(_[a-z]\w*)\[.*\]\(", path.read_text(encoding="utf-8"), re.M)
    }
    covered = {name for group in GROUPS for name in kernels_of(group, "sm90")}
    assert launched and launched <= covered, launched - covered


@triton.jit
def _specialized(x_ptr, rows, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr + rows))


def test_a_kernel_that_follows_the_number_of_tokens_is_found():
    def group(family, tokens, sequences):
        yield None, lambda: _specialized[(1,)](empty(tokens), tokens, empty(1))

    (classes,) = kernels_of(group, "sm90").values()
    assert [len(keys) for keys in classes.values()] == [3]


def test_the_audit_compiles_what_a_launch_gets():
    with audit.record("sm90") as launches:
        for tokens in (1, 16):
            _specialized[(1,)](part(4), tokens, empty(1))
    one, sixteen = (launch.specialization("sm90") for launch in launches)
    assert one[1] == ("constexpr", 1) and sixteen[1] == ("i32", "D")
    assert one[0] == ("*fp32", "") and one[2] == ("*bf16", "D")
    assert "constexpr" not in audit.compile_launch(launches[1], "sm90").src.signature.values()
