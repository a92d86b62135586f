"""``linear_logp`` for vime builds that have ``--linear-logp-provider recipes.vime.provider.linear_logp``.

Such a vime hands over the hidden states, the projection and the vocabulary partition; it still materialises logits for
its own use. The request and the result are structural: nothing of vime is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

import rl_kernel
from rl_kernel import platform, registry


class ProviderUnavailableError(RuntimeError):
    """vime's native path may be used in ``auto`` mode; ``strict`` mode turns this into an error."""

    linear_logp_provider_unavailable = True


@dataclass(frozen=True)
class LinearLogpResult:
    """``logp`` is ``[T, 1]`` fp32, ``entropy`` ``[T]`` fp32 or ``None``."""

    logp: torch.Tensor
    entropy: torch.Tensor | None
    backend_id: str
    contract_id: str
    provenance: dict[str, Any] = field(default_factory=dict)


def linear_logp(request: Any) -> LinearLogpResult:
    """Selected-token log-probability of one request.

    Args:
        request: has ``context`` (``hidden`` ``[T, H]``, ``projection.weight`` ``[V_local, H]``, ``projection.bias``,
            ``vocab_partition`` with ``local_start`` and ``real_size``), ``target_ids`` ``[T]``,
            ``tensor_parallel_group``, ``temperature``, ``with_entropy``, ``with_entropy_grad`` and
            ``log_prob_keep_mask``.

    Raises:
        ProviderUnavailableError: the request holds no hidden states, a bias or a top-p mask, or the device has no
            contract.
    """
    context = request.context
    if context is None:
        raise ProviderUnavailableError("the request has no hidden states (context is None)")
    if context.projection.bias is not None:
        raise ProviderUnavailableError("an LM head with a bias is not part of the contract")
    if request.log_prob_keep_mask is not None:
        raise ProviderUnavailableError("top-p replay is not part of the contract; set --rollout-top-p 1")
    weight = context.projection.weight
    device = platform.describe(weight.device)
    if device.family is None:
        raise ProviderUnavailableError(device.reason or f"{device.name} has no contract")
    group = request.tensor_parallel_group
    segments = int(os.environ.get("RL_KERNEL_VIRTUAL_TP", 1 if group is None else group.size()))
    output = rl_kernel.linear_logp(
        context.hidden.to(weight.dtype),
        weight,
        request.target_ids,
        tp_group=group,
        vocab_start_index=context.vocab_partition.local_start,
        global_vocab_size=context.vocab_partition.real_size,
        temperature=1.0 if request.temperature is None else request.temperature,
        grad_segments=segments,
    )
    entropy = output.entropy if getattr(request, "with_entropy_grad", True) else output.entropy.detach()
    choice = registry.resolve("linear_logp", weight.device, weight.dtype)
    contract = rl_kernel.fingerprint(
        device.family, virtual_tp=segments, model_dtype=str(weight.dtype).removeprefix("torch.")
    )
    return LinearLogpResult(
        logp=output.logp.unsqueeze(-1),
        entropy=entropy if request.with_entropy else None,
        backend_id=f"rl_kernel.linear_logp.{choice.backend}",
        contract_id=f"rl_kernel.v1.{device.family}.{contract}",
        provenance={"version": rl_kernel.__version__, "mode": registry.get_mode(), "device": device.name},
    )
