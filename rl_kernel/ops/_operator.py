"""One operator: registered with torch, and callable at the cost of a plain function where nobody traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

_PLAIN = torch.Tensor.__torch_dispatch__  # subclasses that intercept operators replace it


def untraced(*args: Any) -> bool:
    """Whether all tensors are plain and nobody traces: an implementation may be called directly."""
    plain = all(type(arg).__torch_dispatch__ is _PLAIN for arg in args if isinstance(arg, torch.Tensor))
    return plain and not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None


class Operator:
    """``torch.library.custom_op`` with a short way past the dispatcher.

    The registered operator is what torch.compile, fake tensors and other tracers see. A call with plain tensors and
    no tracer runs the same implementation and the same gradient formula directly: on small tensors the dispatcher's
    Python layers cost twenty times the kernel.

    Args:
        name: ``rl_kernel::<name>``.
        implementation: annotated function as ``torch.library.custom_op`` wants it; never returns an input.
        fake: shapes and dtypes of the result for fake tensors.
        gradient: class with ``setup_context(ctx, inputs, output)`` and ``backward(ctx, *grads)``.
    """

    def __init__(
        self, name: str, implementation: Callable[..., Any], fake: Callable[..., Any], gradient: type | None = None
    ) -> None:
        self.implementation = implementation
        self.registered = torch.library.custom_op(f"rl_kernel::{name}", implementation, mutates_args=())
        self.registered.register_fake(fake)
        self.function: Any = None
        if gradient is not None:
            setup, backward = gradient.setup_context, gradient.backward  # type: ignore[attr-defined]
            self.registered.register_autograd(backward, setup_context=setup)

            def forward(ctx: Any, *args: Any) -> Any:
                output = implementation(*args)
                setup(ctx, args, output)
                return output

            # forward and setup in one: torch binds a separate setup_context by signature inspection at every call.
            # once: gradients run compiled code that torch cannot differentiate; a second derivative would be zeros.
            members = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
            self.function = type(f"{name}_function", (torch.autograd.Function,), members)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():  # first: a compiler that traces this method must see nothing else
            return self.registered(*args)
        grad = False
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if type(arg).__torch_dispatch__ is not _PLAIN:
                    return self.registered(*args)
                grad = grad or arg.requires_grad
        if _get_current_dispatch_mode() is not None:
            return self.registered(*args)
        if grad and self.function is not None and torch.is_grad_enabled():
            return self.function.apply(*args)
        return self.implementation(*args)
