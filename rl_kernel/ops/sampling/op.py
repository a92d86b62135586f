"""sample, draw and uniforms: argument checks and registered operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernel.errors import ContractError
from rl_kernel.ops._operator import Operator
from rl_kernel.registry import resolve


class SampleOutput(NamedTuple):
    """[B] each: sampled ids (int64), their log-probability and the log-sum-exp of the tempered logits (fp32)."""

    tokens: torch.Tensor
    logp: torch.Tensor
    lse: torch.Tensor


def _sample_rows(
    logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor, columns: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if logits.shape[0] == 0:
        return _empty_sample(logits)
    return resolve("sampling", logits.device, logits.dtype, backend).module.sample(
        logits, temperature, uniforms, columns
    )


def _draw_rows(logp: torch.Tensor, uniforms: torch.Tensor, backend: str) -> torch.Tensor:
    if logp.shape[0] == 0:
        return _empty_tokens(logp)
    return resolve("sampling", logp.device, logp.dtype, backend).module.draw(logp, uniforms)


def _uniform_rows(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    out = _empty_uniforms(seeds)
    resolve("sampling", seeds.device, torch.float32).module.fill_uniforms(seeds, positions, out)
    return out


def _empty_tokens(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)


def _empty_sample(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = logits.shape[:1]
    logp, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    return _empty_tokens(logits), logp, lse


def _empty_uniforms(seeds: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)


_sample = Operator("sample", _sample_rows, _empty_sample)
_draw = Operator("draw", _draw_rows, _empty_tokens)
_uniforms = Operator("uniforms", _uniform_rows, _empty_uniforms)


def _readable(values: torch.Tensor) -> bool:
    """Whether values may be looked at: a GPU would have to wait, a compiler would break its graph."""
    return values.device.type == "cpu" and values.numel() > 0 and not torch.compiler.is_compiling()


def _rows_last_contiguous(name: str, values: torch.Tensor) -> torch.Tensor:
    if values.dim() != 2 or not values.is_floating_point() or values.dtype == torch.float64 or not values.shape[1]:
        raise ContractError(
            f"{name} {values.dtype} {tuple(values.shape)} must be [B, V] in float32 (or narrower, which is widened "
            "exactly), with at least one column"
        )
    values = values.detach().to(torch.float32)
    return values if values.stride(1) == 1 else values.contiguous()


def _check_uniforms(uniforms: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    rows = like.shape[0]
    if uniforms.dtype != torch.float64 or uniforms.shape != (rows,) or uniforms.device != like.device:
        raise ContractError(
            f"uniforms: {uniforms.dtype} {tuple(uniforms.shape)} on {uniforms.device} must be float64 of shape "
            f"({rows},) on {like.device}; rl_kernel.uniforms(seeds, positions) makes them"
        )
    if _readable(uniforms) and not bool(((uniforms >= 0) & (uniforms < 1)).all()):
        raise ContractError("uniforms: all must lie in [0, 1)")
    return uniforms.contiguous()


def _temperature_rows(temperature: float | torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    rows, device = logits.shape[0], logits.device
    if isinstance(temperature, torch.Tensor):
        if temperature.dim() > 1 or (temperature.dim() == 1 and temperature.shape[0] != rows):
            raise ContractError(f"temperature: shape {tuple(temperature.shape)} must be () or ({rows},)")
        values = temperature.detach().to(device=device, dtype=torch.float32).expand(rows).contiguous()
        if _readable(values) and not bool(((values >= 0) & torch.isfinite(values)).all()):
            raise ContractError("temperature: every row must be finite and above 0, or 0 for greedy")
        return values
    if not 0 <= temperature <= torch.finfo(torch.float32).max or (temperature > 0 and temperature < 2.0**-149):
        raise ContractError(f"temperature={temperature} must be finite and above 0 in float32, or 0 for greedy")
    return torch.full((rows,), temperature, dtype=torch.float32, device=device)


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    *,
    global_vocab_size: int | None = None,
    backend: str = "auto",
) -> SampleOutput:
    """Draw one token a row from ``softmax(logits / temperature)``, with its log-probability.

    Args:
        logits: [B, V] fp32. A view of a wider buffer (``buffer[:, :V]``) is read in place.
        uniforms: [B] float64 in [0, 1) on the same device, one for each row; see :func:`uniforms`.
        temperature: finite and above 0, or 0 for the first largest logit (log-probability at temperature 1); one for
            all rows, or [B].
        global_vocab_size: columns from here on are padding and never drawn; default V.
        backend: ``auto`` or the name of one (see :func:`rl_kernel.explain`).

    Returns:
        (tokens, logp, lse): ``logp`` and ``lse`` have the bits of ``rl_kernel.logp(logits, tokens, temperature=...)``.

    Guarantee: a row's results depend on that row's logits, temperature and uniform number alone. The draw inverts the
    cumulative sum of integer weights floor(p * 2**50): a token below probability 2**-50 is never drawn, and the
    probability of every other is within 2**-22 * (3 + 2 |log p|) of p, relatively. A row with NaN or +inf gives some
    token in range and a log-probability that is not finite. No gradient. On GPUs: no synchronisation, capturable.

    Raises:
        ContractError: an argument is out of range (values on a GPU or in a compiled graph are not looked at).
    """
    logits = _rows_last_contiguous("sample: logits", logits)
    columns = logits.shape[1] if global_vocab_size is None else global_vocab_size
    if not 0 < columns <= logits.shape[1]:
        raise ContractError(f"sample: global_vocab_size={columns} must lie in [1, {logits.shape[1]}]")
    numbers = _check_uniforms(uniforms, logits)
    return SampleOutput(*_sample(logits, _temperature_rows(temperature, logits), numbers, columns, backend))


def draw(logp: torch.Tensor, uniforms: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Token ids int64 [B] from log-probabilities [B, V] fp32 and one uniform number a row, as :func:`sample` draws.

    For distributions that are no plain softmax of logits (top-k, top-p). Columns of -inf or NaN are never drawn.

    Raises:
        ContractError: an argument is out of range.
    """
    logp = _rows_last_contiguous("draw: logp", logp)
    return _draw(logp, _check_uniforms(uniforms, logp), backend)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [B] in [0, 1) with 53 random bits, a function of (seed, position) alone; the same bits on every device.

    Args:
        seeds: [B] int64.
        positions: [B] int64 on the same device; 0 for the first token of a response.

    Raises:
        ContractError: dtype, shape or device differ.
    """
    if seeds.dtype != torch.int64 or positions.dtype != torch.int64 or seeds.dim() != 1:
        raise ContractError(
            f"uniforms: seeds {seeds.dtype} {tuple(seeds.shape)} and positions {positions.dtype} must be int64 [B]"
        )
    if seeds.shape != positions.shape or seeds.device != positions.device:
        raise ContractError(
            f"uniforms: seeds {tuple(seeds.shape)} on {seeds.device} and positions {tuple(positions.shape)} on "
            f"{positions.device} must match"
        )
    return _uniforms(seeds.contiguous(), positions.contiguous())
