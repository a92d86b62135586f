"""Who computes an operator, and why that one.

A backend is a module ``rl_kernel/ops/<op>/<backend>.py`` with a ``supports(request) -> str | None`` function (``None``
means yes, a string is the reason why not) beside the functions that ``reference.py`` of the same folder defines.
A choice is made once per (op, family, dtype, requested backend, mode) and cached: it never changes inside a run.

Modes:
    strict: only backends that keep the contract; no backend means an error (fail closed).
    audit: the same operators as strict; the run reports differences instead of stopping.
    fast: the quickest backend, with or without the contract.
    native: the engines keep their stock operators; a direct call of an operator uses torch's own formula.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType

import torch

from rl_kernel import cublaslt, platform
from rl_kernel.errors import ContractError, UnsupportedError

MODES = ("strict", "audit", "fast", "native")
OPS = (
    "linear",
    "rms_norm",
    "rope",
    "attention",
    "swiglu",
    "embedding",
    "logp",
    "linear_logp",
    "sampling",
    "collectives",
)
# Order of preference. "torch" is the stock formula: it keeps no contract, so only `fast` and `native` may choose it.
STRICT_ORDER = {
    "cpu": ("native", "reference"),
    "sm90": ("sm90", "library", "triton"),
    "gfx942": ("triton",),
}
FAST_ORDER = {
    "cpu": ("native", "torch", "reference"),
    "sm90": ("sm90", "library", "triton", "torch"),
    "gfx942": ("triton", "torch"),
}
# Keys of resolved() that hold a sentence, not a backend.
REMARKS = ("cublaslt", "collectives transport", "attention")
ALL_BACKENDS = ("sm90", "library", "triton", "native", "reference", "torch")


@dataclass(frozen=True)
class Request:
    """What a call site asks for: enough for a backend to say yes or no, and nothing that changes from step to step."""

    op: str
    family: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Choice:
    """The result of a resolution: the backend module, and the reason of each backend passed over."""

    request: Request
    backend: str
    module: ModuleType
    passed_over: tuple[tuple[str, str], ...]


_process_mode = "strict"
_fallbacks = 0
_history: dict[Request, str] = {}


class set_mode(contextlib.AbstractContextManager):  # noqa: N801 - reads as a function, also works in a with statement
    """Set the mode of this process; as a context manager, restore the previous one on exit."""

    def __init__(self, mode: str) -> None:
        global _process_mode
        if mode not in MODES:
            raise ContractError(f"mode={mode!r} must be one of {', '.join(MODES)}")
        self._previous = _process_mode
        _process_mode = mode

    def __exit__(self, *exc: object) -> None:
        global _process_mode
        _process_mode = self._previous


def get_mode() -> str:
    """The mode in force."""
    return _process_mode


def fallback_count() -> int:
    """Resolutions of this process that passed over an existing backend for a reason of this machine, and classes of
    shapes in which cuBLASLt was replaced."""
    return _fallbacks + cublaslt.replaced()


def _exists(op: str, backend: str) -> bool:
    return importlib.util.find_spec(f"rl_kernel.ops.{op}.{backend}") is not None


@functools.cache
def _load(op: str, backend: str) -> ModuleType | str:
    name = f"rl_kernel.ops.{op}.{backend}"
    if not _exists(op, backend):
        return f"{op} has no {backend} implementation"
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        return f"{name} cannot be imported: {error}"


def _check(request: Request, backend: str) -> ModuleType | str:
    module = _load(request.op, backend)
    if isinstance(module, str):
        return module
    reason = module.supports(request)
    return module if reason is None else reason


@functools.cache
def _resolve(request: Request, backend: str, mode: str) -> Choice:
    global _fallbacks
    if request.op not in OPS:
        raise ContractError(f"op={request.op!r} is unknown; operators: {', '.join(OPS)}")
    if backend != "auto":
        if backend not in ALL_BACKENDS:
            raise ContractError(f"backend={backend!r} is unknown; choose auto or one of {', '.join(ALL_BACKENDS)}")
        if backend == "torch" and mode in ("strict", "audit"):
            raise UnsupportedError(
                f"{request.op}: backend 'torch' keeps no contract and mode is {mode}; use fast or native"
            )
        found = _check(request, backend)
        if isinstance(found, str):
            raise UnsupportedError(f"{request.op}: backend {backend!r} cannot be used on {request.family}: {found}")
        return Choice(request, backend, found, ())
    if mode == "native":
        order: tuple[str, ...] = ("torch",)
    else:
        order = (FAST_ORDER if mode == "fast" else STRICT_ORDER)[request.family]
    passed: list[tuple[str, str]] = []
    for name in order:
        found = _check(request, name)
        if isinstance(found, ModuleType):
            # A missing file is a gap of the package, not of this machine: only the latter counts as a fallback.
            _fallbacks += any(_exists(request.op, other) for other, _ in passed)
            return Choice(request, name, found, tuple(passed))
        passed.append((name, found))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed)
    raise UnsupportedError(
        f"{request.op}: no backend for family {request.family}, {request.dtype}, mode {mode}. {reasons}"
    )


def resolve(op: str, device: torch.device, dtype: torch.dtype, backend: str = "auto") -> Choice:
    """Resolve the backend of ``op``, once per process, mode and explicit choice.

    Raises:
        UnsupportedError: no backend can serve the request; the message holds the reason of each one.
        ContractError: ``op`` or ``backend`` is not a known name.
    """
    choice = _resolve(Request(op, platform.family_of(device), dtype), backend, _process_mode)
    _history[choice.request] = choice.backend
    return choice


def explain(
    op: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    virtual_tp: int = 1,
) -> str:
    """A readable account of the choice: op, backend, contract fields, and why other backends were passed over.

    The contract is that of a run with ``virtual_tp`` segments and ``dtype`` as the model's dtype.
    """
    from rl_kernel.contract import contract_for

    device = torch.device(device)
    family = platform.family_of(device)
    lines = [f"{op} on {family}, {str(dtype).removeprefix('torch.')}, mode {_process_mode}"]
    try:
        choice = resolve(op, device, dtype, backend)
        lines.append(f"  backend: {choice.backend} ({choice.module.__name__})")
        lines += [f"  passed over {name}: {reason}" for name, reason in choice.passed_over]
        chosen: str | None = choice.backend
    except UnsupportedError as error:
        lines.append(f"  no backend: {error}")
        chosen = None
    tried = {chosen, *(name for name, _ in choice.passed_over)} if chosen else set()
    request = Request(op, family, dtype)
    for name in ALL_BACKENDS:
        if name not in tried:
            found = _check(request, name)
            lines.append(f"  also {name}: {'usable' if isinstance(found, ModuleType) else found}")
    if op == "collectives":
        from rl_kernel.ops.collectives import peer

        lines += [f"  {line}" for line in peer.describe()]
    contract = contract_for(family, virtual_tp=virtual_tp, model_dtype=str(dtype).removeprefix("torch."))
    for name in _CONTRACT_OPS.get(op, (op,)):
        part = contract.ops[name]
        lines.append(f"  contract {name}:")
        for key in ("inputs", "partition", "merge", "precision", "rounding"):
            lines.append(f"    {key}: {getattr(part, key)}")
        lines.append(f"    primitives: {', '.join(part.primitives)}")
        lines += [f"    {key}: {value}" for key, value in part.parameters.items()]
    lines.append(f"  fingerprint: {contract.fingerprint()}")
    return "\n".join(lines)


_CONTRACT_OPS = {
    "linear": ("linear", "linear_backward"),
    "linear_logp": ("lm_head", "logp", "linear_logp_backward"),
    "sampling": ("logp",),  # its log-probabilities; a trainer never repeats the draw, so no contract names it
    "collectives": ("all_reduce",),
}


def resolved() -> dict[str, str]:
    """Backends chosen so far in this process, as ``{"linear[cpu,bfloat16]": "native", ...}`` (for manifest.json),
    and under the names of :data:`REMARKS` what cuBLASLt's probes found, how payloads travel between GPUs, and which
    kernels computed packed attention."""
    chosen = {
        f"{request.op}[{request.family},{str(request.dtype).removeprefix('torch.')}]": backend
        for request, backend in sorted(_history.items(), key=lambda item: str(item[0]))
    }
    from rl_kernel.ops.collectives import peer

    attention = sys.modules.get("rl_kernel.ops.attention.hopper")  # it imports Triton: only where it ran
    remarks = (cublaslt.summary(), peer.summary(), attention.summary() if attention else None)
    for name, found in zip(REMARKS, remarks, strict=True):
        if found is not None:
            chosen[name] = found
    return chosen
