"""Runs a function in 1 or more training processes and returns what each one returned.

Processes are forked from a server that has imported Megatron once, so a start takes a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from recipes.config import ConsistencyConfig, ModelConfig, TrainConfig
from recipes.engines.types import PackedBatch, Sample

TIMEOUT_S = 300.0 if torch.cuda.is_available() else 120.0  # kernels are compiled in the first run on a GPU
VOCAB = 300


@dataclass
class Case:
    """A training group."""

    dtype: str = "bfloat16"
    tied: bool = True
    tp: int = 1
    dp: int = 1
    cp: int = 1
    mode: str = "strict"
    attention: str = "auto"
    virtual_tp: int = 2
    role: str = "policy"
    seed: int = 7
    train: dict[str, Any] = field(default_factory=dict)
    world_size: int = 0  # 0: what the sizes above need
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.world_size or self.tp * self.dp * self.cp

    def model_config(self) -> ModelConfig:
        sizes: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            **self.model,
        }
        return ModelConfig(dtype=self.dtype, vocab_size=VOCAB, tie_word_embeddings=self.tied, **sizes)

    def engine(self, rank: int, port: int) -> Any:
        from recipes.engines.megatron import MegatronEngine

        settings = {"lr": 1e-2, "critic_lr": 1e-2, "weight_decay": 0.1, "lr_warmup_steps": 2, **self.train}
        return MegatronEngine(
            self.model_config(),
            TrainConfig(
                tensor_parallel_size=self.tp, data_parallel_size=self.dp, context_parallel_size=self.cp, **settings
            ),
            ConsistencyConfig(mode=self.mode, virtual_tp=self.virtual_tp, attention=self.attention),
            role=self.role,
            rank=rank,
            world_size=self.world,
            master_port=port,
            seed=self.seed,
            timeout_s=TIMEOUT_S,
        )


def make_samples(count: int, seed: int = 0, longest: int = 40) -> list[Sample]:
    """Random prompts and responses of different lengths; the first two share their prompt."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        p, r = (int(n) for n in rng.integers(1, longest, 2))
        prompt = tuple(rng.integers(0, VOCAB, p).tolist())
        if i == 1:
            prompt = samples[0].prompt_ids
        response = tuple(rng.integers(0, VOCAB, r).tolist())
        samples.append(Sample(prompt, response, np.zeros(r, np.float32), i, 0, 0, "stop"))
    return samples


def make_batch(count: int = 6, seed: int = 0, **kwargs: Any) -> PackedBatch:
    """:func:`make_samples`, packed."""
    return PackedBatch.from_samples(make_samples(count, seed), **kwargs)


def raw(tensor: torch.Tensor) -> bytes:
    """Bit pattern, for byte comparison between processes."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def nll(scale: float) -> Callable[..., Any]:
    """A policy loss: negative log-likelihood and a little entropy."""

    def loss(logp: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> Any:
        value = -(logp + 0.01 * entropy).sum() * scale
        return value, {"loss": float(value.detach())}

    return loss


def squared(scale: float) -> Callable[..., Any]:
    """A critic loss: squared distance from 1 on active tokens."""

    def loss(values: torch.Tensor, batch: PackedBatch) -> Any:
        value = ((values - 1.0).square() * batch.active).sum() * scale
        return value, {"loss": float(value.detach())}

    return loss


def _main(function: Callable[..., Any], rank: int, port: int, args: tuple, pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(rank, port, *args)))
    except BaseException as error:  # noqa: BLE001 - carried to the parent
        pipe.send((False, f"rank {rank}: {error!r}\n{traceback.format_exc()}"))


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(rank, port, *args)`` in ``world`` processes; results in rank order."""
    context: Any
    if torch.cuda.is_available():  # a forked process cannot use CUDA if its parent asked for devices
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["recipes.engines.megatron_layers", "megatron.core.optimizer", "rl_kernel"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(function, rank, port, args, theirs), daemon=True)
        process.start()
        theirs.close()
        workers.append((process, ours))
    deadline = time.monotonic() + TIMEOUT_S
    results, failures = [], []
    try:
        for rank, (_, pipe) in enumerate(workers):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank} gave no result in {TIMEOUT_S} s")
                break
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, f"rank {rank} died"
            (results if ok else failures).append(value)
            if failures:
                break
    finally:
        for process, _ in workers:
            process.join(0 if failures else 10)
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        raise AssertionError("\n".join(failures))
    return results
