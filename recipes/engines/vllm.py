"""Rollout with vLLM: sample responses and return, bit for bit, the log-probability of every sampled token.

:func:`register` is the ``vllm.general_plugins`` entry point that replaces vLLM's numeric layers by rl_kernel's;
:class:`VllmEngine` is the in-process engine of the loop. The rooms beside this file hold the layers
(``vllm_layers``), attention (``vllm_attention``), sampling (``vllm_sampler``), weights (``vllm_update`` on the engine's
side, ``vllm_weights`` in the workers) and what can be checked before a start (``vllm_config``). vLLM is imported only
when one of the two is used.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recipes.engines.mode import in_own_mode, prepare_process
from recipes.engines.types import Sample, SamplingParams
from recipes.engines.vllm_config import BITWISE_MODES, check_sampling, gpu_options, hf_config
from recipes.engines.vllm_update import WeightUpdates
from recipes.errors import ConfigError, DataError, EngineError, RecipeError, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from recipes.config import ConsistencyConfig, ModelConfig, RolloutConfig

__all__ = ["BITWISE_MODES", "VllmEngine", "check_sampling", "hf_config", "register", "share_cores"]

_SEED_LIMIT = 1 << 63


def register() -> None:
    """Plug rl_kernel into vLLM (idempotent; every vLLM process calls it).

    Nothing changes for an engine that does not ask: see ``vllm_layers.active_settings``. An engine asks with
    ``additional_config={"rl_kernel": {"mode": "strict", "virtual_tp": 2}}`` or with the variables ``RL_KERNEL_MODE``
    and ``RL_KERNEL_VIRTUAL_TP``.

    Raises:
        EngineError: this vLLM lacks an extension point, named in the message.
    """
    from recipes.engines import vllm_attention, vllm_layers, vllm_sampler

    vllm_layers.install()
    vllm_attention.install()
    vllm_sampler.install()


def share_cores(busy_seconds: float = 0.002) -> None:
    """Let idle CPU workers sleep (idempotent).

    A waiting vLLM worker polls shared memory for a second before it sleeps. Here trainer and engines share the cores of
    one machine, so that second is taken from the trainer.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    condition = getattr(shm_broadcast, "SpinCondition", None)
    if condition is None or hasattr(condition, "rl_kernel_busy_seconds"):
        return
    stock_init = condition.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, busy_seconds)

    condition.__init__ = init
    condition.rl_kernel_busy_seconds = busy_seconds


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class VllmEngine(WeightUpdates):
    """vLLM in this process (and one worker process per rank when the tensor-parallel size is above 1).

    The engine starts with vLLM's placeholder weights and refuses to generate until :meth:`update_weights` succeeded.

    Guarantee under strict and audit: a sample, its tokens and its log-probabilities are a function of (weights, prompt,
    seed, temperature) alone; batch, chunked prefill, prefix hits, preemption and tensor parallelism change no bit.

    Args:
        model: the model; its ``dtype`` is the dtype of weights, activations and cache.
        rollout: sizes of the engine and the default sampling parameters.
        consistency: the mode, and the number S of segments of row-parallel reductions.
        seed: vLLM's own seed; samples depend on the seeds given to :meth:`generate` only.

    Raises:
        ConfigError: a combination that cannot be strict, or an engine size that vLLM refuses.
        EngineError: vLLM lacks an extension point, or built a layer that is not replaced.
    """

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, consistency: ConsistencyConfig, seed: int = 0
    ) -> None:
        self.mode = consistency.mode
        self.bitwise = self.mode in BITWISE_MODES
        self.active = self.mode != "native"
        self.model, self.rollout = model, rollout
        self.hf_config = hf_config(model)
        self.virtual_tp = consistency.virtual_tp or rollout.tensor_parallel_size
        self.attention: str | None = None  # the sm90 arithmetic of attention, once the engine runs on such a GPU
        self._consistency = consistency
        check_sampling(self.mode, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)
        if self.active and self.virtual_tp % rollout.tensor_parallel_size:
            raise ConfigError(
                f"{self.virtual_tp} is not a multiple of rollout.tensor_parallel_size={rollout.tensor_parallel_size}",
                where="consistency.virtual_tp",
                fix="Use the larger tensor-parallel size of rollout and training, or leave it null.",
            )
        self._check_cache()
        self.weight_version = -1
        self.weight_hash: str | None = None
        self._usable = False  # whether the weights are the ones of weight_version, all of them
        self._broken: str | None = None
        self._generated = {"tokens": 0, "seconds": 0.0}
        self._llm: Any = None
        directory = tempfile.mkdtemp(prefix="rl-kernel-vllm-")
        try:
            (Path(directory) / "config.json").write_text(json.dumps(self.hf_config), encoding="utf-8")
            self._start(directory, seed)
        except BaseException:
            self.shutdown()
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # vLLM reads it while it starts

    def _check_cache(self) -> None:
        """The cache must hold one sequence of full length, or vLLM cannot make progress."""
        config, rollout = self.hf_config, self.rollout
        heads = max(1, config["num_key_value_heads"] // rollout.tensor_parallel_size)
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        size = 4 if self.model.dtype == "float32" else 2
        block = config["num_hidden_layers"] * 2 * rollout.block_size * heads * dim * size
        need = (math.ceil(rollout.context_len / rollout.block_size) + 1) * block  # vLLM keeps one block empty
        if 0 < rollout.kv_cache_bytes < need:
            raise ConfigError(
                f"{rollout.kv_cache_bytes} bytes do not hold one sequence of {rollout.context_len} tokens",
                where="rollout.kv_cache_bytes",
                fix=f"Use at least {need}, or a smaller rollout.max_model_len.",
            )

    def _start(self, directory: str, seed: int) -> None:
        model, rollout = self.model, self.rollout
        self.vocab_size = int(self.hf_config["vocab_size"])
        self.tied = bool(self.hf_config.get("tie_word_embeddings", False))
        # In this process; sampling through the replaced sampler; threads placed by whoever starts this process.
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # cannot return processed log-probabilities
        # This process has threads, and a fork inherits their locks.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        try:
            from vllm import LLM
        except ImportError as error:
            raise EngineError(
                f"vLLM cannot be imported ({error})", where="rollout", fix="Install it: see README.md."
            ) from error
        from vllm.platforms import current_platform

        from recipes.engines.vllm_attention import backend_name
        from recipes.engines.vllm_layers import CONFIG_KEY, clear_shared_layers

        gpu = current_platform.is_cuda_alike()
        if current_platform.is_cuda() and self.active:
            self.attention = self._consistency.attention_on("sm90")
            prepare_process(self.mode, self.attention)
        register()
        clear_shared_layers()
        options: dict[str, Any] = {
            "model": directory,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": model.dtype,
            "seed": seed,
            "tensor_parallel_size": rollout.tensor_parallel_size,
            "distributed_executor_backend": "uni" if rollout.tensor_parallel_size == 1 else "mp",
            "max_model_len": rollout.context_len,
            "max_num_seqs": rollout.max_num_seqs,
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": rollout.enable_prefix_caching,
            "block_size": rollout.block_size,
            "enforce_eager": rollout.enforce_eager,
            "logprobs_mode": "processed_logprobs",
            "logits_processors": ["recipes.engines.vllm_sampler:SeedState"],
            "worker_extension_cls": "recipes.engines.vllm_weights.WorkerExtension",
            "additional_config": {
                CONFIG_KEY: {"mode": self.mode, "virtual_tp": self.virtual_tp, "attention": self.attention}
            },
            "disable_log_stats": False,
        }
        if gpu:
            options |= gpu_options(self.mode, rollout, backend_name(current_platform))
        if rollout.kv_cache_bytes:
            options["kv_cache_memory_bytes"] = rollout.kv_cache_bytes
            if gpu:  # decides nothing then, but vLLM wants that share of the device free, which a trainer may hold
                options["gpu_memory_utilization"] = 0.01
        else:
            options["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        threads = {}
        if current_platform.is_cpu():
            share_cores()
            threads = {"OMP_NUM_THREADS": str(rollout.num_threads)}
        if threads and rollout.tensor_parallel_size == 1:
            torch.set_num_threads(rollout.num_threads)
        try:
            with _environment(threads):
                self._llm = LLM(**options)
        except RecipeError:
            raise
        except ValueError as error:  # vLLM's word for a size that does not fit
            raise ConfigError(
                f"vLLM refuses the engine: {error}",
                where="rollout",
                fix="Adjust rollout.max_model_len, kv_cache_bytes, block_size or max_num_batched_tokens.",
            ) from error
        except Exception as error:
            raise EngineError(f"vLLM did not start: {error}", where="rollout") from error
        self._inspect()

    def _inspect(self) -> None:
        reports = self._rpc("rl_kernel_describe")
        first = reports[0]
        if first["unknown"]:
            raise EngineError(
                f"parameters of {', '.join(first['unknown'][:4])} cannot be checked after a weight update",
                where="model",
                fix="Use a dense Qwen3-style model.",
            )
        for rank, report in enumerate(reports):
            if self.active and (report["stock"] or (self.bitwise and not report["sampler"])):
                left = report["stock"][:4] or ["the sampler"]
                raise EngineError(
                    f"rank {rank} kept stock vLLM operators in {', '.join(left)}",
                    where=f"consistency={self.mode}",
                    fix="Use a dense Qwen3-style model, or consistency=native.",
                )
            if not self.active and (report["replaced"] or report["sampler"]):
                raise EngineError(f"rank {rank} replaced operators in native mode", where="consistency=native")
            if report["contract"] != first["contract"] or self.bitwise != (report["contract"] is not None):
                raise EngineError(
                    f"rank {rank} was built for contract {report['contract']}, rank 0 for {first['contract']}",
                    where=f"consistency={self.mode}",
                    fix="Give the whole model one dtype; start every rank with the same settings.",
                )
        self.contract: str | None = first["contract"]
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = first["tensors"]
        self.replaced: dict[str, int] = first["replaced"]
        self.device = torch.device(first["device"])
        self._places = [report["place"] for report in reports]

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._llm.collective_rpc(method, args=args)

    # Generation

    @in_own_mode
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        *,
        weight_version: int | None = None,
    ) -> list[Sample]:
        """Draw ``params.n`` responses to each prompt.

        Args:
            prompts: token ids.
            params: sampling parameters, the same for all.
            seeds: ``len(prompts) * params.n`` integers in [0, 2**63), prompt by prompt. Equal (weights, prompt, seed,
                temperature) give equal samples.
            weight_version: the version the caller expects; another one is an error.

        Returns:
            Samples in the order of ``seeds``.

        Raises:
            ConfigError: the parameters are refused under this mode.
            DataError: a prompt is empty, longer than the context, or holds a token outside the vocabulary.
            WeightSyncError: the engine does not hold ``weight_version``.
            EngineError: vLLM failed, or returned a log-probability that is missing or not finite.
        """
        self._check_ready(weight_version)
        check_sampling(self.mode, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k)
        token_ids = [[int(token) for token in prompt] for prompt in prompts]
        self._check_prompts(token_ids)
        if len(seeds) != len(token_ids) * params.n:
            raise ConfigError(
                f"{len(seeds)} seeds for {len(token_ids)} prompts with n={params.n}",
                where="generate",
                fix=f"Give {len(token_ids) * params.n}.",
            )
        bad = next((seed for seed in seeds if not 0 <= int(seed) < _SEED_LIMIT), None)
        if bad is not None:
            raise ConfigError(f"seed {bad!r} is outside [0, 2**63)", where="generate")
        if not token_ids:
            return []
        requests = [{"prompt_token_ids": prompt} for prompt in token_ids for _ in range(params.n)]
        start = time.perf_counter()
        try:
            outputs = self._llm.generate(requests, [self._vllm_params(params, int(s)) for s in seeds], use_tqdm=False)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise EngineError(f"vLLM failed while generating: {self._broken}", where="rollout") from error
        samples = [self._sample(output, index, params.n) for index, output in enumerate(outputs)]
        self._generated["seconds"] += time.perf_counter() - start
        self._generated["tokens"] += sum(len(sample.response_ids) for sample in samples)
        return samples

    def _check_ready(self, weight_version: int | None) -> None:
        if self._llm is None:
            raise EngineError("the engine was shut down", where="rollout")
        if self._broken is not None:
            raise EngineError(f"the engine failed before ({self._broken})", where="rollout", fix="Start a new engine.")
        if not self._usable:
            raise EngineError(
                "the engine holds placeholder weights, or those of a weight update that failed",
                where="rollout",
                fix="Call update_weights first.",
            )
        if weight_version is not None and weight_version != self.weight_version:
            raise WeightSyncError(
                f"the engine holds weights of version {self.weight_version}, version {weight_version} is expected",
                where="rollout",
                fix="Call update_weights before generating.",
            )

    def _check_prompts(self, prompts: list[list[int]]) -> None:
        limit = self.rollout.context_len
        for index, prompt in enumerate(prompts):
            where = f"prompt {index}"
            if not prompt:
                raise DataError("the prompt is empty", where=where, fix="Drop the data line.")
            if len(prompt) >= limit:
                raise DataError(
                    f"{len(prompt)} tokens leave no room for a response in a context of {limit}",
                    where=where,
                    fix="Drop the data line, or raise rollout.max_model_len.",
                )
            bad = next((token for token in prompt if not 0 <= token < self.vocab_size), None)
            if bad is not None:
                raise DataError(
                    f"token id {bad} is outside the vocabulary of {self.vocab_size}",
                    where=where,
                    fix="Check that the tokenizer belongs to the model.",
                )

    def _vllm_params(self, params: SamplingParams, seed: int) -> Any:
        from vllm import SamplingParams as VllmSamplingParams

        from recipes.engines.vllm_sampler import SEED_KEY

        return VllmSamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            logprobs=0,
            flat_logprobs=True,  # a dictionary and an object for every token cost vLLM a millisecond a step
            detokenize=False,
            extra_args={SEED_KEY: seed},
        )

    def _sample(self, output: Any, index: int, n: int) -> Sample:
        prompt_index, sample_index = divmod(index, n)
        where = f"sample {sample_index} of prompt {prompt_index}"
        completion = output.outputs[0]
        tokens = tuple(int(token) for token in completion.token_ids)
        if completion.logprobs is None or len(completion.logprobs) != len(tokens):
            count = 0 if completion.logprobs is None else len(completion.logprobs)
            raise EngineError(f"{count} log-probabilities for {len(tokens)} sampled tokens", where=where)
        flat = completion.logprobs  # one entry a position: the sampled token
        if tuple(flat.token_ids) != tokens:
            raise EngineError("log-probabilities of other tokens than the sampled ones", where=where)
        # vLLM carries the fp32 values as Python floats, which hold them exactly: this rounds nothing.
        logp = np.array(flat.logprobs, np.float32)
        finite = np.isfinite(logp)
        if not finite.all():
            position = int(np.argmin(finite))
            raise EngineError(
                f"the log-probability at position {position} is {logp[position]}: the logits hold NaN or infinity",
                where=where,
                fix="Check the weights of this step, the learning rate and the gradient norm.",
            )
        if any(token >= self.vocab_size for token in tokens):
            raise EngineError(f"token {max(tokens)} is vocabulary padding", where=where)
        return Sample(
            prompt_ids=tuple(output.prompt_token_ids),
            response_ids=tokens,
            rollout_logp=logp,
            prompt_index=prompt_index,
            sample_index=sample_index,
            weight_version=self.weight_version,
            finish_reason=str(completion.finish_reason),
        )

    # Facts

    def info(self) -> dict[str, Any]:
        """Versions, mode, contract, replaced layers, backends and counters, for the manifest."""
        import vllm

        ranks = self._rpc("rl_kernel_backends") if self.active else [({}, 0)]
        return {
            "engine": "vllm",
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "mode": self.mode,
            "device": str(self.device),
            "dtype": self.model.dtype,
            "tensor_parallel_size": self.rollout.tensor_parallel_size,
            "virtual_tp": self.virtual_tp,
            "contract": self.contract,
            "attention": self.attention,
            "replaced": dict(self.replaced),
            "backends": ranks[0][0],
            "fallback_count": sum(count for _, count in ranks),
            "weight_version": self.weight_version,
            "weight_hash": self.weight_hash,
            "generated_tokens": self._generated["tokens"],
            "generate_seconds": round(self._generated["seconds"], 3),
            **self._counters(),
        }

    def _counters(self) -> dict[str, int]:
        wanted = {
            "vllm:num_preemptions": "preemptions",
            "vllm:prefix_cache_hits": "prefix_cache_hit_tokens",
            "vllm:prefix_cache_queries": "prefix_cache_query_tokens",
        }
        return {wanted[metric.name]: int(metric.value) for metric in self._llm.get_metrics() if metric.name in wanted}

    def shutdown(self) -> None:
        """Stop the workers and free the memory (idempotent)."""
        llm, self._llm, self._usable = self._llm, None, False
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            if self.rollout.tensor_parallel_size == 1:
                from vllm.distributed import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
