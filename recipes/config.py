"""Configuration of a run: plain dataclasses. Hydra fills them in ``recipes.main`` and goes no further.

``build_config`` turns a composed tree into a validated :class:`RunConfig`; every rejected value raises ``ConfigError``
naming the key and the fix, before any engine starts.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from recipes.errors import ConfigError
from rl_kernel.contract import padded_vocab_size


@dataclass
class ModelConfig:
    """A Qwen3 model. ``path`` is a Hugging Face folder or hub name; null starts from random weights N(0, init_std)."""

    name: str = "qwen3_tiny"
    path: str | None = None
    tokenizer: str | None = None  # null: ``path``, or the tokenizer that ships with the repository
    dtype: str = "bfloat16"
    vocab_size: int = 139
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 512
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    init_std: float = 0.02
    num_experts: int = 0  # above 0: mixture of experts, refused

    def padded_vocab_size(self, virtual_tp: int) -> int:
        """Rows of the embedding and of the LM head in every engine."""
        return padded_vocab_size(self.vocab_size, virtual_tp)

    def parameter_count(self) -> int:
        """Parameters of the dense model, without vocabulary padding."""
        attention = self.head_dim * (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.hidden_size
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + heads * self.vocab_size * self.hidden_size


@dataclass
class HardwareConfig:
    """The machine. ``devices`` counts GPUs; on the CPU it is 0 and any number of processes share the cores."""

    name: str = "cpu"
    device: str = "cpu"  # cpu | cuda | rocm
    family: str = "cpu"  # arithmetic family of the contract
    devices: int = 0
    nodes: int = 1
    memory_gib: float = 0.0  # memory of one device; 0: do not check
    colocate: bool = True  # trainer and engines take turns on the same devices


@dataclass
class TrainConfig:
    """The training engine: world size = tensor x context x data parallel."""

    tensor_parallel_size: int = 1
    context_parallel_size: int = 1  # zig-zag chunks of every sequence; same log-probabilities, see engines/megatron_cp
    data_parallel_size: int = 1
    sequence_parallel: bool = False
    micro_batch_tokens: int = 8192  # tokens of one packed forward pass, per data-parallel rank
    logp_workspace_mib: int = (
        512  # what linear_logp may keep from forward to backward; columns whose logits fit are not recomputed
    )
    pack_multiple: int = 1  # packs are padded to a multiple: GPU libraries and compilers meet fewer shapes
    lr: float = 1e-6
    critic_lr: float = 1e-5
    lr_warmup_steps: int = 0  # optimizer steps
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    optimizer: str = "adam"  # adam | sgd: without momentum, so without state (8 bytes a parameter less)
    distributed_optimizer: bool = False
    recompute: bool = False  # keep only the input of a layer, compute it again in backward; no bit changes
    recompute_layers: int = 0  # of the first so many layers; 0: of all
    temperature: float | None = None  # always rollout.temperature; a different value is refused
    num_threads: int = 1  # CPU threads of one rank

    @property
    def world_size(self) -> int:
        """Processes of the training group."""
        return self.tensor_parallel_size * self.context_parallel_size * self.data_parallel_size


@dataclass
class RolloutConfig:
    """The rollout engines and how responses are drawn."""

    tensor_parallel_size: int = 1
    num_engines: int = 1
    batch_size: int = 8  # prompts per step
    n_samples_per_prompt: int = 8
    max_prompt_len: int = 64
    max_response_len: int = 32
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    max_model_len: int | None = None  # null: max_prompt_len + max_response_len
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 32
    kv_cache_bytes: int = 64 << 20  # 0: gpu_memory_utilization decides
    gpu_memory_utilization: float = 0.6
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    num_threads: int = 1  # CPU threads of one rank

    @property
    def context_len(self) -> int:
        """Longest sequence an engine accepts."""
        return self.max_model_len or self.max_prompt_len + self.max_response_len


@dataclass
class ConsistencyConfig:
    """How far the two engines must agree.

    strict: contract operators, a mismatch stops the run. audit: the same operators, a mismatch is reported.
    fast: quickest operators. native: stock engines (the control).
    """

    mode: str = "strict"
    virtual_tp: int | None = None  # segments of row-parallel reductions; null: the larger TP of the two sides
    attention: str = "auto"  # blocks | fa3 (FlashAttention-3, sm90 only) | auto: fa3 on sm90, blocks elsewhere
    evidence_tokens: int = 32  # mismatching tokens written to mismatch.jsonl when a run stops

    @property
    def segments(self) -> int:
        """``virtual_tp`` once validated."""
        if self.virtual_tp is None:
            raise _error("consistency.virtual_tp", "is not resolved", "Build the configuration with build_config.")
        return self.virtual_tp

    def attention_on(self, family: str) -> str:
        """``attention`` on an arithmetic family, ``auto`` resolved."""
        if self.attention != "auto":
            return self.attention
        return "fa3" if family == "sm90" else "blocks"


@dataclass
class AlgorithmConfig:
    """GRPO or PPO. Fields that only the other one reads are ignored."""

    name: str = "grpo"
    ppo_epochs: int = 1  # passes over one rollout
    num_minibatches: int = 1  # optimizer steps per pass
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # > 1: bound of the loss for negative advantages
    loss_aggregation: str = "token_mean"  # token_mean | sequence_mean
    mask_truncated: bool = False  # leave responses that hit max_response_len out of the loss
    entropy_coef: float = 0.0
    kl_coef: float = 0.0  # > 0 keeps a frozen reference model
    kl_estimator: str = "k3"  # k1 | k2 | k3
    # GRPO
    normalize_std: bool = True
    advantage_eps: float = 1e-6
    dynamic_sampling: bool = False  # drop groups of equal rewards and draw further prompts
    dynamic_sampling_max_rounds: int = 4
    # PPO
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float | None = 0.2
    whiten_advantages: bool = True
    critic_warmup_steps: int = 0  # steps that train the critic only


@dataclass
class DataConfig:
    """Prompts: a jsonl/parquet file, a hub name, ``arithmetic`` for the set that ships with the repository, or
    ``synthetic`` for random token ids without a tokenizer (``recipes.data.synthetic``)."""

    path: str = "arithmetic"
    split: str = "train"
    prompt_key: str = "prompt"
    label_key: str = "label"
    chat_template: bool = False
    system_prompt: str | None = None
    shuffle: bool = True
    limit: int | None = None
    # synthetic only
    min_len: int = 16  # tokens of the shortest prompt; the longest has rollout.max_prompt_len
    mean_response_len: int = 512  # about, before the cut at max_response_len; at most model.vocab_size


@dataclass
class RewardConfig:
    """``arithmetic``: exact answer with partial credit; ``math``: math-verify in a worker with a time limit;
    ``synthetic``: share of tokens in the lower half of the vocabulary, with ``data=synthetic`` only."""

    name: str = "arithmetic"
    timeout_s: float = 5.0
    num_workers: int = 1


@dataclass
class OrchestratorConfig:
    """Who starts the processes. ``local``: the embedded loop on one machine; ``vime``: vime on GPU nodes."""

    name: str = "local"
    backend: str = "auto"  # what the loop's processes are: ray | process | auto: ray where it is installed
    weight_link: str = "auto"  # how weights travel: device (GPU memory) | host | auto: device where it works
    weight_bucket_bytes: int = 1 << 30  # of weights in transit on each GPU at a time, twice; at least the largest one
    num_cpus: int = 2
    object_store_bytes: int = 200 << 20
    start_timeout_s: float = 300.0
    step_timeout_s: float = 600.0
    # vime only
    vime_root: str = field(default_factory=lambda: os.environ.get("RLK_VIME_ROOT", "/root/vime"))
    megatron_root: str = field(default_factory=lambda: os.environ.get("RLK_MEGATRON_ROOT", "/root/Megatron-LM"))
    ray_address: str | None = None  # null: start a head node on this machine
    dry_run: bool = False  # print vime's argument list and the checks, start nothing
    min_disk_gib: float = 150.0


@dataclass
class LoggerConfig:
    """Where metrics go besides metrics.jsonl, manifest.json and report.html, which are always written."""

    name: str = "wandb"
    wandb: str = "auto"  # auto: online with a key, else offline | online | offline | off
    project: str = "rl-kernel"
    run_name: str | None = None
    progress: bool = True
    report: bool = True


@dataclass
class TrainerConfig:
    """Length, seed and persistence of a run."""

    steps: int = 100
    seed: int = 0
    resume: str = "auto"  # auto | never
    save_interval: int = 50  # 0: only at the end; -1: never, the run cannot be resumed
    keep_checkpoints: int = 2
    output_dir: str = ""  # set to Hydra's run directory by the entry point


@dataclass
class RunConfig:
    """Everything a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    consistency: ConsistencyConfig = field(default_factory=ConsistencyConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    experiment: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, for the manifest."""
        return asdict(self)

    @property
    def temperature(self) -> float:
        """The one temperature of both sides."""
        return self.rollout.temperature

    @property
    def samples_per_step(self) -> int:
        """Responses of one step."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt


def _error(key: str, what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=key, fix=fix)


MODES = ("strict", "audit", "fast", "native")


def validate(config: RunConfig) -> RunConfig:
    """Check every field and every pair of fields that can contradict; fill the derived ones in.

    Derived: ``consistency.virtual_tp`` (the larger TP of both sides), ``consistency.attention``, ``train.temperature``.

    Raises:
        ConfigError: names the key, the value and the fix.
    """
    from recipes.config_checks import check

    check(config)
    return config


def build_config(tree: Any = None) -> RunConfig:
    """A validated :class:`RunConfig` from nested mappings (plain or OmegaConf); missing keys keep their defaults.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or anything :func:`validate` refuses.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), {} if tree is None else tree)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "config"
        first = str(error).splitlines()[0]
        raise _error(key, first, "See recipes/config.py for the keys and their types.") from None
    assert isinstance(config, RunConfig)
    return validate(config)
