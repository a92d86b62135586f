"""vime's ``get_log_probs_and_entropy`` on ``rl_kernel.linear_logp``: same arguments, same result, no logits.

vime's own function receives ``[1, T, V_local]`` fp32 logits. Here the second argument of the same name holds the hidden
states of :mod:`recipes.vime.head`, ``[1, T, H]``, which Megatron's mixed-precision wrapper has widened from bf16 to
fp32; narrowing them again is exact. Only rows that predict a response token are computed: a row's bits do not depend
on its neighbours, so this changes time, not values.
"""

from __future__ import annotations

from argparse import Namespace

import torch

import rl_kernel
from recipes.errors import ConfigError, EngineError
from recipes.vime import compat, head


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: Namespace,
    unconcat_tokens: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: list[list[int]] | None = None,
    top_p_token_offsets: list[list[int]] | None = None,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Per-sample response log-probabilities, and entropies when asked for.

    Args:
        logits: hidden states, ``[1, T, H]`` fp32 holding values of the model dtype.
        args: vime's arguments; ``rollout_temperature``, ``allgather_cp`` and ``entropy_coef`` are read.
        unconcat_tokens: full token sequence of each sample.
        total_lengths, response_lengths: tokens per sample, over all context-parallel ranks.
        with_entropy: also return entropies, with gradient where ``entropy_coef`` is not 0 (as vime's own function).

    Returns:
        ``(empty tensor, {"log_probs": [...], "entropy": [...]})``, one fp32 tensor a sample, this context-parallel
        rank's rows only: the layout of vime's own function.

    Raises:
        ConfigError: top-p replay or all-gather context parallelism is on; neither is part of the contract.
        EngineError: the width of the hidden states is not the LM head's.
    """
    loss = compat.check()
    if top_p_token_ids is not None or getattr(args, "rollout_top_p", 1.0) != 1.0:
        raise ConfigError("renormalises over its nucleus", where="--rollout-top-p", fix="Use 1 for strict consistency.")
    if args.allgather_cp:
        raise ConfigError("is not part of the contract", where="--allgather-cp", fix="Use zig-zag context parallelism.")
    assert non_loss_data
    lm_head = head.current()
    hidden = logits.squeeze(0)
    if hidden.shape[-1] != lm_head.weight.shape[-1]:
        raise EngineError(
            f"expected hidden states of width {lm_head.weight.shape[-1]}, got {hidden.shape[-1]}",
            where="output_layer",
            fix="Another hook replaced it after recipes.vime.head; remove that hook.",
        )
    hidden = hidden.to(lm_head.weight.dtype)
    tokens = hidden.shape[0]
    targets = loss._build_shifted_tokens(
        tokens, hidden.device, unconcat_tokens, total_lengths, response_lengths, args.allgather_cp
    )
    rows, _ = loss._extract_per_sample(
        torch.arange(tokens, device=hidden.device), None, total_lengths, response_lengths, args.allgather_cp
    )
    index = torch.cat(rows)
    output = rl_kernel.linear_logp(
        hidden.index_select(0, index),
        lm_head.weight,
        targets.index_select(0, index),
        tp_group=lm_head.tp_group,
        vocab_start_index=lm_head.vocab_start_index,
        global_vocab_size=lm_head.global_vocab_size,
        temperature=getattr(args, "rollout_temperature", 1.0),
        grad_segments=lm_head.grad_segments,
    )
    lengths = [len(part) for part in rows]
    result = {"log_probs": list(output.logp.split(lengths))}
    if with_entropy:
        trained = getattr(args, "entropy_coef", 0.0) != 0
        result["entropy"] = list((output.entropy if trained else output.entropy.detach()).split(lengths))
    return torch.empty((0,), device=hidden.device), result
