"""Our hooks on real vime and real Megatron-LM, in gloo processes on the CPU.

Set ``VIME_ROOT`` and ``MEGATRON_LM_ROOT`` to checkouts (``VIME_EXTRA_PATH``: further folders with what vime imports).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.vime import arguments
from tests.vime.helpers import ARMS, ROOT, run_config

VIME, MEGATRON = os.environ.get("VIME_ROOT"), os.environ.get("MEGATRON_LM_ROOT")
EXTRA = os.environ.get("VIME_EXTRA_PATH", "")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not (VIME and MEGATRON), reason="VIME_ROOT and MEGATRON_LM_ROOT are not set to checkouts"),
]


def environment() -> dict[str, str]:
    path = ":".join(filter(None, [str(ROOT), VIME, MEGATRON, EXTRA]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "HF_HUB_OFFLINE": "1"}


@functools.cache
def run(tp: int, cp: int, sequence_parallel: bool = False, tied: bool = False) -> list[dict[str, Any]]:
    worker = str(Path(__file__).with_name("real_vime_worker.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp * cp}", worker]
    command += [str(tp), str(cp), str(int(sequence_parallel)), str(int(tied))]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return json.loads([line for line in result.stdout.splitlines() if line.startswith("[{")][-1])


LAYOUTS = [(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False), (2, 2, False)]


@pytest.mark.parametrize(("tp", "cp", "sequence_parallel"), LAYOUTS)
def test_log_probabilities_are_vimes_within_rounding(tp: int, cp: int, sequence_parallel: bool) -> None:
    for rank in run(tp, cp, sequence_parallel):
        assert rank["lengths"]
        # Twice the error of vime's own fp32 path against float64, and never below one rounding of a logit near 10.
        assert rank["error_strict"] <= 2 * rank["error_vime"] + 1e-6
        assert rank["gradient_relative"] < 2e-2  # bf16 gradients against fp32 ones
        assert rank["backend"] == "native"


@pytest.mark.parametrize(("tp", "cp", "sequence_parallel"), LAYOUTS)
def test_no_logits_exist(tp: int, cp: int, sequence_parallel: bool) -> None:
    for rank in run(tp, cp, sequence_parallel):
        # The largest tensor is the LM head itself; a logits tensor would be larger.
        assert rank["largest_elements"] <= rank["weight_elements"] < rank["logits_elements"]


def test_tied_heads_are_vimes_within_rounding() -> None:
    (alone,), pair = run(1, 1, tied=True), run(2, 1, tied=True)
    for rank in (alone, *pair):
        assert rank["error_strict"] <= 2 * rank["error_vime"] + 1e-6 and rank["gradient_relative"] < 2e-2
        assert rank["bits"] == alone["bits"]
    assert alone["bits"] != run(1, 1, False)[0]["bits"]
    assert len(alone["exported"]) == 2 * 11 + 2 and all(alone["exported"].values())


@pytest.mark.parametrize(("tp", "cp", "sequence_parallel"), LAYOUTS)
def test_policy_and_reference_passes_of_vime_have_the_same_bits(tp: int, cp: int, sequence_parallel: bool) -> None:
    for rank in run(tp, cp, sequence_parallel):  # other micro-batches, models that only the hook has seen
        assert rank["roles"] == {"": rank["bits"], "ref_": rank["bits"]}


def test_weights_leave_under_hugging_face_names() -> None:
    exported = run(1, 1, False)[0]["exported"]
    assert exported["model.layers.1.post_attention_layernorm.weight"] and len(exported) == 2 * 11 + 3
    assert all(exported.values())


def test_rebinding_reaches_every_holder() -> None:
    assert all(rank["rebound"] >= 2 for rank in run(1, 1, False))


def test_critic_keeps_its_own_head() -> None:
    for rank in run(1, 1, False):
        assert rank["critic_changed"] == 0 and rank["critic_values"] == rank["tokens"]


def test_bits_do_not_depend_on_tensor_or_sequence_parallelism() -> None:
    reference = run(1, 1, False)[0]["bits"]
    for tp, cp, sequence_parallel in LAYOUTS:
        if cp == 1:
            for rank in run(tp, cp, sequence_parallel):
                assert rank["bits"] == reference
    merged = [sorted(run(tp, 2, False)[0]["bits"] + run(tp, 2, False)[tp]["bits"]) for tp in (1, 2)]
    assert merged[0] == merged[1] == sorted(reference)


PARSE = """
import json, sys, torch
torch.cuda.get_device_capability = lambda *a: (9, 0)
torch.cuda.get_device_properties = lambda *a: type("P", (), {"major": 9, "minor": 0})()
torch.cuda.device_count = lambda: 8
flags = [a for a in sys.argv[1:] if a.startswith("--")]
from vime.utils.arguments import parse_args
args = parse_args()
names = {"--rollout-max-response-len": "rollout_max_response_len"}
missing = [f for f in flags if not hasattr(args, f[2:].replace("-", "_"))]
print(json.dumps({"missing": missing, "padded": args.padded_vocab_size, "estimator": args.advantage_estimator}))
"""
# Flags whose destination has another name, or that Megatron stores negated.
RENAMED = {
    "--disable-bias-linear",
    "--use-rotary-position-embeddings",
    "--untie-embeddings-and-output-weights",
    "--no-gradient-accumulation-fusion",
    "--no-offload-train",
    "--norm-epsilon",
    "--disable-grpo-std-normalization",
}


@pytest.mark.parametrize(("algorithm", "hardware", "mode"), ARMS)
def test_argument_lists_parse(algorithm: str, hardware: str, mode: str, tmp_path: Path) -> None:
    model = tmp_path / "Qwen3-8B"
    (tmp_path / "Qwen3-8B_torch_dist").mkdir()
    (tmp_path / "Qwen3-8B_torch_dist" / "latest_checkpointed_iteration.txt").write_text("0")
    model.mkdir()
    config = run_config(algorithm, hardware, mode, str(model), str(tmp_path))
    fields = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    described = {name: getattr(config.model, name) for name in fields.split()}
    described |= {"vocab_size": 151936, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    described |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40960}
    (model / "config.json").write_text(json.dumps(described))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [{"role": "user", "content": "1+1"}], "label": "2"}\n')
    command = [sys.executable, "-c", PARSE, *arguments.build(config, prompts)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    parsed = json.loads(result.stdout.splitlines()[-1])
    assert set(parsed["missing"]) <= RENAMED
    assert parsed["padded"] == 152064 and parsed["estimator"] == algorithm
