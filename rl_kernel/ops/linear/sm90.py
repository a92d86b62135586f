"""Matrix products on Hopper: our kernels (csrc/sm90) where they are the fastest, the library elsewhere.

* at most 128 rows: ``few_rows``, segments included; for one segment in the shapes that the launch table names;
* K in 2, 4 or 8 segments and more rows: ``segments``, one launch (tiles of 128 x 128, the tree on the chip).

Which kernel serves what is data, so speed alone changes with it. Rows of the launch table:

* ``linear_few_NxK_sm90`` for one segment, ``linear_few_sm90`` for several, by M: rows of w a tile (0: the library),
  blocks a processor, and ``dependent``: whether the kernel may start while the one in front of it still runs. Such a
  launch prefetches weights into the L2, where later writes stay visible, and waits for all work in front of it before
  it reads or writes anything else, in streams and in graphs alike;
* ``linear_library_NxK_sm90`` for one segment and bf16 results, by M: an algorithm of cuBLASLt by its attributes where
  the library's own choice is slower (id 0: its own choice). Rows name single values of M, those that were
  measured, and serve cuBLASLt 13.1 alone: with another version the library chooses, slower at these sizes;
* ``linear_segments_sm90`` by tiles of 128 x 256, which a cluster makes: the longest segment that ``segments`` serves;
  each longer one is a product of the library, except in several parts, for which the library has none.

Bits: all kernels have the contract's. Each is compared with the Triton backend when this backend is first asked for;
one that differs is not used (a warning, :func:`rl_kernel.cublaslt.report` and the fallback count name it). So it is
with a named algorithm that differs or that the loaded cuBLASLt lacks; each is compared size by size, before its use.
"""

from __future__ import annotations

import functools
import warnings

import torch

from rl_kernel import cublaslt
from rl_kernel.ops.linear import library
from rl_kernel.ops.linear import triton as own
from rl_kernel.ops.linear.library import add_product, product
from rl_kernel.ops.linear_logp import sm90 as extension
from rl_kernel.registry import Request
from rl_kernel.triton_utils import has_launch_rows, launch_row

__all__ = ["add_product", "dgrad", "matmul", "product", "supports", "wgrad"]

FEW_ROWS = 128  # at most
MANY_ROWS = 65  # at least, for ``segments``
# The launch table's numbers of algorithms are those of cuBLASLt 13.1. Elsewhere they may mean nothing, and a tile that
# the library does not have has been seen to end the process (SIGFPE inside the library).
ALGORITHM_VERSION = 1301
ALGORITHM = ("id", "tile", "swizzle", "custom", "stages", "inner", "cluster")
uses_library = True


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    reason = extension.supports(request) or library.supports(request)
    if reason is None and torch.cuda.is_available():
        _probe()
    return reason


def _readable(x: torch.Tensor) -> bool:
    """Whether the copy engine can read ``x``: contiguous rows, each of them aligned."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and x.shape[1] % 8 == 0


def _few(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, segments: int, how: dict[str, int]) -> torch.Tensor:
    torch.ops.rlk.sm90_few_rows(x, w, segments, how["rows"], how["per_processor"], bool(how["dependent"]), out)
    return out


def _segments(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, transposed: bool, segments: int, parts: int
) -> torch.Tensor:
    torch.ops.rlk.sm90_segments(a, b, transposed, segments, parts, out)
    return out


@functools.cache
def _probe() -> frozenset[str]:
    """Kernels whose bits differ from the Triton backend's, compared once a process: "few 8 rows 32", "segments", ..."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def empty(*shape: int) -> torch.Tensor:  # engines build their models under another default dtype
        return torch.empty(shape, dtype=torch.float32, device="cuda")

    def heavy(*shape: int) -> torch.Tensor:
        x, y = (torch.randn(shape, dtype=torch.float32, device="cuda", generator=generator) for _ in range(2))
        return (x * y.exp_()).bfloat16()

    def expected(a: torch.Tensor, b: torch.Tensor, segments: int) -> torch.Tensor:
        size = a.shape[1] // segments
        leaves = [empty(a.shape[0], b.shape[1]) for _ in range(segments)]
        for s, leaf in enumerate(leaves):
            k = slice(s * size, s * size + size)
            own.multiply_as(launch_row("linear", 64), a[:, k], b[k], leaf)
        while len(leaves) > 1:
            leaves = [left + right for left, right in zip(leaves[::2], leaves[1::2], strict=True)]
        return leaves[0]

    def compare(name: str, found: torch.Tensor, right: torch.Tensor) -> None:
        counts[name] = counts.get(name, 0) + int((found.view(torch.int32) != right.view(torch.int32)).sum())

    counts: dict[str, int] = {}
    w = heavy(272, 2048)
    for m in (8, 16, 32, 64, 128):
        x = heavy(m, 2048)
        for segments, rows in ((1, 32), (1, 64), (2, 32), (8, 32)):
            how = {"rows": rows, "per_processor": 1, "dependent": 0}
            found = _few(x, w, empty(m, 272), segments, how)
            compare(f"few {m} rows {rows}", found, expected(x, w.t(), segments))
    a, w = heavy(200, 2048), heavy(528, 2048)
    for transposed, b in ((False, w), (True, w.t().contiguous())):
        for segments in (2, 4, 8):
            found = _segments(a, b, empty(200, 528), transposed, segments, 1)
            compare("segments", found, expected(a, w.t(), segments))
    bad = {name: count for name, count in counts.items() if count}
    if bad:
        cublaslt.replace({f"linear sm90 {name}": f"{count} elements differ" for name, count in bad.items()})
        warnings.warn(f"kernels of csrc/sm90 differ from the contract and are not used: {bad}", stacklevel=2)
    return frozenset(bad)


def _few_row(x: torch.Tensor, w: torch.Tensor, segments: int) -> dict[str, int] | None:
    """How ``few_rows`` serves ``x w^T``, or ``None``."""
    (m, k), n = x.shape, w.shape[0]
    if not 0 < m <= FEW_ROWS or k == 0 or k % (segments * 256) or segments not in (1, 2, 4, 8) or n % 8:
        return None
    table = "linear_few_sm90" if segments > 1 else f"linear_few_{n}x{k}_sm90"
    if not (has_launch_rows(table) and _readable(x) and _readable(w)):
        return None
    row = launch_row(table, m)
    tokens = 8 if m <= 8 else 1 << (m - 1).bit_length()
    return row if row["rows"] and f"few {tokens} rows {row['rows']}" not in _probe() else None


def _by_algorithm(x: torch.Tensor, w: torch.Tensor, row: dict[str, int]) -> torch.Tensor:
    out = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
    try:
        torch.ops.rlk.sm90_library(x, w, *(row[name] for name in ALGORITHM), out)
    except RuntimeError as error:
        if "no such algorithm" in str(error):
            raise cublaslt.MissingAlgorithmError(str(error).splitlines()[0]) from error
        raise
    return out


def algorithm(
    x: torch.Tensor, w: torch.Tensor, segments: int = 1, out_dtype: torch.dtype | None = None
) -> dict[str, int] | None:
    """The row of the launch table that names an algorithm for ``x w^T``, probed; ``None``: the library chooses."""
    (m, k), n = x.shape, w.shape[0]
    table = f"linear_library_{n}x{k}_sm90"
    if segments != 1 or m == 0 or out_dtype not in (None, torch.bfloat16) or not has_launch_rows(table):
        return None
    if (cublaslt.version() or 0) // 100 != ALGORITHM_VERSION:
        return None
    row = launch_row(table, m)
    # Contiguous and aligned as the matrices it was measured with: other strides are other problems for the library.
    if not row["id"] or not all(a.is_contiguous() and a.data_ptr() % 256 == 0 for a in (x, w)):
        return None
    known = cublaslt.trusted(
        x,
        w.t(),
        torch.bfloat16,
        lambda a, b, _: _by_algorithm(a, b.t(), row),
        lambda a, b, _: own.multiply(a, b, out_dtype=torch.bfloat16),
        algorithm=" ".join(f"{name} {row[name]}" for name in ALGORITHM),
    )
    return row if known else None


def _one_launch(a: torch.Tensor, b: torch.Tensor, columns: int, segments: int, parts: int) -> bool:
    """Whether the kernel for several segments and many rows serves this product."""
    m, k = a.shape
    if segments not in (2, 4, 8) or m == 0 or k == 0 or k % (segments * parts * 64) or columns % 8:
        return False
    if not (_readable(a) and _readable(b)):
        return False
    row = launch_row("linear_segments_sm90", -(-m // 128) * -(-columns // 256))
    # Several parts: the library has no product for them.
    return (parts > 1 or k // segments <= row["longest"]) and "segments" not in _probe()


def matmul(
    x: torch.Tensor, w: torch.Tensor, *, segments: int = 1, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``round(tree_s(x[:, segment s] @ w[:, segment s]^T))``; x [M, K], w [N, K] -> [M, N]."""
    few = _few_row(x, w, segments)
    one_launch = few is None and x.shape[0] >= MANY_ROWS and _one_launch(x, w, w.shape[0], segments, 1)
    if few is None and not one_launch:
        row = algorithm(x, w, segments, out_dtype)
        if row is not None:
            return _by_algorithm(x, w, row)
        return library.matmul(x, w, segments=segments, out_dtype=out_dtype)
    out = torch.empty((x.shape[0], w.shape[0]), dtype=out_dtype or x.dtype, device=x.device)
    if few is not None:
        return _few(x, w, out, segments, few)
    return _segments(x, w, out, False, segments, 1)


def dgrad(
    dy: torch.Tensor,
    w: torch.Tensor,
    *,
    segments: int = 1,
    parts: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """dX [M, K] = dy [M, N] @ w [N, K], N in ``segments`` leaves of ``parts`` slices each."""
    if not _one_launch(dy, w, w.shape[1], segments, parts):
        return library.dgrad(dy, w, segments=segments, parts=parts, out_dtype=out_dtype)
    out = torch.empty((dy.shape[0], w.shape[1]), dtype=out_dtype or dy.dtype, device=dy.device)
    return _segments(dy, w, out, True, segments, parts)


def wgrad(dy: torch.Tensor, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """dW [N, K] = dy^T @ x, tokens ascending in one chain; dy [M, N], x [M, K]."""
    return library.wgrad(dy, x, out_dtype=out_dtype)
