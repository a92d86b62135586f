"""The operator mode of an engine.

``rl_kernel``'s mode belongs to the process. Where two engines share one, the engine built last would decide for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import rl_kernel

Method = TypeVar("Method", bound=Callable[..., Any])


def in_own_mode(method: Method) -> Method:
    """Method decorator: run under ``self.mode``, and leave the process's mode as it was."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rl_kernel.set_mode(self.mode):
            return method(self, *args, **kwargs)

    return cast(Method, call)
