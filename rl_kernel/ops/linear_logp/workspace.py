"""How much memory linear_logp may hold from its forward to its backward pass, as the environment says."""

from __future__ import annotations

import os

from rl_kernel.errors import ContractError

NAME = "RLK_WORKSPACE_MIB"


def workspace_bytes(default_mib: int) -> int:
    """RLK_WORKSPACE_MIB in bytes, or ``default_mib`` where it is not set.

    Raises:
        ContractError: not a whole number.
    """
    text = os.environ.get(NAME, str(default_mib)).strip()
    if not (text.isascii() and text.isdigit()):
        raise ContractError(f"{NAME}={text!r} must be a whole number of MiB; 0 keeps nothing for backward")
    return int(text) << 20
