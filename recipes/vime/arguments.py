"""A run's configuration as vime's argument list.

``native`` and ``strict`` arms get the same list; they differ in the last block alone, so that a comparison of the two
compares operators and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from recipes.config import RunConfig
from recipes.errors import ConfigError
from recipes.metrics.wandb_logger import has_credentials
from rl_kernel.contract import VOCAB_LEAF

STRICT_MODES = ("strict", "audit")


def prompts_path(config: RunConfig, content: str) -> Path:
    """The prompts file made of these ``data.*`` settings and a data set with the digest ``content``."""
    key = hashlib.sha256(json.dumps([asdict(config.data), content], sort_keys=True).encode()).hexdigest()[:12]
    return Path(config.trainer.output_dir) / f"prompts-{key}.jsonl"


def checkpoint_paths(config: RunConfig) -> dict[str, Path]:
    """Folders of a run: the Hugging Face model, its torch_dist conversion, and vime's own checkpoints."""
    if not config.model.path:
        raise ConfigError(
            "is null, and vime starts from a checkpoint",
            where="model.path",
            fix="Give a Hugging Face folder, for example model.path=/root/Qwen3-8B.",
        )
    hf = Path(config.model.path)
    return {
        "hf": hf,
        "torch_dist": hf.parent / f"{hf.name}_torch_dist",
        "save": Path(config.trainer.output_dir) / "checkpoints",
    }


def model_arguments(config: RunConfig) -> list[str]:
    """Megatron's description of the architecture."""
    model = config.model
    arguments = ["--swiglu", "--disable-bias-linear", "--qk-layernorm", "--group-query-attention"]
    arguments += ["--use-rotary-position-embeddings", "--normalization", "RMSNorm"]
    arguments.append("--no-gradient-accumulation-fusion")  # Apex's kernel, which the images do not have
    sizes = {
        "--num-layers": model.num_hidden_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.intermediate_size,
        "--num-attention-heads": model.num_attention_heads,
        "--num-query-groups": model.num_key_value_heads,
        "--kv-channels": model.head_dim,
        "--norm-epsilon": model.rms_norm_eps,
        "--rotary-base": int(model.rope_theta),
        "--vocab-size": model.vocab_size,
    }
    arguments += [str(item) for pair in sizes.items() for item in pair]
    if not model.tie_word_embeddings:
        arguments.append("--untie-embeddings-and-output-weights")
    return arguments


def _rollout(config: RunConfig, paths: dict[str, Path], prompts: Path) -> list[str]:
    rollout, trainer = config.rollout, config.trainer
    pairs = {
        "--hf-checkpoint": paths["hf"],
        "--ref-load": paths["torch_dist"],
        "--load": paths["save"],
        "--save": paths["save"],
        "--save-interval": trainer.save_interval or trainer.steps,
        "--seed": trainer.seed,
        "--rollout-seed": trainer.seed,
        "--prompt-data": prompts,
        "--input-key": "prompt",
        "--label-key": "label",
        "--rm-type": "dapo" if config.reward.name == "math" else config.reward.name,
        "--reward-key": "score" if config.reward.name == "math" else None,
        "--num-rollout": trainer.steps,
        "--rollout-batch-size": rollout.batch_size,
        "--n-samples-per-prompt": rollout.n_samples_per_prompt,
        "--rollout-max-prompt-len": rollout.max_prompt_len,
        "--rollout-max-response-len": rollout.max_response_len,
        "--rollout-max-context-len": rollout.context_len,
        "--rollout-temperature": rollout.temperature,
        "--rollout-top-p": rollout.top_p,
        "--rollout-top-k": rollout.top_k or -1,
        "--num-steps-per-rollout": config.algorithm.num_minibatches * config.algorithm.ppo_epochs,
        "--rollout-num-gpus-per-engine": rollout.tensor_parallel_size,
    }
    arguments = [str(item) for key, value in pairs.items() if value is not None for item in (key, value)]
    return [*arguments, "--rollout-shuffle", "--apply-chat-template", "--balance-data"]


def _train(config: RunConfig) -> list[str]:
    train, hardware = config.train, config.hardware
    # Shards of every tensor-parallel size up to virtual_tp nest in one padded vocabulary.
    divisible_by = VOCAB_LEAF * config.consistency.segments // train.tensor_parallel_size
    pairs = {
        "--train-backend": "megatron",
        "--actor-num-nodes": hardware.nodes,
        "--actor-num-gpus-per-node": hardware.devices,
        "--num-gpus-per-node": hardware.devices,
        "--tensor-model-parallel-size": train.tensor_parallel_size,
        "--pipeline-model-parallel-size": 1,
        "--context-parallel-size": train.context_parallel_size,
        "--make-vocab-size-divisible-by": divisible_by,
        "--max-tokens-per-gpu": train.micro_batch_tokens // train.context_parallel_size,
        "--optimizer": "adam",
        "--lr": train.lr,
        "--lr-decay-style": "constant",
        "--lr-warmup-iters": train.lr_warmup_steps,
        "--weight-decay": train.weight_decay,
        "--adam-beta1": train.adam_beta1,
        "--adam-beta2": train.adam_beta2,
        "--adam-eps": train.adam_eps,
        "--clip-grad": train.clip_grad,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
    }
    arguments = [str(item) for pair in pairs.items() for item in pair]
    arguments += ["--use-dynamic-batch-size", "--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32"]
    if train.sequence_parallel:
        arguments.append("--sequence-parallel")
    if train.recompute:
        arguments += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    if hardware.colocate:
        arguments.append("--colocate")
    if hardware.device == "rocm":
        arguments.append("--no-offload-train")  # its memory saver leaks in the colocated offload path
    return arguments


def _algorithm(config: RunConfig) -> list[str]:
    algorithm = config.algorithm
    pairs = {
        "--advantage-estimator": algorithm.name,
        "--eps-clip": algorithm.clip_low,
        "--eps-clip-high": algorithm.clip_high,
        "--eps-clip-c": algorithm.dual_clip,
        "--entropy-coef": algorithm.entropy_coef,
    }
    if algorithm.name == "ppo":
        pairs |= {
            "--gamma": algorithm.gamma,
            "--lambd": algorithm.gae_lambda,
            "--value-clip": algorithm.value_clip,
            "--num-critic-only-steps": algorithm.critic_warmup_steps,
            "--megatron-config-path": roles_path(config),
        }
    arguments = [str(item) for key, value in pairs.items() if value is not None for item in (key, value)]
    if algorithm.name == "ppo" and algorithm.whiten_advantages:
        arguments.append("--normalize-advantages")
    if algorithm.name == "grpo" and not algorithm.normalize_std:
        arguments.append("--disable-grpo-std-normalization")
    if algorithm.kl_coef > 0:
        estimator = {"k1": "k1", "k2": "k2", "k3": "low_var_kl"}[algorithm.kl_estimator]
        arguments += ["--use-kl-loss", "--kl-loss-coef", str(algorithm.kl_coef), "--kl-loss-type", estimator]
    if algorithm.loss_aggregation == "token_mean":
        arguments.append("--calculate-per-token-loss")
    if algorithm.dynamic_sampling:
        arguments += [
            "--dynamic-sampling-filter-path",
            "vime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            "--over-sampling-batch-size",
            str(2 * config.rollout.batch_size),
        ]
    return arguments


def _vllm(config: RunConfig) -> list[str]:
    rollout = config.rollout
    arguments = [
        *("--vllm-logprobs-mode", "processed_logprobs"),  # after the temperature: what the trainer computes
        *("--vllm-gpu-memory-utilization", str(rollout.gpu_memory_utilization)),
        *("--vllm-max-num-seqs", str(rollout.max_num_seqs)),
        *("--vllm-max-num-batched-tokens", str(rollout.max_num_batched_tokens)),
        *("--vllm-block-size", str(rollout.block_size)),
    ]
    if rollout.enforce_eager:
        arguments.append("--vllm-enforce-eager")
    return arguments


def _logger(config: RunConfig) -> list[str]:
    logger = config.logger
    if logger.wandb == "off":
        return []
    online = logger.wandb == "online" or (logger.wandb == "auto" and has_credentials())
    name = logger.run_name or f"{config.model.name}-{config.algorithm.name}-{config.consistency.mode}"
    return [
        *("--use-wandb", "--wandb-mode", "online" if online else "offline"),
        *("--wandb-project", logger.project, "--wandb-group", name),
        *("--wandb-dir", config.trainer.output_dir),
    ]


def _consistency(config: RunConfig) -> list[str]:
    # Both arms count mismatches before training; only the strict one replaces operators.
    arguments = [
        "--get-mismatch-metrics",
        *("--custom-tis-function-path", "recipes.vime.mismatch.no_correction"),
        *("--rollout-data-postprocess-path", "recipes.vime.mismatch.record"),
    ]
    if config.consistency.mode not in STRICT_MODES:
        return [*arguments, "--attention-backend", "flash"]
    if config.train.context_parallel_size > 1:
        # Keys and values are gathered and attended from position 0; Megatron wants that named for local modules.
        arguments += ["--cp-comm-type", "all_gather"]
    return [
        *arguments,
        *("--transformer-impl", "local"),
        *("--spec", "recipes.vime.spec", "strict_layer_spec"),
        *("--custom-megatron-init-path", "recipes.vime.init.init"),
        *("--custom-megatron-before-log-prob-hook-path", "recipes.vime.init.before_log_prob"),
        *("--custom-megatron-before-train-step-hook-path", "recipes.vime.init.before_train_step"),
    ]


def role_overrides(config: RunConfig) -> dict[str, list[dict[str, object]]] | None:
    """vime's per-role file: PPO's critic has its own learning rate. ``None`` when one role is all there is."""
    if config.algorithm.name != "ppo":
        return None
    entries = {"actor": {"lr": config.train.lr}, "critic": {"lr": config.train.critic_lr}}
    return {"megatron": [{"name": role, "role": role, "overrides": values} for role, values in entries.items()]}


def roles_path(config: RunConfig) -> Path:
    """Where the launcher writes :func:`role_overrides`."""
    return Path(config.trainer.output_dir) / "megatron_roles.yaml"


def build(config: RunConfig, prompts: Path) -> list[str]:
    """The argument list of vime's ``train.py``.

    Args:
        config: a validated configuration with ``orchestrator=vime``.
        prompts: jsonl file with ``prompt`` (chat messages) and ``label`` on every line.
    """
    paths = checkpoint_paths(config)
    return [
        *model_arguments(config),
        *_rollout(config, paths, prompts),
        *_train(config),
        *_algorithm(config),
        *_vllm(config),
        *_logger(config),
        *_consistency(config),
    ]


def environment(config: RunConfig) -> dict[str, str]:
    """Variables of every process of the job: trainers, engines and their workers."""
    orchestrator = config.orchestrator
    root = Path(__file__).resolve().parents[2]
    variables = {
        "PYTHONPATH": f"{root}:{orchestrator.vime_root}:{orchestrator.megatron_root}",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "RL_KERNEL_MODE": config.consistency.mode,
        "RL_KERNEL_VIRTUAL_TP": str(config.consistency.segments),
        "RL_KERNEL_RUN_DIR": config.trainer.output_dir,
        "RLK_WORKSPACE_MIB": str(config.train.logp_workspace_mib),
    }
    if config.consistency.mode in STRICT_MODES and config.hardware.device == "cuda":
        # cuBLASLt without split-K; rl_kernel.cublaslt checks at start-up that these took effect.
        variables |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
        variables["RLK_SM90_ATTENTION"] = config.consistency.attention_on("sm90")
    if config.consistency.mode in STRICT_MODES:
        # The replaced sampler: vLLM's second model runner and FlashInfer's sampler do not go through it.
        variables |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return variables
