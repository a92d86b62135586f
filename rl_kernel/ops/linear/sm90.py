"""Matrix products on Hopper: our kernels (csrc/sm90) where the launch table says so, the library elsewhere.

* at most 64 rows: ``few_rows``, segments included. On an H200 it is behind the library, except in several segments of
  at most 16 rows (``reports/linear_logp_sm90.md``), which is where the table chooses it;
* K in 2, 4 or 8 segments and more rows: ``segments``, one launch that keeps the tree's values on the chip. Its bits are
  tested, its time is not measured yet, which is why ``auto`` does not choose this backend (``registry.OPT_IN``).

The launch table says which sizes go to which (``linear_sm90``, rows by M: ``single`` for one segment, ``segments`` for
several, ``dgrad`` for the gradient of x in several): data, so speed alone changes with it. All have the same bits.
"""

from __future__ import annotations

import torch

from rl_kernel.ops.linear import library
from rl_kernel.ops.linear.library import add_product, product
from rl_kernel.ops.linear_logp import sm90 as extension
from rl_kernel.registry import Request
from rl_kernel.triton_utils import launch_row

__all__ = ["add_product", "dgrad", "matmul", "product", "supports", "wgrad"]

FEW_ROWS = 64
uses_library = True


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    return extension.supports(request) or library.supports(request)


def _readable(x: torch.Tensor) -> bool:
    """Whether the copy engine can read ``x``: contiguous rows, each of them aligned."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and x.shape[1] % 8 == 0


def _serves(use: str, a: torch.Tensor, b: torch.Tensor, columns: int, segments: int, parts: int) -> bool:
    (m, k), few = a.shape, a.shape[0] <= FEW_ROWS and use != "dgrad"
    step = 128 if few else 64
    if segments == 1:
        fits = few
    else:
        fits = segments in (2, 4, 8) and k > 0 and k % (segments * parts * step) == 0 and columns % 8 == 0
    return m > 0 and fits and _readable(a) and _readable(b) and launch_row("linear_sm90", m)[use] == 1


def matmul(
    x: torch.Tensor, w: torch.Tensor, *, segments: int = 1, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``round(tree_s(x[:, segment s] @ w[:, segment s]^T))``; x [M, K], w [N, K] -> [M, N]."""
    if not _serves("single" if segments == 1 else "segments", x, w, w.shape[0], segments, 1):
        return library.matmul(x, w, segments=segments, out_dtype=out_dtype)
    out = torch.empty((x.shape[0], w.shape[0]), dtype=out_dtype or x.dtype, device=x.device)
    if x.shape[0] <= FEW_ROWS:
        torch.ops.rlk.sm90_few_rows(x, w, segments, out)
    else:
        torch.ops.rlk.sm90_segments(x, w, False, segments, 1, out)
    return out


def dgrad(
    dy: torch.Tensor,
    w: torch.Tensor,
    *,
    segments: int = 1,
    parts: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """dX [M, K] = dy [M, N] @ w [N, K], N in ``segments`` leaves of ``parts`` slices each."""
    if segments == 1 or not _serves("dgrad", dy, w, w.shape[1], segments, parts):
        return library.dgrad(dy, w, segments=segments, parts=parts, out_dtype=out_dtype)
    out = torch.empty((dy.shape[0], w.shape[1]), dtype=out_dtype or dy.dtype, device=dy.device)
    torch.ops.rlk.sm90_segments(dy, w, True, segments, parts, out)
    return out


def wgrad(dy: torch.Tensor, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """dW [N, K] = dy^T @ x, tokens ascending in one chain; dy [M, N], x [M, K]."""
    return library.wgrad(dy, x, out_dtype=out_dtype)
