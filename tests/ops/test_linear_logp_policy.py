"""linear_policy_loss on the CPU: no tokens, other inputs that want gradients, and bad input."""

from __future__ import annotations

import pytest
import torch

from rl_kernel.errors import ContractError
from rl_kernel.ops.linear_logp.policy import linear_policy_loss

TOKENS, HIDDEN, VOCABULARY = 6, 16, 256


def arguments(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=g) * 0.02
    return {
        "hidden_states": hidden.requires_grad_(),
        "lm_head_weight": weight.requires_grad_(),
        "target_ids": torch.randint(0, VOCABULARY, (TOKENS,), generator=g),
        "old_logp": torch.full((TOKENS,), -5.5),
        "advantages": torch.randn(TOKENS, generator=g),
    }


@pytest.mark.parametrize("entropy_weight", [0.0, 0.01])
@pytest.mark.parametrize("how", ["ignored", "masked", "masked, normalizer"])
def test_no_token_takes_part(how, entropy_weight):
    """The loss is 0 and has no gradient, as for a micro-batch that is padding alone."""
    given = arguments()
    more = {"entropy_weight": entropy_weight}
    right, _, _ = linear_policy_loss(**given, **more)
    right.backward()
    assert right != 0 and given["hidden_states"].grad.count_nonzero() > 0
    given = arguments()
    if how == "ignored":
        given["target_ids"].fill_(-100)
    else:
        more["mask"] = torch.zeros(TOKENS)
    if "normalizer" in how:
        more["normalizer"] = torch.tensor(12.0)
    loss, _, metrics = linear_policy_loss(**given, **more)
    loss.backward()
    assert loss == 0 and metrics["tokens"] == 0
    for name in ("hidden_states", "lm_head_weight"):
        assert given[name].grad.count_nonzero() == 0 and bool(given[name].grad.isfinite().all())


def test_advantages_that_want_a_gradient_get_it():
    given = arguments()
    given["advantages"].requires_grad_()
    loss, logp, _ = linear_policy_loss(**given, normalizer=1.0)
    loss.backward()
    exact = given["advantages"].detach().double().requires_grad_()
    ratio = torch.exp(logp.double() - given["old_logp"].double())
    (-torch.minimum(ratio * exact, ratio.clamp(0.8, 1.2) * exact)).sum().backward()
    error = (given["advantages"].grad.double() - exact.grad).abs().max()
    assert error <= 4 * torch.finfo(torch.float32).eps * ratio.max()
    assert given["hidden_states"].grad.count_nonzero() > 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lm_head_weight": torch.randn(VOCABULARY, HIDDEN + 1)}, "linear_policy_loss: .*with the same H"),
        ({"lm_head_weight": torch.randn(VOCABULARY, HIDDEN).bfloat16()}, "both must be bfloat16 or both float32"),
        ({"lm_head_weight": torch.empty(VOCABULARY, HIDDEN, device="meta")}, "lm_head_weight is on meta"),
        ({"target_ids": torch.zeros(TOKENS, dtype=torch.int64, device="meta")}, "target_ids are on meta"),
        ({"old_logp": torch.zeros(TOKENS + 1)}, r"old_logp \(7,\) must be \(6,\)"),
        ({"advantages": torch.zeros(TOKENS, device="meta")}, "advantages is on meta"),
        ({"mask": torch.zeros(TOKENS, device="meta")}, "mask is on meta"),
        ({"grad_segments": 3}, "grad_segments=3 must be a power of two"),
    ],
)
def test_errors_name_the_field(change, message):
    with pytest.raises(ContractError, match=message):
        linear_policy_loss(**{**arguments(), **change})
