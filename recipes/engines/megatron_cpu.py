"""What Megatron-Core needs on a machine without an accelerator.

Megatron runs on the CPU with the gloo backend, except for a few places that name the CUDA device outright. Each one is
answered here, only while :func:`scope` is active and only when no accelerator is visible; with a GPU the scope does
nothing. A name that a future Megatron no longer uses simply stays unused; a name that torch no longer has is an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from recipes.errors import EngineError

_lock = threading.RLock()
_depth = 0
_saved: dict[str, Any] = {}


def needed() -> bool:
    """True when there is no CUDA or ROCm device."""
    return not torch.cuda.is_available()


class _Stream:
    """Stands for ``torch.cuda.current_stream()``: CPU work is already in order, so waiting is a no-op."""

    def wait_stream(self, other: object) -> None:
        return None

    def wait_event(self, event: object) -> None:
        return None

    def synchronize(self) -> None:
        return None


_stream = _Stream()
# name in torch.cuda -> replacement, each for one reason:
_REPLACED: dict[str, Any] = {
    # Buffers, gathered tensors and RoPE tables are allocated with device=torch.cuda.current_device().
    "current_device": lambda: torch.device("cpu"),
    # DDP's gradient reduction asks for the stream it runs on.
    "current_stream": lambda device=None: _stream,
    "default_stream": lambda device=None: _stream,
}


class _CudaMeansCpu(TorchFunctionMode):
    """The optimizer creates scalars with ``device='cuda'`` and compares ``Tensor.type()`` with ``torch.cuda.*``."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


@contextlib.contextmanager
def scope(*, optimizer: bool = False) -> Iterator[None]:
    """Answer Megatron's CUDA calls on the CPU while the block runs. Re-entrant; a no-op when a device is there.

    Args:
        optimizer: also translate ``device='cuda'`` and tensor type names; for the construction of DDP and the optimizer
            and for its step, not for a forward pass (it intercepts every torch call).
    """
    global _depth
    if not needed():
        yield
        return
    with _lock:
        if _depth == 0:
            for name, replacement in _REPLACED.items():
                if not hasattr(torch.cuda, name):
                    raise EngineError(
                        f"torch.cuda has no {name}",
                        where="recipes.engines.megatron_cpu",
                        fix="This torch is newer than the tested ones; install the locked version.",
                    )
                _saved[name] = getattr(torch.cuda, name)
                setattr(torch.cuda, name, replacement)
        _depth += 1
    try:
        with _CudaMeansCpu() if optimizer else contextlib.nullcontext():
            yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                for name, original in _saved.items():
                    setattr(torch.cuda, name, original)
                _saved.clear()


def seed_rng_tracker(seed: int) -> None:
    """Give Megatron's tensor-parallel RNG tracker its seeds.

    The tracker holds CUDA generator states. Without a device, and with every dropout at 0, nothing draws from it, so
    the inference variant, whose ``fork`` is empty, stands in.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    if needed():
        megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    else:
        megatron_random.model_parallel_cuda_manual_seed(seed)
