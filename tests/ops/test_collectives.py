"""all_reduce, reduce_scatter, all_gather: one tree, whatever the transport."""

from __future__ import annotations

import pytest
import torch

from rl_kernel.errors import ContractError
from rl_kernel.ops.collectives import all_gather, all_reduce, copy_to_group, native, reduce_scatter, reference
from rl_kernel.registry import Request

SIZES = (1, 2, 3, 4, 8)
needs_native = pytest.mark.skipif(
    native.supports(Request("collectives", "cpu", torch.float32)) is not None, reason="extension not built"
)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits(a) == bits(b)).all())


def payload(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(shape, generator=generator) * 10 ** torch.randint(-3, 4, shape, generator=generator).float()
    return x.to(dtype)


def test_reference_is_the_tree():
    p = payload(0, (8, 5))
    by_hand = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))
    assert same(reference.reduce_parts(p, torch.float32), by_hand)
    assert same(reference.reduce_parts(p[:3], torch.float32), (p[0] + p[1]) + (p[2] + 0.0))


@needs_native
@pytest.mark.parametrize("ranks_", SIZES)
@pytest.mark.parametrize("in_dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("out_dtype", (torch.float32, torch.bfloat16))
def test_native_equals_reference(ranks_, in_dtype, out_dtype):
    for numel in (0, 1, 5, 2048, 70001):
        parts = payload(0, (ranks_, numel), in_dtype)
        parts.view(-1)[: numel // 7] = -0.0
        assert same(native.reduce_parts(parts, out_dtype), reference.reduce_parts(parts, out_dtype))


SHAPES = ((24, 7), (24, 5000), (0, 3))


def _all(group):
    """Everything at once on one rank: forward and gradient of each collective, for every shape."""
    return [[t.detach().numpy() for t in _one(group, shape)] for shape in SHAPES]


def _one(group, shape):
    rank = group.rank()
    x = payload(rank, shape).requires_grad_()
    total = all_reduce(x, group, out_dtype=torch.bfloat16)
    (grad_reduce,) = torch.autograd.grad(total, x, payload(50, shape, torch.bfloat16))
    rows = reduce_scatter(x, group)
    (grad_scatter,) = torch.autograd.grad(rows, x, payload(60 + rank, tuple(rows.shape)))
    gathered = all_gather(x, group)
    (grad_gather,) = torch.autograd.grad(gathered, x, payload(70 + rank, tuple(gathered.shape)))
    own = all_gather(x, group, reduce_grad=False)
    (grad_own,) = torch.autograd.grad(own, x, payload(80, tuple(own.shape)))
    copied = copy_to_group(x, group)
    (grad_copy,) = torch.autograd.grad(copied, x, payload(90 + rank, shape))
    return total.float(), grad_reduce, rows, grad_scatter, gathered, grad_gather, grad_own, copied, grad_copy


@pytest.mark.parametrize("size", SIZES)
def test_real_processes(ranks, size):
    for rank, results in enumerate(ranks.run(size, _all)):
        for shape, result in zip(SHAPES, results, strict=True):
            _check_one(size, rank, shape, map(torch.from_numpy, result))


def _check_one(size, rank, shape, result):
    def tree(base: int, shape_: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return reference.reduce_parts(torch.stack([payload(base + r, shape_) for r in range(size)]), dtype)

    n, full = shape[0] // size, (size * shape[0], *shape[1:])
    total, grad_reduce, rows, grad_scatter, gathered, grad_gather, grad_own, copied, grad_copy = result
    assert same(total, tree(0, shape, torch.bfloat16).float())
    assert same(grad_reduce, payload(50, shape, torch.bfloat16).float())
    assert same(rows, tree(0, shape)[rank * n : rank * n + n])
    assert same(grad_scatter, torch.cat([payload(60 + r, (n, *shape[1:])) for r in range(size)]))
    assert same(gathered, torch.cat([payload(r, shape) for r in range(size)]))
    assert same(grad_gather, tree(70, full)[rank * shape[0] : (rank + 1) * shape[0]])
    assert same(grad_own, payload(80, full)[rank * shape[0] : (rank + 1) * shape[0]])
    assert same(copied, payload(rank, shape))
    assert same(grad_copy, tree(90, shape))


def test_order_matters():
    """Negative control: neither a sequential sum nor torch's sum gives the tree's bits."""
    parts = payload(0, (8, 4096))
    sequential = parts[0]
    for part in parts[1:]:
        sequential = sequential + part
    assert not same(sequential, reference.reduce_parts(parts, torch.float32))
    assert not same(parts.sum(0), reference.reduce_parts(parts, torch.float32))


def _nan_payload(group):
    x = torch.tensor([float("nan"), 1.0, -0.0])
    return all_reduce(x if group.rank() == 1 else torch.zeros(3), group)


def test_nan_reaches_every_rank(ranks):
    for result in ranks.run(4, _nan_payload):
        assert result[0].isnan() and result[1] == 1 and not result[2].isnan()


def _opcheck(group):
    from rl_kernel.ops.collectives import op

    name, x = op.group_name(group), payload(0, (8, 3)).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(op._all_reduce.registered, (x, name, torch.bfloat16), test_utils=tests)
    torch.library.opcheck(op._reduce_scatter.registered, (x, name, torch.float32), test_utils=tests)
    torch.library.opcheck(op._all_gather.registered, (x, name, True), test_utils=tests)


def test_opcheck(ranks):
    ranks.run(2, _opcheck)


def test_without_a_group():
    x = payload(0, (4, 3))
    assert same(all_reduce(x), x) and same(reduce_scatter(x), x) and same(all_gather(x), x)
    assert same(all_reduce(x, out_dtype=torch.bfloat16), x.to(torch.bfloat16))


def test_errors_name_the_field():
    with pytest.raises(ContractError, match="float32 or bfloat16"):
        all_reduce(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ContractError, match="at least one dimension"):
        all_gather(torch.tensor(1.0))


def _bad_rows(group):
    with pytest.raises(ContractError, match="multiple of the group size"):
        reduce_scatter(torch.zeros(3, 2), group)


def test_rows_must_divide(ranks):
    ranks.run(2, _bad_rows)
