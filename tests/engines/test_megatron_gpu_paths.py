"""What the training engine does on GPUs and can be checked without one: packed stock forward, SGD, bounded temporaries,
state that is read back from a mapped file."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from recipes.engines import megatron_optim, megatron_weights
from recipes.errors import EngineError
from tests.engines import megatron_jobs as jobs
from tests.engines.megatron_ranks import Case, make_batch, run

pytestmark = pytest.mark.engines


def _sequence_by_sequence(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):  # type: ignore[no-untyped-def]
    """``varlen_attn`` of torch, which has no CPU kernel."""
    assert window_size == (-1, 0) and max_q == int((cu_q[1:] - cu_q[:-1]).max())
    parts = [
        F.scaled_dot_product_attention(
            *(t[a:b].transpose(0, 1) for t in (q, k, v)), is_causal=True, scale=scale, enable_gqa=enable_gqa
        ).transpose(0, 1)
        for a, b in zip(cu_q[:-1].tolist(), cu_q[1:].tolist())
    ]
    return torch.cat(parts)


def stock(rank: int, port: int, packed: bool) -> dict[str, Any]:
    """The stock engine as it runs on the CPU, or as it runs on a GPU, with small blocks of logits."""
    from recipes.engines import megatron_model, megatron_native

    if packed:
        import torch.nn.attention.varlen as varlen

        varlen.varlen_attn = _sequence_by_sequence
        native_spec, build = megatron_native.native_spec, megatron_model.build

        def build_packed(*args: Any, **kwargs: Any) -> Any:
            model = build(*args, **kwargs)
            model.rotary_pos_emb = megatron_native.PackedRotary(model.rotary_pos_emb)
            return model

        megatron_native.native_spec = lambda on_cpu: native_spec(False)
        megatron_native._hidden = megatron_native._packed_hidden
        megatron_native._LOGITS_BYTES, megatron_native._ROWS = 1, 16
        megatron_model.build = build_packed
    engine = Case("float32", mode="native", tied=False).engine(rank, port)

    def loss(logp: torch.Tensor, entropy: torch.Tensor, batch: Any) -> Any:
        return (logp - 0.2 * entropy).sum() / 50.0, {}

    before = [part.numpy() for part in engine.forward_logp(make_batch(), 0.7)]
    engine.forward_backward([make_batch(), make_batch(3, seed=4)], loss, 0.7)
    norm = engine.optimizer_step()["grad_norm"]
    after = engine.forward_logp(make_batch(), 1.0).logp.numpy()
    engine.shutdown()
    return {"before": before, "norm": norm, "after": after}


def test_packed_stock_forward_is_the_padded_one() -> None:
    (padded,), (packed,) = (run(1, stock, how) for how in (False, True))
    for one, other in zip([*padded["before"], padded["after"]], [*packed["before"], packed["after"]]):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
    assert packed["norm"] == pytest.approx(padded["norm"], rel=1e-5)


def test_statistics_have_the_gradients_of_their_formulas() -> None:
    from recipes.engines.megatron_native import _Statistics

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float32) * 3
    targets, weights = torch.arange(7), torch.randn(3, 7, generator=generator)

    def formulas(z: torch.Tensor) -> torch.Tensor:
        z = z / 0.7
        log_p = z.log_softmax(-1)
        return torch.stack([log_p[torch.arange(7), targets], z.logsumexp(-1), -(log_p.exp() * log_p).sum(-1)])

    exact = logits.double().requires_grad_()
    (formulas(exact) * weights).sum().backward()
    ours = logits.clone().requires_grad_()
    out = _Statistics.apply(ours, targets, 0.7)
    (out * weights).sum().backward()
    torch.testing.assert_close(out.double(), formulas(exact.detach()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]


def test_sgd_trains_and_resumes_with_the_same_bits(tmp_path: Any) -> None:
    case = Case(train={"optimizer": "sgd", "lr": 0.5})
    (whole,) = run(1, jobs.train, case, 3, str(tmp_path / "s"), 1)
    (rest,) = run(1, jobs.train, case, 3, str(tmp_path / "s"))
    assert (rest["last"], rest["hash"], rest["history"]) == (whole["last"], whole["hash"], whole["history"][2:])
    (adam,) = run(1, jobs.train, Case(train={"lr": 0.5}), 1)
    assert adam["history"][0] == whole["history"][0]  # the same gradient, another update
    assert adam["hash"] != whole["hash"]
    for rank in run(2, jobs.train, Case(tp=2, train=case.train), 3):
        assert (rank["hash"], rank["history"]) == (whole["hash"], whole["history"])


@pytest.mark.parametrize("count", [1, 1000, 1024, 1025, 1 << 14, (1 << 14) + 77, (3 << 14) + 5000])
def test_chunks_do_not_change_the_gradient_norm(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    whole = megatron_optim._sum_of_squares(x)
    monkeypatch.setattr(megatron_optim, "_CHUNK", 1 << 14)
    assert megatron_optim._sum_of_squares(x).item() == whole.item()
    assert whole.item() == pytest.approx(x.double().square().sum().item(), rel=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_finite(monkeypatch: pytest.MonkeyPatch, value: float, dtype: torch.dtype) -> None:
    monkeypatch.setattr(megatron_weights, "_CHUNK", 64)
    x = torch.zeros(3, 70, dtype=dtype)
    assert megatron_weights.all_finite(x) and megatron_weights.all_finite(x[:0])
    for place in (0, 63, 64, 209):
        broken = x.clone().view(-1)
        broken[place] = value
        assert not megatron_weights.all_finite(broken)


def test_the_broken_weight_is_named_after_all_are_read() -> None:
    config = Case().model_config()
    named = megatron_weights.init_hf_weights(config, 0)
    broken = "model.layers.1.mlp.up_proj.weight"
    named[broken][3, 4] = float("nan")
    read = megatron_weights.Checked(megatron_weights.mapping_reader(named), config)
    for name in named:
        read(name)
    with pytest.raises(EngineError, match=rf"weight {broken}: 1 of .* at \[3, 4\]"):
        read.finish()
