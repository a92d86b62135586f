"""What an engine decides for its process: the operator mode, and on NVIDIA GPUs the libraries under the operators.

``rl_kernel``'s mode belongs to the process. Where two engines share one, the engine built last would decide for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

import rl_kernel
from recipes.errors import EngineError
from rl_kernel import contract, cublaslt

Method = TypeVar("Method", bound=Callable[..., Any])


def in_own_mode(method: Method) -> Method:
    """Method decorator: run under ``self.mode``, and leave the process's mode as it was."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rl_kernel.set_mode(self.mode):
            return method(self, *args, **kwargs)

    return cast(Method, call)


def prepare_process(mode: str, attention: str | None) -> None:
    """Make this process, and those it starts, compute the contract of NVIDIA GPUs: cuBLASLt without split-K, and the
    attention arithmetic. Nothing happens under native or without CUDA.

    Call it before the first matrix product: the library decides then, for the life of the process.

    Args:
        mode: ``consistency.mode``.
        attention: ``blocks`` or ``fa3``; ``None`` leaves RLK_SM90_ATTENTION as it is.

    Raises:
        EngineError: this torch cannot be told to.
    """
    if mode == "native" or torch.version.cuda is None:
        return
    if attention is not None:
        contract.choose_attention(attention)
    reason = cublaslt.setup()
    if reason is not None:
        raise EngineError(reason, where=f"consistency.mode={mode}", fix="Use torch 2.11 or newer.")
