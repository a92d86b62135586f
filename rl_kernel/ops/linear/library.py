"""Matrix products by cuBLASLt, set up and probed to keep the contract (see :mod:`rl_kernel.cublaslt`)."""

from __future__ import annotations

import torch

from rl_kernel import cublaslt
from rl_kernel.errors import ContractError
from rl_kernel.ops.linear import triton as own
from rl_kernel.registry import Request

uses_library = True  # products go to cuBLASLt, class by class: probe them before a capture


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    if request.family == "sm90" and request.dtype is not torch.bfloat16:
        return f"{request.op}: GPU families define bfloat16 products only, not {request.dtype}"
    return cublaslt.unavailable(request.family)


def _library(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    return torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


def _library_add(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)


def _usable(x: torch.Tensor) -> torch.Tensor:
    """BLAS reads row- or column-major matrices."""
    return x if 1 in x.stride() else x.contiguous()


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out = a @ b`` in one ascending chain; ``out`` bf16 or fp32, contiguous."""
    if out.numel() == 0:
        return out
    a, b = _usable(a), _usable(b)
    if cublaslt.trusted(
        a,
        b,
        out.dtype,
        lambda x, y, _: _library(x, y, torch.empty((x.shape[0], y.shape[1]), dtype=out.dtype, device=x.device)),
        lambda x, y, _: own.multiply(x, y, out_dtype=out.dtype),
    ):
        return _library(a, b, out)
    return own.multiply(a, b, out=out)


def add_product(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """``total += a @ b``: the product in one ascending chain, then one fp32 addition; ``total`` fp32, contiguous."""
    if total.numel() == 0:
        return total
    a, b = _usable(a), _usable(b)
    if cublaslt.trusted(
        a,
        b,
        torch.float32,
        lambda x, y, c: _library_add(x, y, c),  # type: ignore[arg-type]
        lambda x, y, c: own.multiply(x, y, out=c, add=True),
        accumulate=True,
    ):
        return _library_add(a, b, total)
    return own.multiply(a, b, out=total, add=True)


def _tree(a: torch.Tensor, b: torch.Tensor, leaves: list[tuple[int, int]]) -> torch.Tensor:
    """fp32 subtree over ``leaves`` (ranges of k): pairs through beta = 1, larger subtrees by one addition."""
    if len(leaves) == 1:
        begin, end = leaves[0]
        total = torch.empty((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
        return product(a[:, begin:end], b[begin:end], total)
    half = len(leaves) // 2
    left = _tree(a, b, leaves[:half])
    if half == 1:
        begin, end = leaves[1]
        return add_product(a[:, begin:end], b[begin:end], left)
    return left.add_(_tree(a, b, leaves[half:]))


def _segmented(
    a: torch.Tensor, b: torch.Tensor, segments: int, parts: int, out_dtype: torch.dtype | None
) -> torch.Tensor:
    k = a.shape[1]
    if k % (segments * parts):
        raise ContractError(
            f"linear: a reduction of {k} does not divide into {segments} segments of {parts} part(s); "
            "virtual_tp must divide the dimension"
        )
    if segments == 1:
        return product(a, b, torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype, device=a.device))
    if a.shape[0] <= own.SMALL_M or parts > 1:
        # Few rows: one launch over all segments beats a product a segment. Several parts: a leaf is not one range.
        return own.multiply(a, b, segments=segments, parts=parts, out_dtype=out_dtype)
    size = k // segments
    total = _tree(a, b, [(s * size, s * size + size) for s in range(segments)])
    return total if out_dtype is torch.float32 else total.to(out_dtype or a.dtype)


def matmul(
    x: torch.Tensor, w: torch.Tensor, *, segments: int = 1, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``round(tree_s(x[:, segment s] @ w[:, segment s]^T))``; x [M, K], w [N, K] -> [M, N]."""
    return _segmented(x, w.t(), segments, 1, out_dtype)


def dgrad(
    dy: torch.Tensor,
    w: torch.Tensor,
    *,
    segments: int = 1,
    parts: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """dX [M, K] = dy [M, N] @ w [N, K], N in ``segments`` leaves of ``parts`` slices each."""
    return _segmented(dy, w, segments, parts if segments > 1 else 1, out_dtype)


def wgrad(dy: torch.Tensor, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """dW [N, K] = dy^T @ x, tokens ascending in one chain; dy [M, N], x [M, K]."""
    return _segmented(dy.t(), x, 1, 1, out_dtype)
