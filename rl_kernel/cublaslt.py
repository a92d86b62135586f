"""cuBLASLt as a backend of the contract: process setup, start-up probe, visible replacement.

Without split-K cuBLASLt accumulates in one ascending fp32 chain, which is the contract's bits at the library's speed.
Nothing promises that, so three things stand between the library and a result:

* :func:`setup` takes the workspace away from the library (no workspace, no split-K) and turns reduced-precision
  reductions off, whatever the user's environment says;
* :func:`trusted` compares the library with our own kernel, bit by bit, on heavy-tailed random data, once for each
  class of shapes, before the class is used;
* a class that differs is served by our own kernel from then on: a warning names it, and :func:`report` lists it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}

# Gradients of weights of at least 128 tiles of 128 x 128, with the library in which token counts unlike those of their
# probes were compared on an H200 (tests/ops/test_gpu_linear.py goes on asking): their K is rounded up to a bucket.
MANY_TILES = 1 << 21
MEASURED_VERSION = 1301

LARGEST_PROBE = 1 << 28  # elements of an operand up to which the end of a bucket is probed, too

_done = False


@dataclass(frozen=True)
class ShapeClass:
    """Shapes that share a probe: a product's operand layouts and sizes, the number of tokens rounded up to a bucket.

    Tokens are M; in the gradient of a weight (layouts "tn", both operands [tokens, features] in memory) they are K.
    A small gradient has classes of its own for each K: where tiles are too few for the processors, the library has been
    seen to split K from some length on.
    """

    layouts: str  # transposition of a and b as BLAS sees them, and "+" for accumulation into fp32
    m: int
    n: int
    k: int
    out: str
    algorithm: str = ""  # of cuBLASLt, by its attributes; empty: the library chooses


class MissingAlgorithmError(Exception):
    """This cuBLASLt does not have an algorithm that the launch table names."""


_verdicts: dict[ShapeClass | str, str | None] = {}
_own_class: set[int] = set()  # sizes of M that are a class of their own: see probe
_probed: set[tuple[object, ...]] = set()
_unprobed_in_capture: set[ShapeClass] = set()
_unaligned: set[ShapeClass] = set()


def unavailable(family: str) -> str | None:
    """Why this process cannot use cuBLASLt, or ``None``."""
    if family != "sm90":
        return f"cuBLASLt is a backend of sm90 only, not of {family}"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return setup()


def setup() -> str | None:
    """Set this process up; idempotent. Call it where a process starts, before its first matrix product.

    Returns:
        ``None``, or why the setting cannot be made.
    """
    global _done
    if _done:
        return None
    for name, value in ENVIRONMENT.items():
        found = os.environ.get(name)
        if found not in (None, value):
            warnings.warn(
                f"{name}={found} lets cuBLAS split a reduction; rl_kernel sets it to {value} for this process",
                stacklevel=2,
            )
        os.environ[name] = value
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    except (AttributeError, RuntimeError) as error:
        return f"torch cannot prefer cuBLASLt: {error}"
    _done = True
    return None


@functools.cache
def version() -> int | None:
    """cuBLASLt's number (13.1.0 is 130100) of the library that torch has loaded; ``None`` where there is none."""
    if torch.version.cuda is None:
        return None
    try:
        name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
        library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # torch's own, never another of the system
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return int(library.cublasLtGetVersion())
    except (OSError, AttributeError):
        return None


def bucket(m: int) -> int:
    """Upper end of the class of ``m``: exact to 16 and for the sizes given to :func:`probe`, then steps that grow with
    m (16, 32, ... an eighth of m)."""
    if m <= 16 or m in _own_class:
        return m
    step = max(16, 1 << max(m.bit_length() - 4, 0))
    return -(-m // step) * step


def _letter(x: torch.Tensor) -> str:
    return "n" if x.stride(1) == 1 else "t"


def shape_class(
    a: torch.Tensor, b: torch.Tensor, out: torch.dtype, accumulate: bool, algorithm: str = ""
) -> ShapeClass:
    """The class of ``a [M, K] @ b [K, N]``."""
    layouts = _letter(a) + _letter(b) + ("+" if accumulate else "")
    (m, k), n = a.shape, b.shape[1]
    if not layouts.startswith("tn"):
        m = bucket(m)
    elif m * n >= MANY_TILES and m * bucket(k) <= LARGEST_PROBE and (version() or 0) // 100 == MEASURED_VERSION:
        k = bucket(k)
    return ShapeClass(layouts, m, n, k, str(out).removeprefix("torch."), algorithm)


def aligned(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all rows of ``a``, ``b`` and of a contiguous result start at 16 bytes.

    Otherwise the library takes kernels with shallower matrix instructions, whose few differing elements a probe of a
    rounded result may miss.
    """
    for x in (a, b):
        wide = max(x.stride())
        if wide % 8 or x.data_ptr() % 16 or x.shape[1 if x.stride(1) == 1 else 0] % 8:
            return False
    return b.shape[1] % 8 == 0


def _heavy_tailed(like: torch.Tensor, rows: int | None = None, columns: int | None = None) -> torch.Tensor:
    shape = (rows or like.shape[0], columns or like.shape[1])
    generator = torch.Generator(device=like.device).manual_seed(shape[0] * 1000003 + shape[1])
    how = {"dtype": torch.float32, "device": like.device, "generator": generator}
    x = torch.randn(shape, **how)  # type: ignore[call-overload]
    x *= torch.randn(shape, **how).exp_()  # type: ignore[call-overload]
    x = x.to(like.dtype)
    return x if like.stride(1) == 1 else x.t().contiguous().t()


def trusted(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.dtype,
    library: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    own: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    accumulate: bool = False,
    algorithm: str = "",
) -> bool:
    """Whether the library has the contract's bits for the class of ``a @ b``; probes the class at its first use.

    A named ``algorithm`` is a class of its own; ``library`` raises :class:`MissingAlgorithmError` where there is none.

    The probe needs one host synchronisation, so it never runs inside CUDA graph capture: a class first met there is
    served by our own kernel (the same bits) and listed in :func:`report`.
    """
    key = shape_class(a, b, out, accumulate, algorithm)
    if not aligned(a, b):
        _unaligned.add(key)
        return False
    if key in _verdicts:
        return _verdicts[key] is None
    if torch.cuda.is_current_stream_capturing():
        _unprobed_in_capture.add(key)
        return False
    sizes = {tuple(a.shape), (key.m, key.k)} if key.m * key.k <= LARGEST_PROBE else {tuple(a.shape)}
    probe_b = None
    differing = total = 0
    for m, k in sorted(sizes):
        probe_a = _heavy_tailed(a, m, k)
        if probe_b is None or probe_b.shape[0] != k:
            probe_b = _heavy_tailed(b, k) if b.numel() <= 1 << 27 or b.shape[0] != k else b
        start = torch.randn((m, b.shape[1]), dtype=torch.float32, device=a.device) if accumulate else None
        try:
            left = library(probe_a, probe_b, None if start is None else start.clone())
        except MissingAlgorithmError as error:
            _verdicts[key] = str(error)
            break
        right = own(probe_a, probe_b, start)
        view = torch.int32 if left.dtype == torch.float32 else torch.int16
        differing += int((left.view(view) != right.view(view)).sum())
        total += left.numel()
    else:
        _verdicts[key] = None if differing == 0 else f"{differing} of {total} elements differ"
    reason = _verdicts[key]
    if reason is not None:
        instead = "the algorithm that cuBLASLt chooses" if algorithm else "the Triton kernel"
        warnings.warn(f"cuBLASLt is not used for {key}: {reason}; this process uses {instead}", stacklevel=2)
    return reason is None


def replace(reasons: dict[str, str]) -> None:
    """List kernels of ours that failed their own probe among what :func:`report` says is replaced."""
    _verdicts.update(reasons)


def report() -> dict[str, object]:
    """What the probes found: classes trusted, classes replaced (with the reason), classes first met in a capture."""
    return {
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "trusted": sum(reason is None for reason in _verdicts.values()),
        "replaced": {str(key): reason for key, reason in _verdicts.items() if reason is not None},
        "unaligned": len(_unaligned),
        "unprobed_in_capture": sorted(str(key) for key in _unprobed_in_capture),
    }


def replaced() -> int:
    """Classes of shapes that our own kernel serves because the library differs there, or could not be asked in time."""
    return sum(reason is not None for reason in _verdicts.values()) + len(_unprobed_in_capture)


def summary() -> str | None:
    """:func:`report` in one line, for a manifest; ``None`` while no class was probed."""
    if not (_verdicts or _unprobed_in_capture or _unaligned):
        return None
    found = report()
    names = [*found["replaced"], *found["unprobed_in_capture"]]  # type: ignore[misc]
    return (
        f"{found['trusted']} classes trusted, {replaced()} replaced, {found['unaligned']} unaligned, "
        f"{len(_unprobed_in_capture)} unprobed in capture" + (f": {'; '.join(names[:8])}" if names else "")
    )


def classes_up_to(limit: int) -> list[int]:
    """The upper end of every class of M that a call with at most ``limit`` rows can meet."""
    met = (*range(1, 17), *range(17, limit, 16), *_own_class, limit)
    return sorted({min(bucket(m), limit) for m in met if m <= limit})


def probe(
    weights: Iterable[torch.Tensor],
    rows: Iterable[int],
    *,
    exact: Iterable[int] = (),
    segments: int = 1,
    out_dtype: torch.dtype | None = None,
) -> dict[str, object]:
    """Start-up probe of forward products, so that neither a CUDA graph capture nor a request meets a new class.

    Args:
        weights: [N, K]; equal shapes are probed once.
        rows: values of M.
        exact: values of M that occur again and again (the sizes of CUDA graphs): each is a class of its own.
        segments, out_dtype: as the call sites pass them to ``linear``.
    """
    from rl_kernel import registry
    from rl_kernel.ops.linear import library, sm90

    exact = list(exact)
    _own_class.update(exact)
    rows = sorted({*rows, *exact})
    for weight in weights:
        named = registry.resolve("linear", weight.device, weight.dtype).module is sm90
        x = None
        for m in rows:
            key = (tuple(weight.shape), m, segments, out_dtype)
            if key in _probed:
                continue
            _probed.add(key)
            if x is None:
                x = torch.zeros((rows[-1], weight.shape[1]), dtype=weight.dtype, device=weight.device)
            library.matmul(x[:m], weight, segments=segments, out_dtype=out_dtype)
            if named:
                sm90.algorithm(x[:m], weight, segments, out_dtype)
    return report()
