"""Exceptions of the operator package. Every message says what is wrong, with which field, and what to do."""

from __future__ import annotations


class RLKernelError(Exception):
    """Base class of every error raised by ``rl_kernel``."""


class ContractError(RLKernelError, ValueError):
    """An input, or a pair of engines, violates the numeric contract."""


class UnsupportedError(RLKernelError, RuntimeError):
    """No backend satisfies the request; the message lists each backend with its reason."""
