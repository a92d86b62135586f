"""The training engine: real Megatron-Core, strict modules, one to two processes."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from recipes.engines.megatron_weights import init_hf_weights
from recipes.engines.replicas import difference
from tests.engines import megatron_jobs as jobs
from tests.engines import qwen3_oracle
from tests.engines.megatron_ranks import VOCAB, Case, make_batch, raw, run

pytestmark = pytest.mark.engines
DTYPES = ("float32", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", (True, False))
@pytest.mark.parametrize("segments", (1, 2))
def test_strict_equals_the_model_written_in_operators(dtype: str, tied: bool, segments: int) -> None:
    case = Case(dtype=dtype, tied=tied, virtual_tp=segments)
    (engine,) = run(1, jobs.forward, case, 0.7)
    batch, config = make_batch(), case.model_config()
    want = qwen3_oracle.logp(config, init_hf_weights(config, case.seed), batch, segments=segments, temperature=0.7)
    assert engine["bytes"] == b"".join(raw(part[batch.active]) for part in want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", (True, False))
def test_tensor_parallel_has_the_same_bits(dtype: str, tied: bool) -> None:
    one, two = Case(dtype=dtype, tied=tied), Case(dtype=dtype, tied=tied, tp=2)
    (want,) = run(1, jobs.train, one, 3)
    for rank in run(2, jobs.train, two, 3):
        assert rank["last"] == want["last"]
        assert rank["history"] == want["history"]  # losses, gradient norms and learning rates, exactly
        assert rank["hash"] == want["hash"]


def test_virtual_tp_is_part_of_the_arithmetic() -> None:
    """Negative control: one segment instead of two changes bits, so the equality above is not empty."""
    (one,) = run(1, jobs.forward, Case("float32", virtual_tp=1), 1.0)
    (two,) = run(1, jobs.forward, Case("float32", virtual_tp=2), 1.0)
    assert one["bytes"] != two["bytes"]
    assert one["info"]["contract"] != two["info"]["contract"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequence_parallel_has_the_same_bits(dtype: str) -> None:
    (want,) = run(1, jobs.forward, Case(dtype=dtype), 1.0)
    case = Case(dtype=dtype, tp=2, train={"sequence_parallel": True})
    for rank in run(2, jobs.forward, case, 1.0, 2):
        assert rank["bytes"] == want["bytes"]


def test_sequence_parallel_trains() -> None:
    """The gradient of a norm weight is summed over slices of the tokens: another order, the same number."""
    case = Case("float32", tp=2, train={"sequence_parallel": True})
    (one,) = run(1, jobs.train, Case("float32"), 3, "", -1, 2)
    first, second = (run(2, jobs.train, case, 3, "", -1, 2) for _ in range(2))
    assert first[0] == first[1] == second[0]
    assert np.array(first[0]["history"]) == pytest.approx(np.array(one["history"]), rel=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case("float32", cp=2),
        Case("bfloat16", cp=2, role="critic"),
        Case("bfloat16", cp=4, train={"distributed_optimizer": True}),
        Case("bfloat16", cp=2, tp=2, train={"sequence_parallel": True}),
    ],
    ids=lambda c: f"{c.dtype}-cp{c.cp}-tp{c.tp}-{c.role}",
)
def test_context_parallel_has_the_same_bits(case: Case) -> None:
    """Results before an update: those without context parallelism. An update adds partial sums in another order, so it
    is the same in every run and on every rank, and close to the update without."""
    one = replace(case, cp=1, tp=1, train={})
    (want,) = run(1, jobs.context_parallel, one)
    ranks = run(case.world, jobs.context_parallel, case)
    speaking = ranks[:: case.tp]
    for name in ("before", "after"):
        tokens = {(i, t) for rank in speaking for i, part in rank[name].items() for t in part}
        assert len(tokens) == sum(len(part) for rank in speaking for part in rank[name].values())  # each once
        assert tokens == {(i, t) for i, part in want[name].items() for t in part}
    for rank in ranks:  # tensor-parallel ranks hold the same tokens
        for i, part in rank["before"].items():
            assert part.items() <= want["before"][i].items()
    assert len({r["hash"] for r in ranks}) == 1
    assert [(r["hash"], r["after"]) for r in ranks] == [
        (r["hash"], r["after"]) for r in run(case.world, jobs.context_parallel, case)
    ]
    for rank in ranks:
        assert rank["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5 if case.dtype == "float32" else 1e-2)


def test_packing_changes_no_bit() -> None:
    (ways,) = run(1, jobs.splits, Case())
    assert len(set(ways.values())) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_mode_is_close_and_differs(dtype: str) -> None:
    (strict,) = run(1, jobs.forward, Case(dtype=dtype), 1.0)
    (native,) = run(1, jobs.forward, Case(dtype=dtype, mode="native"), 1.0)
    differing = np.mean(strict["logp"].view(np.int32) != native["logp"].view(np.int32))
    assert differing > 0.1
    assert np.abs(strict["logp"] - native["logp"]).max() < (1e-5 if dtype == "float32" else 0.1)
    assert native["info"]["contract"] is None
    assert native["hash"] == strict["hash"]


def test_native_tensor_parallel_trains_alike() -> None:
    (one,) = run(1, jobs.train, Case(mode="native", dtype="float32"), 3)
    ranks = run(2, jobs.train, Case(mode="native", dtype="float32", tp=2), 3)
    assert ranks[0]["hash"] == ranks[1]["hash"]  # replicated weights, q and k norms among them, stay equal
    assert np.array(ranks[0]["history"]) == pytest.approx(np.array(one["history"]), rel=1e-3)


def _hf_model(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = case.model_config()
    hf = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=case.tied,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(hf)
    missing = model.load_state_dict(init_hf_weights(config, case.seed), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.to(dtype)


def _hf_logp(model: torch.nn.Module, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    batch = make_batch()
    logp, entropy = [], []
    for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
        rows = batch.active[a:b]
        logits = model(batch.tokens[None, a:b]).logits[0][rows] / temperature
        full = torch.log_softmax(logits, -1)
        logp.append(full.gather(1, batch.target_ids[a:b][rows][:, None])[:, 0])
        entropy.append(-(full.exp() * full).sum(-1))
    return torch.cat(logp), torch.cat(entropy)


@pytest.mark.parametrize("tied", (True, False))
def test_logp_and_gradients_against_float64(tied: bool) -> None:
    """Error at most three times that of Hugging Face's own fp32 run, both against float64."""
    case = Case(dtype="float32", tied=tied)
    (ours,) = run(1, jobs.forward, case, 0.7)
    (grads,) = run(1, jobs.gradients, case)
    exact: dict[str, torch.Tensor] = {}
    errors: dict[str, float] = {}
    for dtype in (torch.float64, torch.float32):
        model = _hf_model(case, dtype)
        logp, entropy = _hf_logp(model, 0.7)
        (-(logp + 0.01 * entropy).sum() / 100.0).backward()
        found = {"logp": logp.detach(), **{n: p.grad for n, p in model.named_parameters()}}
        if dtype is torch.float64:
            exact = found
        else:
            errors = {n: float((t.double() - exact[n]).norm()) for n, t in found.items()}
    mine = {"logp": torch.from_numpy(ours["logp"]), **{n: torch.from_numpy(g) for n, g in grads.items()}}
    assert set(mine) == set(exact)
    for name, tensor in mine.items():
        error = float((tensor.double() - exact[name]).norm())
        assert error <= 3 * errors[name] + 1e-7 * float(exact[name].norm()), name


def test_bf16_gradients_follow_float64() -> None:
    case = Case(dtype="bfloat16")
    (grads,) = run(1, jobs.gradients, case)
    model = _hf_model(case, torch.float64)
    logp, entropy = _hf_logp(model, 0.7)
    (-(logp + 0.01 * entropy).sum() / 100.0).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None
        cosine = torch.nn.functional.cosine_similarity(
            torch.from_numpy(grads[name]).double().flatten(), param.grad.flatten(), dim=0
        )
        assert cosine > 0.999, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ("policy", "critic"))
def test_resume_continues_with_the_same_bits(dtype: str, role: str, tmp_path) -> None:
    case, folder = Case(dtype=dtype, role=role), str(tmp_path / "state")
    (whole,) = run(1, jobs.train, case, 5)
    (saved,) = run(1, jobs.train, case, 2, folder, 1)
    (resumed,) = run(1, jobs.train, case, 5, folder)
    assert saved["history"] == whole["history"][:2]
    assert resumed["history"] == whole["history"][2:]
    assert (resumed["hash"], resumed["last"]) == (whole["hash"], whole["last"])


@pytest.mark.parametrize("distributed", (False, True))
def test_data_parallel_is_deterministic_and_resumes(distributed: bool, tmp_path) -> None:
    case, folder = Case(dp=2, train={"distributed_optimizer": distributed}), str(tmp_path / "state")
    whole = run(2, jobs.train, case, 4)
    run(2, jobs.train, case, 2, folder, 1)
    resumed = run(2, jobs.train, case, 4, folder)
    assert whole[0]["hash"] == whole[1]["hash"] == resumed[0]["hash"] == resumed[1]["hash"]
    assert whole[0]["last"] == resumed[1]["last"]
    assert resumed[0]["history"] == whole[0]["history"][2:]


def test_data_parallel_sums_what_accumulation_sums() -> None:
    """Two ranks with one micro-batch each, or one rank with two: the same sum of two fp32 gradients, the same bits."""
    (one,) = run(1, jobs.accumulate, Case())
    two = run(2, jobs.accumulate, Case(dp=2))
    assert one == two[0] == two[1]


FC2, NORM = "decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("case", "perturbed", "said"),
    [
        (Case(dp=2), {1: FC2}, rf"^{FC2} \(\w{{16}} on a, \w{{16}} on b\)$"),
        (Case(dp=2, tp=2), {2: FC2}, rf"^{FC2} \(\w{{16}} on a, \w{{16}} on c\)$"),
        (Case(dp=2, tp=2), {3: NORM}, rf"^{NORM} \(\w{{16}} on a and b and c, \w{{16}} on d\)$"),
    ],
    ids=["dp", "dp-tp", "norm"],
)
def test_ranks_that_drift_apart_are_found(case: Case, perturbed: dict, said: str) -> None:
    ranks = run(case.world, jobs.drift, case, perturbed)
    names = "abcd"[: case.world]
    assert difference([before for before, _ in ranks], names, case.tp) is None
    found = difference([after for _, after in ranks], names, case.tp)
    assert found is not None and re.match(said, found), found


def test_critic_learns_and_has_the_same_bits_under_tensor_parallelism() -> None:
    (one,) = run(1, jobs.train, Case(role="critic"), 4)
    for rank in run(2, jobs.train, Case(role="critic", tp=2), 4):
        assert (rank["hash"], rank["last"], rank["history"]) == (one["hash"], one["last"], one["history"])
    losses = [loss for loss, _, _ in one["history"]]
    assert losses[-1] < 0.5 * losses[0]


def test_learning_rate_warms_up_from_above_zero() -> None:
    (one,) = run(1, jobs.train, Case(train={"lr": 4e-3, "lr_warmup_steps": 4}), 6)
    assert [lr for _, _, lr in one["history"]] == pytest.approx([1e-3, 1.75e-3, 2.5e-3, 3.25e-3, 4e-3, 4e-3])


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("tied", (True, False))
def test_export_and_load_keep_every_byte(tp: int, tied: bool) -> None:
    for rank in run(tp, jobs.round_trip, Case(tp=tp, tied=tied)):
        assert rank["before"] == rank["start"] != rank["trained"] == rank["loaded"]
        assert rank["same_logp"]
        assert ("lm_head.weight" in rank["shapes"]) is not tied
        assert rank["shapes"]["model.embed_tokens.weight"] == (VOCAB, 64)


@pytest.mark.parametrize("tied", (True, False))
def test_lm_head(tied: bool) -> None:
    for index, rank in enumerate(run(2, jobs.head, Case(tp=2, tied=tied))):
        assert rank == {
            "shape": (256, 64),
            "start": 256 * index,
            "vocab": VOCAB,
            "padded": 512,
            "ranks": 2,
            "segments": 2,
            "tied": tied,
            "zero_padding": True,
        }


def test_errors_say_what_where_and_what_to_do(tmp_path) -> None:
    (found,) = run(1, jobs.errors, str(tmp_path / "state"))
    wanted = {
        "token": ("DataError", "token id 300", "vocabulary of 300"),
        "long": ("DataError", "max_position_embeddings=256"),
        "role": ("EngineError", "policy engine"),
        "loss": ("EngineError", "loss of micro-batch 0"),
        "missing": ("WeightSyncError", "q_norm.weight is missing"),
        "extra": ("WeightSyncError", "model.layers.9.mlp.up_proj.weight"),
        "shape": ("WeightSyncError", "model.norm.weight is [3]"),
        "nan_loaded": ("EngineError", "weight model.norm.weight", "at [5]"),
        "nan_gradient": ("EngineError", "gradients", "decoder.layers.1.mlp.linear_fc2.weight", "No weight was changed"),
        "unchanged": ("True",),
        "nan_weight": ("EngineError", "decoder.layers.0.self_attention.linear_qkv.weight", "[1, 2]"),
        "disk": ("CheckpointError", "No space left"),
        "kept": ("True",),
        "no_state": ("CheckpointError", "policy_rank0.pt"),
        "damaged": ("CheckpointError", "policy_rank0.pt"),
    }
    assert set(found) == set(wanted)
    for name, parts in wanted.items():
        for part in parts:
            assert part in found[name], (name, found[name])


def test_settings_that_are_refused() -> None:
    (found,) = run(1, jobs.refusals_at_start)
    assert "train.world_size processes" in found["world"]
    assert "num_query_groups=2" in found["virtual_tp"]
    assert "train.recompute" in found["recompute"]
    assert "'judge' is not a role" in found["role"]
    assert all(text.startswith("ConfigError") for text in found.values())


def test_state_of_another_layout_is_refused(tmp_path) -> None:
    folder = str(tmp_path / "state")
    run(1, jobs.train, Case(), 1, folder, 0)
    with pytest.raises(AssertionError, match="tensor_parallel_size=1 \\(now 2\\)"):
        run(2, jobs.train, Case(tp=2), 2, folder)
