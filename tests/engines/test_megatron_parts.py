"""Parts of the training engine that need no process group."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from recipes.config import ModelConfig
from recipes.engines import megatron_cp, megatron_cpu
from recipes.engines import megatron_weights as weights
from recipes.errors import ConfigError, EngineError

CONFIG = ModelConfig(vocab_size=300, hidden_size=64, intermediate_size=128, tie_word_embeddings=False)


@pytest.mark.parametrize("size", (1, 2))
def test_shards_of_all_ranks_make_up_the_model(size: int) -> None:
    full = weights.init_hf_weights(CONFIG, 3)
    parts = [
        dict(weights.shards(CONFIG, full.__getitem__, padded_vocab=512, rank=rank, size=size)) for rank in range(size)
    ]
    layer = "decoder.layers.0."
    assert parts[0]["embedding.word_embeddings.weight"].shape == (512 // size, 64)
    assert not parts[-1]["output_layer.weight"][-(512 - 300) // size :][-8:].any()
    # One group of a key/value head: its two query heads, the key, the value.
    qkv = parts[0][layer + "self_attention.linear_qkv.weight"]
    attn = "model.layers.0.self_attn."
    assert torch.equal(qkv[:64], full[attn + "q_proj.weight"][:64])
    assert torch.equal(qkv[64:96], full[attn + "k_proj.weight"][:32])
    assert torch.equal(qkv[96:128], full[attn + "v_proj.weight"][:32])
    fc1 = [p[layer + "mlp.linear_fc1.weight"].chunk(2) for p in parts]
    assert torch.equal(torch.cat([g for g, _ in fc1]), full["model.layers.0.mlp.gate_proj.weight"])
    assert torch.equal(torch.cat([u for _, u in fc1]), full["model.layers.0.mlp.up_proj.weight"])
    if size == 1:
        back = dict(weights.export(parts[0], CONFIG, None))
        assert back.keys() == full.keys()
        assert all(torch.equal(back[name], full[name]) for name in full)


def test_starting_weights_depend_on_name_and_seed_alone() -> None:
    a, b, c = (weights.init_hf_weights(CONFIG, seed) for seed in (3, 3, 4))
    small = weights.init_hf_weights(ModelConfig(**{**CONFIG.__dict__, "num_hidden_layers": 1}), 3)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(a[name], b[name]) and torch.equal(a[name], small[name])
    assert not torch.equal(a[name], c[name])
    assert a[name].float().std().item() == pytest.approx(CONFIG.init_std, rel=0.05)
    assert bool((a["model.norm.weight"] == 1).all())


@pytest.mark.parametrize("sharded", (False, True))
def test_weights_from_a_folder(sharded: bool, tmp_path) -> None:
    from safetensors.torch import save_file

    empty = tmp_path / "empty"
    empty.mkdir()
    full = weights.init_hf_weights(CONFIG, 3)
    if sharded:
        names = sorted(full)
        files = {n: f"model-{i % 2}.safetensors" for i, n in enumerate(names)}
        for file in set(files.values()):
            save_file({n: full[n] for n in names if files[n] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(full, tmp_path / "model.safetensors")
    read = weights.open_safetensors(str(tmp_path), torch.bfloat16)
    assert all(torch.equal(read(name), full[name]) for name in full)
    with pytest.raises(ConfigError, match="model.layers.7.*is not in"):
        read("model.layers.7.mlp.up_proj.weight")
    with pytest.raises(ConfigError, match="no safetensors file"):
        weights.open_safetensors(str(empty), torch.bfloat16)


def test_zigzag_layout() -> None:
    cu = torch.tensor([0, 8, 12], dtype=torch.int32)
    parts = [megatron_cp.build_layout(cu, rank, 2) for rank in range(2)]
    assert parts[0].tokens.tolist() == [0, 1, 6, 7, 8, 11]
    assert parts[1].tokens.tolist() == [2, 3, 4, 5, 9, 10]
    assert parts[0].positions.tolist() == [0, 1, 6, 7, 0, 3]
    assert parts[0].cu_q.tolist() == [0, 2, 4, 5, 6]
    assert parts[0].cu_k.tolist() == [0, 2, 10, 11, 15]
    assert parts[0].keys.tolist() == [0, 1, *range(8), 8, 8, 9, 10, 11]
    order = torch.cat([p.tokens for p in parts])
    for part in parts:
        assert torch.equal(order[part.gathered], torch.arange(12)) and torch.equal(order[part.sources], part.keys)
        assert torch.cat([part.lower, part.upper]).sort().values.tolist() == list(range(len(part.keys)))
        assert all(len(part.keys[seen].unique()) == len(seen) for seen in (part.lower, part.upper))
    with pytest.raises(EngineError, match="not a multiple of 4"):
        megatron_cp.build_layout(torch.tensor([0, 6]), 0, 2)


def test_cpu_scope_leaves_nothing_behind() -> None:
    if not megatron_cpu.needed():
        pytest.skip("an accelerator is present: the scope does nothing")
    before = (torch.cuda.current_device, torch.cuda.current_stream)
    with pytest.raises(ZeroDivisionError), megatron_cpu.scope(), megatron_cpu.scope(optimizer=True):
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        raise ZeroDivisionError
    assert (torch.cuda.current_device, torch.cuda.current_stream) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_not_finite_is_located() -> None:
    bad = torch.zeros(3, 4)
    bad[1, 2] = float("inf")
    with pytest.raises(EngineError, match=r"weight w: 1 of 12 elements are not finite, the first is inf at \[1, 2\]"):
        weights.require_finite(bad, "weight w")
