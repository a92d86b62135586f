"""What a configuration must satisfy: every field alone, and every pair of fields that can contradict.

:func:`recipes.config.validate` calls :func:`check`. Every refusal names the key, the value and the fix.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from recipes.config import MODES, RunConfig, _error
from rl_kernel.contract import MAX_VIRTUAL_TP

_CHOICES: dict[str, tuple[object, ...]] = {
    "model.dtype": ("float32", "bfloat16"),
    "hardware.device": ("cpu", "cuda", "rocm"),
    "hardware.family": ("cpu", "sm90", "gfx942"),
    "consistency.mode": MODES,
    "consistency.attention": ("auto", "blocks", "fa3"),
    "train.optimizer": ("adam", "sgd"),
    "algorithm.name": ("grpo", "ppo"),
    "algorithm.loss_aggregation": ("token_mean", "sequence_mean"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "orchestrator.name": ("local", "vime"),
    "orchestrator.backend": ("auto", "ray", "process"),
    "orchestrator.weight_link": ("auto", "device", "host"),
    "logger.wandb": ("auto", "online", "offline", "off"),
    "trainer.resume": ("auto", "never"),
}
_AT_LEAST: tuple[tuple[float, str, str], ...] = (
    (1, "model", "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"),
    (1, "model", "head_dim max_position_embeddings"),
    (1, "train", "tensor_parallel_size context_parallel_size data_parallel_size micro_batch_tokens num_threads"),
    (1, "train", "pack_multiple"),
    (64, "train", "logp_workspace_mib"),
    (0, "train", "lr critic_lr lr_warmup_steps weight_decay clip_grad recompute_layers"),
    (1, "rollout", "tensor_parallel_size num_engines batch_size n_samples_per_prompt max_prompt_len max_response_len"),
    (1, "rollout", "max_num_seqs max_num_batched_tokens block_size num_threads"),
    (0, "rollout", "top_k kv_cache_bytes"),
    (1, "algorithm", "ppo_epochs num_minibatches dynamic_sampling_max_rounds"),
    (0, "algorithm", "clip_low clip_high kl_coef critic_warmup_steps"),
    (1, "orchestrator", "num_cpus start_timeout_s step_timeout_s"),
    (1, "trainer", "steps keep_checkpoints"),
    (0, "trainer", "seed"),
    (-1, "trainer", "save_interval"),
    (1, "hardware", "nodes"),
    (1, "reward", "num_workers timeout_s"),
    (1, "data", "min_len mean_response_len"),
    (1, "consistency", "evidence_tokens"),
    (0, "hardware", "devices memory_gib"),
    (0, "model", "init_std num_experts"),
    (0, "algorithm", "advantage_eps"),
    (1 << 20, "orchestrator", "weight_bucket_bytes"),
    (75 << 20, "orchestrator", "object_store_bytes"),  # Ray takes no less
)
_WITHIN: dict[str, tuple[float, float]] = {  # (low, high]
    "model.rope_theta": (0.0, 1e30),
    "model.rms_norm_eps": (0.0, 1.0),
    "train.adam_eps": (0.0, 1.0),
    "rollout.top_p": (0.0, 1.0),
    "rollout.temperature": (1e-6, 1e6),  # logits divided by less or more than that are no distribution in float32
    "rollout.gpu_memory_utilization": (0.0, 1.0),
    "algorithm.gamma": (0.0, 1.0),
}


def _get(config: RunConfig, key: str) -> Any:
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


def _check_fields(config: RunConfig) -> None:
    if config.logger.wandb == "False":  # YAML reads a bare `off` as a boolean
        config.logger.wandb = "off"
    for key, allowed in _CHOICES.items():
        value = _get(config, key)
        if value not in allowed:
            raise _error(key, f"{value!r} is not a choice", f"Use one of {', '.join(map(str, allowed))}.")
    for item in fields(config):
        section = getattr(config, item.name)
        for name, value in vars(section).items() if is_dataclass(section) else ():
            if isinstance(value, float) and not math.isfinite(value):
                raise _error(f"{item.name}.{name}", f"{value!r} is out of range", "Use a finite number.")
    for least, group, names in _AT_LEAST:
        for name in names.split():
            value = getattr(getattr(config, group), name)
            if not value >= least:
                raise _error(f"{group}.{name}", f"{value!r} is too small", f"Use a value of at least {least:g}.")
    for key, (low, high) in _WITHIN.items():
        value = _get(config, key)
        if not low < value <= high:
            raise _error(key, f"{value!r} is out of range", f"Use a value in ({low:g}, {high:g}].")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0.0 <= getattr(config.train, name) < 1.0:
            raise _error(f"train.{name}", f"{getattr(config.train, name)!r} is out of range", "Use [0, 1).")
    for key in ("rollout.max_model_len", "data.limit"):
        value = _get(config, key)
        if value is not None and value < 1:
            raise _error(key, f"{value!r} is too small", "Use at least 1, or null.")
    if config.trainer.seed >= 1 << 63:
        raise _error("trainer.seed", f"{config.trainer.seed} is too large", "Use a value below 2**63.")
    if not config.data.path:
        raise _error("data.path", "is empty", "Name a file, a folder, a hub data set, or arithmetic.")
    if not 0.0 <= config.algorithm.gae_lambda <= 1.0:
        raise _error("algorithm.gae_lambda", f"{config.algorithm.gae_lambda!r} is out of range", "Use [0, 1].")
    if config.algorithm.dual_clip is not None and config.algorithm.dual_clip <= 1.0:
        raise _error("algorithm.dual_clip", f"{config.algorithm.dual_clip!r} must be above 1", "Use 3, or null.")
    if config.algorithm.value_clip is not None and config.algorithm.value_clip <= 0.0:
        raise _error("algorithm.value_clip", f"{config.algorithm.value_clip!r} must be above 0", "Use 0.2, or null.")


def _check_model(config: RunConfig) -> None:
    model, train, rollout = config.model, config.train, config.rollout
    if model.num_experts > 0:
        raise _error(
            "model.num_experts",
            f"{model.name} is a mixture of experts, which no engine here is wired for yet",
            "Use model=qwen3_8b, qwen3_0_6b or qwen3_tiny.",
        )
    if model.num_attention_heads % model.num_key_value_heads:
        raise _error(
            "model.num_key_value_heads",
            f"{model.num_key_value_heads} does not divide num_attention_heads={model.num_attention_heads}",
            "Make it a divisor.",
        )
    if model.head_dim % 2:
        raise _error("model.head_dim", f"{model.head_dim} is odd", "RoPE needs an even head_dim.")
    for side, tp in (("train", train.tensor_parallel_size), ("rollout", rollout.tensor_parallel_size)):
        key = f"{side}.tensor_parallel_size"
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            size = getattr(model, name)
            if size % tp:
                raise _error(key, f"{tp} does not divide model.{name}={size}", f"Use a divisor of {size}.")
        if tp not in (1, 2, 4, 8):
            raise _error(key, f"{tp} is not a tensor-parallel size", "Use 1, 2, 4 or 8.")
    if config.hardware.family != "cpu" and model.dtype == "float32":
        raise _error(
            "model.dtype",
            f"float32 has a contract on the cpu family only, not on {config.hardware.family}",
            "Use model.dtype=bfloat16.",
        )
    needed = rollout.max_prompt_len + rollout.max_response_len
    limit = min(rollout.context_len, model.max_position_embeddings)
    if needed > limit:
        where = "rollout.max_model_len" if rollout.context_len < needed else "model.max_position_embeddings"
        raise _error(
            "rollout.max_response_len",
            f"rollout.max_prompt_len={rollout.max_prompt_len} plus max_response_len={rollout.max_response_len} "
            f"exceed {where}={limit}",
            f"Lower one of them by {needed - limit}, or raise {where}.",
        )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise _error(
            "rollout.max_num_batched_tokens",
            f"{rollout.max_num_batched_tokens} is less than rollout.max_num_seqs={rollout.max_num_seqs}",
            "Raise it, or lower rollout.max_num_seqs.",
        )
    if rollout.context_len > model.max_position_embeddings:
        raise _error(
            "rollout.max_model_len",
            f"{rollout.context_len} exceeds model.max_position_embeddings={model.max_position_embeddings}",
            "Lower it.",
        )


def _check_consistency(config: RunConfig) -> None:
    consistency, train, rollout = config.consistency, config.train, config.rollout
    if train.temperature is not None and train.temperature != rollout.temperature:
        raise _error(
            "train.temperature",
            f"{train.temperature!r} differs from rollout.temperature={rollout.temperature!r}",
            "Leave it out: both sides use rollout.temperature.",
        )
    train.temperature = rollout.temperature
    if consistency.mode in ("strict", "audit"):
        for name, off in (("top_p", 1.0), ("top_k", 0)):
            value = getattr(rollout, name)
            if value != off:
                raise _error(
                    f"rollout.{name}",
                    f"{value!r} truncates and renormalises the distribution, so rollout and training log-probabilities "
                    f"differ by definition, and consistency={consistency.mode} compares them bit for bit",
                    f"Use rollout.{name}={off:g}, or consistency=native.",
                )
    family = config.hardware.family
    if consistency.attention == "fa3" and family != "sm90":
        raise _error(
            "consistency.attention", f"fa3 exists on sm90 only, hardware.family={family}", "Use blocks, or auto."
        )
    consistency.attention = consistency.attention_on(family)
    larger = max(train.tensor_parallel_size, rollout.tensor_parallel_size)
    if consistency.virtual_tp is None:
        consistency.virtual_tp = larger
    segments = consistency.virtual_tp
    if segments not in (1, 2, 4, MAX_VIRTUAL_TP):
        raise _error("consistency.virtual_tp", f"{segments!r} is not a segment count", "Use 1, 2, 4 or 8.")
    for side, tp in (("train", train.tensor_parallel_size), ("rollout", rollout.tensor_parallel_size)):
        if segments % tp:
            raise _error(
                "consistency.virtual_tp",
                f"{segments} is not a multiple of {side}.tensor_parallel_size={tp}",
                f"Use {larger}, or leave it null.",
            )
    model = config.model
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        size = getattr(model, name)
        if size % segments:
            raise _error(
                "consistency.virtual_tp", f"{segments} does not divide model.{name}={size}", f"Use {larger} or null."
            )


def _check_algorithm(config: RunConfig) -> None:
    algorithm, rollout, train = config.algorithm, config.rollout, config.train
    if algorithm.name == "grpo" and rollout.n_samples_per_prompt < 2:
        raise _error(
            "rollout.n_samples_per_prompt",
            f"{rollout.n_samples_per_prompt} leaves nothing to compare a response with (every GRPO advantage is 0)",
            "Use at least 2, or algorithm=ppo.",
        )
    if algorithm.dynamic_sampling and rollout.n_samples_per_prompt < 2:
        raise _error("algorithm.dynamic_sampling", "needs groups of at least 2", "Raise rollout.n_samples_per_prompt.")
    if config.samples_per_step < algorithm.num_minibatches * train.data_parallel_size:
        raise _error(
            "algorithm.num_minibatches",
            f"{algorithm.num_minibatches} minibatches on {train.data_parallel_size} data-parallel ranks are more than "
            f"the {config.samples_per_step} responses of a step",
            "Lower it, or raise rollout.batch_size.",
        )
    if train.micro_batch_tokens < rollout.context_len:
        raise _error(
            "train.micro_batch_tokens",
            f"{train.micro_batch_tokens} is less than one sequence (rollout context of {rollout.context_len} tokens)",
            f"Use at least {rollout.context_len}.",
        )
    if train.optimizer == "sgd" and train.distributed_optimizer:
        raise _error(
            "train.optimizer",
            "sgd under train.distributed_optimizer: Megatron shards Adam's state only, and sgd has none",
            "Use train.distributed_optimizer=false, or train.optimizer=adam.",
        )
    if train.sequence_parallel and train.tensor_parallel_size == 1:
        raise _error("train.sequence_parallel", "needs train.tensor_parallel_size above 1", "Turn it off.")


def _check_data(config: RunConfig) -> None:
    data, reward = config.data.path == "synthetic", config.reward.name == "synthetic"
    if data != reward:
        raise _error(
            "reward.name",
            f"{config.reward.name} does not score what data.path={config.data.path} makes",
            "Use reward.name=synthetic with data=synthetic, and only there.",
        )
    if data and config.orchestrator.name == "vime":
        raise _error("data.path", "vime reads prompts from a file", "Use orchestrator=local with data=synthetic.")
    if data and config.data.min_len > config.rollout.max_prompt_len:
        raise _error(
            "data.min_len",
            f"{config.data.min_len} exceeds rollout.max_prompt_len={config.rollout.max_prompt_len}",
            "Lower it.",
        )
    if data and config.data.mean_response_len > config.model.vocab_size:
        raise _error(
            "data.mean_response_len",
            f"{config.data.mean_response_len} exceeds model.vocab_size={config.model.vocab_size}",
            f"Use at most {config.model.vocab_size}, or a model with a larger vocabulary.",
        )


def _check_hardware(config: RunConfig) -> None:
    hardware, train, rollout, orchestrator = config.hardware, config.train, config.rollout, config.orchestrator
    family = {"cpu": ("cpu",), "cuda": ("sm90",), "rocm": ("gfx942",)}[hardware.device]
    if hardware.family not in family:
        raise _error(
            "hardware.family", f"{hardware.family} is not a family of device {hardware.device}", f"Use {family[0]}."
        )
    if orchestrator.name == "vime":
        if hardware.device == "cpu":
            raise _error("orchestrator", "vime runs on GPU nodes, not on hardware=cpu", "Use orchestrator=local.")
        if config.consistency.mode == "fast":
            raise _error(
                "consistency.mode",
                "fast under orchestrator=vime would replace vLLM's operators and leave Megatron's stock",
                "Use consistency=strict, audit or native.",
            )
    elif train.context_parallel_size > 1:
        _check_context_parallel(config)
    if hardware.device == "cpu":
        _check_cpu_memory(config)
        return
    if orchestrator.name == "local" and hardware.nodes != 1:
        raise _error(
            "hardware.nodes", f"{hardware.nodes} nodes need orchestrator=vime; the embedded loop runs on one", "Use 1."
        )
    train_world, rollout_world = train.world_size, rollout.tensor_parallel_size * rollout.num_engines
    devices = hardware.devices * hardware.nodes
    for key, world in (("train", train_world), ("rollout", rollout_world)):
        if world > devices:
            raise _error(
                f"{key}.tensor_parallel_size",
                f"the {key} side wants {world} devices, hardware={hardware.name} has {devices}",
                "Lower its parallel sizes, or raise hardware.nodes.",
            )
    if not hardware.colocate and train_world + rollout_world > devices:
        raise _error(
            "hardware.colocate",
            f"false needs {train_world} + {rollout_world} devices, hardware={hardware.name} has {devices}",
            "Use hardware.colocate=true.",
        )
    if orchestrator.name == "local":  # vime puts one side to sleep while the other works
        _check_gpu_memory(config)


def _check_gpu_memory(config: RunConfig) -> None:
    """What the embedded loop holds on one device all the time, activations and caches of libraries aside."""
    hardware, train, rollout = config.hardware, config.train, config.rollout
    if not hardware.memory_gib or config.model.dtype != "bfloat16":
        return
    params = config.model.parameter_count()
    # Masters, and Adam's moments: sharded by the distributed optimizer over data- and context-parallel ranks.
    state = (4 + 8 * (train.optimizer == "adam")) / (
        train.data_parallel_size * train.context_parallel_size if train.distributed_optimizer else 1
    )
    trained = 2 if config.algorithm.name == "ppo" else 1
    each = trained * (2 + 4 + state) + (2 if config.algorithm.kl_coef > 0 else 0)
    training = params / train.tensor_parallel_size * each / 2**30
    if rollout.kv_cache_bytes:
        serving = (2 * params / rollout.tensor_parallel_size + rollout.kv_cache_bytes) / 2**30
    else:
        serving = rollout.gpu_memory_utilization * hardware.memory_gib
    need = training + serving if hardware.colocate else max(training, serving)
    if need > hardware.memory_gib:
        less = "train.optimizer=sgd, " if train.optimizer == "adam" else ""
        raise _error(
            "train.optimizer" if less else "train.tensor_parallel_size",
            f"weights, gradients and {train.optimizer}'s state take {training:.0f} GiB of a device and the rollout "
            f"engine {serving:.0f}, hardware={hardware.name} has {hardware.memory_gib:g}",
            f"Use {less}a larger train.tensor_parallel_size, train.distributed_optimizer=true on more data-parallel "
            "ranks, or a smaller rollout.kv_cache_bytes.",
        )


def _check_context_parallel(config: RunConfig) -> None:
    train, rollout = config.train, config.rollout
    size = train.context_parallel_size
    if config.consistency.mode == "native":
        raise _error(
            "train.context_parallel_size",
            f"{size} needs the strict modules: Megatron's local attention, which consistency=native runs under "
            "orchestrator=local, has no context parallelism",
            "Use train.context_parallel_size=1, or another consistency mode.",
        )
    padded = -(-rollout.context_len // (2 * size)) * 2 * size  # every sequence is cut into 2 * size equal chunks
    for key, limit in (
        ("model.max_position_embeddings", config.model.max_position_embeddings),
        ("train.micro_batch_tokens", train.micro_batch_tokens),
    ):
        if padded > limit:
            raise _error(
                key,
                f"{limit} is less than one sequence padded for train.context_parallel_size={size} ({padded} tokens)",
                f"Use at least {padded}, or lower rollout.max_response_len.",
            )


def _check_cpu_memory(config: RunConfig) -> None:
    try:
        import psutil
    except ImportError:
        return
    size = 4 if config.model.dtype == "float32" else 2
    models = 1 + (config.algorithm.name == "ppo")
    params = config.model.parameter_count()
    # Trainer: weights, fp32 gradients, fp32 master weights and two moments; each engine keeps one copy; one in transit.
    need = params * (models * (size + 16) + size * (config.rollout.num_engines + 1 + (config.algorithm.kl_coef > 0)))
    have = psutil.virtual_memory().total
    if need > 0.8 * have:
        raise _error(
            "model",
            f"{config.model.name} ({params / 1e9:.1f}e9 parameters) needs about {need / 2**30:.0f} GiB to train on "
            f"hardware=cpu, this machine has {have / 2**30:.0f}",
            "Use model=qwen3_tiny, or hardware=h100.",
        )


def check(config: RunConfig) -> None:
    """See the module; fills the derived fields in.

    Raises:
        ConfigError: names the key, the value and the fix.
    """
    _check_fields(config)
    _check_model(config)
    _check_consistency(config)
    _check_algorithm(config)
    _check_data(config)
    _check_hardware(config)
