"""Public rope, alone or behind the norms of q and k, and the table that both engines build the same way."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernel import registry
from rl_kernel.errors import ContractError
from rl_kernel.ops._operator import Operator

__all__ = ["build_cos_sin_cache", "qk_norm_rope", "rope"]


def build_cos_sin_cache(
    max_pos: int, dim: int, base: float, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Table [max_pos, dim] float32 = cat(cos, sin) of ``position * base^(-2 i / dim)``, i < dim / 2.

    Built on the CPU in float64 and rounded once, so that every engine and device holds the same bytes.
    """
    if not (dim % 2 == 0 and dim > 0):
        raise ContractError(f"build_cos_sin_cache: dim={dim} must be even and positive")
    with torch.device("cpu"):  # engines build models under a default device of their own
        inverse = torch.tensor(base, dtype=torch.float64) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(max_pos, dtype=torch.float64)[:, None] * inverse[None, :]
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)


def _module(x: torch.Tensor) -> Any:
    return registry.resolve("rope", x.device, x.dtype).module


def _forward(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    return _module(x).forward(x, positions, cos_sin_cache)


def _backward(dy: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    return _module(dy).backward(dy, positions, cos_sin_cache)


class _Gradient:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        return _rope_backward(dy, *ctx.saved_tensors), None, None


def _fake(x, positions, cos_sin_cache):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


_rope = Operator("rope", _forward, _fake, _Gradient)
_rope_backward = Operator("rope_backward", _backward, lambda dy, positions, cos_sin_cache: dy.new_empty(dy.shape))


def _norm_module(x: torch.Tensor) -> Any:
    return registry.resolve("rms_norm", x.device, x.dtype).module


def _qk_norm_rope_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rope_module, norm_module = _module(q), _norm_module(q)
    if hasattr(rope_module, "qk_norm_forward"):
        return rope_module.qk_norm_forward(q, k, q_weight, k_weight, eps, positions, cos_sin_cache)
    turned, rstds = [], []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y, _, rstd = norm_module.forward(x.reshape(-1, x.shape[2]), weight, eps, None)
        turned.append(rope_module.forward(y.reshape(x.shape), positions, cos_sin_cache))
        rstds.append(rstd.reshape(x.shape[:2]))
    return turned[0], turned[1], torch.cat(rstds, 1)


def _qk_norm_rope_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rstd: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rope_module, norm_module = _module(q), _norm_module(q)
    results = []
    for dy, x, weight, part in (
        (dq, q, q_weight, rstd[:, : q.shape[1]]),
        (dk, k, k_weight, rstd[:, q.shape[1] :]),
    ):
        if hasattr(rope_module, "qk_norm_backward"):
            results.append(rope_module.qk_norm_backward(dy, x, weight, part, positions, cos_sin_cache))
            continue
        dy = rope_module.backward(dy, positions, cos_sin_cache)
        dim = x.shape[2]
        dx, dw = norm_module.backward(dy.reshape(-1, dim), None, x.reshape(-1, dim), weight, part.reshape(-1))
        results.append((dx.reshape(x.shape), dw))
    return results[0][0], results[1][0], results[0][1], results[1][1]


class _QKGradient:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        q, k, q_weight, k_weight, _, positions, cos_sin_cache = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(q, k, q_weight, k_weight, output[2], positions, cos_sin_cache)

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, _: Any) -> tuple:
        dq, dk, dq_weight, dk_weight = _qk_backward(dq, dk, *ctx.saved_tensors)
        return dq, dk, dq_weight, dk_weight, None, None, None


_qk_norm_rope = Operator(
    "qk_norm_rope",
    _qk_norm_rope_forward,
    lambda q, k, q_weight, k_weight, eps, positions, cos_sin_cache: (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        q.new_empty((q.shape[0], q.shape[1] + k.shape[1]), dtype=torch.float32),
    ),
    _QKGradient,
)
_qk_backward = Operator(
    "qk_norm_rope_backward",
    _qk_norm_rope_backward,
    lambda dq, dk, q, k, q_weight, k_weight, rstd, positions, cos_sin_cache: (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        q_weight.new_empty(q_weight.shape),
        k_weight.new_empty(k_weight.shape),
    ),
)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rope(rms_norm(q, q_weight, eps))`` and the same of k, byte for byte; on GPUs in one launch.

    Args:
        q: [T, Hq, D] float32 or bfloat16 (cpu family); k: [T, Hk, D], same dtype. Both may be strided views of one
            projection, D contiguous.
        q_weight, k_weight: [D], the dtype of q.
        eps: added to the mean of squares of a head, as float32.
        positions: [T] int64 or int32, each in [0, max_pos).
        cos_sin_cache: [max_pos, D] float32 from :func:`build_cos_sin_cache`.

    Returns:
        (q' [T, Hq, D], k' [T, Hk, D]), contiguous.

    Raises:
        ContractError: shapes or dtypes do not fit, or (cpu) a position lies outside the table.

    Guarantee: the bits of :func:`rl_kernel.rms_norm` followed by :func:`rope`, in forward and backward.
    """
    if not (q.dim() == k.dim() == 3 and q.shape[0] == k.shape[0] and q.shape[2] == k.shape[2] and q.dtype == k.dtype):
        raise ContractError(
            f"qk_norm_rope: q {tuple(q.shape)} {q.dtype} and k {tuple(k.shape)} {k.dtype} must be [T, heads, D] of one "
            "dtype"
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if not (weight.shape == q.shape[2:] and weight.dtype == q.dtype):
            raise ContractError(
                f"qk_norm_rope: {name} {tuple(weight.shape)} {weight.dtype} must be [{q.shape[2]}] {q.dtype}; keep "
                "norm weights in the model's dtype on both sides"
            )
    _check("qk_norm_rope", q, positions, cos_sin_cache)
    return _qk_norm_rope(q, k, q_weight, k_weight, eps, positions, cos_sin_cache)[:2]


def _check(name: str, x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    if x.dim() != 3 or x.shape[2] % 2:
        raise ContractError(f"{name}: x must be [T, heads, D] with D even, got shape {tuple(x.shape)}")
    if not (cos_sin_cache.dim() == 2 and cos_sin_cache.shape[1] == x.shape[2] and cos_sin_cache.dtype == torch.float32):
        raise ContractError(
            f"{name}: cos_sin_cache {tuple(cos_sin_cache.shape)} {cos_sin_cache.dtype} must be "
            f"[max_pos, {x.shape[2]}] float32"
        )
    if positions.shape != x.shape[:1]:
        raise ContractError(f"{name}: positions {tuple(positions.shape)} must be [{x.shape[0]}]")


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of every head by the angle of the token's position.

    Args:
        x: [T, h, D] float32 or bfloat16 (cpu family).
        positions: [T] int64 or int32, each in [0, max_pos).
        cos_sin_cache: [max_pos, D] float32 from :func:`build_cos_sin_cache`.

    Returns:
        [T, h, D]: fp32 with every product and sum rounded, one rounding to x's dtype.

    Raises:
        ContractError: shapes or dtypes do not fit, or (cpu) a position lies outside the table.

    Guarantee: a head's bits depend on that head and its position only.
    """
    _check("rope", x, positions, cos_sin_cache)
    return _rope(x, positions, cos_sin_cache)
