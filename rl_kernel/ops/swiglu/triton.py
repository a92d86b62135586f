"""SwiGLU on GPUs, forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernel.registry import Request
from rl_kernel.triton_utils import device_guard, divide, exp_, gpu_only, launch_row, options


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    return gpu_only(request.family, request.op)


@triton.jit
def _forward(gate_up_ptr, y_ptr, stride, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(gate_up_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + F + column, mask=inside, other=0.0).to(tl.float32)
    y = divide(gate, 1.0 + exp_(-gate)) * up
    tl.store(y_ptr + row * F + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dy_ptr, gate_up_ptr, grad_ptr, stride, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    # Nothing is read twice: what passes through should not push other data out of the cache.
    gate = tl.load(gate_up_ptr + row * stride + column, mask=inside, other=0.0, eviction_policy="evict_first").to(
        tl.float32
    )
    up = tl.load(gate_up_ptr + row * stride + F + column, mask=inside, other=0.0, eviction_policy="evict_first").to(
        tl.float32
    )
    dy = tl.load(dy_ptr + row * F + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    denominator = 1.0 + exp_(-gate)
    sigmoid = divide(1.0, denominator)
    dgate = (dy * up) * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    dup = dy * divide(gate, denominator)
    out = grad_ptr + row * (2 * F) + column
    tl.store(out, dgate.to(grad_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    tl.store(out + F, dup.to(grad_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")


def _rows(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """``round((g / (1 + exp(-g))) * u)`` for gate_up [..., 2F] = [g | u]; returns [..., F]."""
    f = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], f), dtype=gate_up.dtype, device=gate_up.device)
    rows = _rows(gate_up)
    if y.numel():
        launch = launch_row("swiglu", f)
        with device_guard(y):
            _forward[(rows.shape[0], triton.cdiv(f, launch["block"]))](
                rows, y, rows.stride(0), f, launch["block"], **options(launch["warps"])
            )
    return y


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Gradient of :func:`forward` with respect to gate_up, fp32 inside, one rounding."""
    f = gate_up.shape[-1] // 2
    grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    rows = _rows(gate_up)
    if grad.numel():
        launch = launch_row("swiglu_backward", f)
        with device_guard(grad):
            _backward[(rows.shape[0], triton.cdiv(f, launch["block"]))](
                _rows(dy).contiguous(), rows, grad, rows.stride(0), f, launch["block"], **options(launch["warps"])
            )
    return grad
