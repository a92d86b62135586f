"""Engines and a task without vLLM or Megatron: a bigram table, the same arithmetic on both sides, learnable.

``tokens % vocab`` index a table W[V, V]; logits of the next token are ``W[previous] / temperature``. Environment
variables of the process make an engine misbehave (``FAKE_<WHAT>=<step or 1>``), see the classes.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from recipes.data import Prompt
from recipes.engines import replicas
from recipes.engines.types import PackedBatch, Sample, SamplingParams
from recipes.engines.weight_transfer import WeightReader
from recipes.engines.weights import content_hash
from recipes.reward import summarize

VOCAB = 16
EOS = 1
CONTRACT = "fakefakefakefake"


def fault(name: str) -> int:
    """Step at which the fault ``name`` happens; -1: never."""
    return int(os.environ.get(f"FAKE_{name}", -1))


def start_weights(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 0.02, (VOCAB, VOCAB)).astype(np.float32))


class FakeRollout:
    """Faults: STALE (keeps its version), BITS (one logp off by one bit), DIE, HANG, NAN."""

    def __init__(self, model, rollout, consistency, seed=0):
        self.version, self.table = -1, None
        if fault("BROKEN_START") >= 0:
            print("something went wrong while loading", flush=True)
            os._exit(3)

    def info(self):
        return {"engine": "fake", "contract": CONTRACT if fault("CONTRACT") < 0 else "other", "backends": {"x": "fake"}}

    def places(self):
        return ["cpu"]

    def begin_update(self, tensors, version, handles):
        self._described, self._incoming, self._version = tensors, {}, version
        self._reader = WeightReader(handles["cpu"], torch.device("cpu"))

    def load_bucket(self, entries):
        self._incoming |= {name: tensor.clone() for name, tensor in self._reader.read(entries).items()}

    def abort_update(self):
        if hasattr(self, "_reader"):
            self._reader.close()

    def finish_update(self):
        self._reader.close()
        version, named = self._version, self._incoming
        assert {k: tuple(t.shape) for k, t in named.items()} == {k: v[0] for k, v in self._described.items()}
        if fault("STALE") != version:
            self.version, self.table = version, torch.cat([named[f"table.{i}"] for i in range(VOCAB)])
        if fault("HALF") == version:
            named["table.3"] = named["table.3"] + 1
        return content_hash(named)

    def generate(self, prompts, params: SamplingParams, seeds, *, weight_version=None):
        if fault("DIE") == weight_version:
            print("fatal: out of luck", flush=True)
            os._exit(9)
        if fault("HANG") == weight_version:
            time.sleep(1000)
        if fault("SLOW") >= 0:
            time.sleep(0.3)
        samples = []
        for i, prompt in enumerate(prompts):
            for j in range(params.n):
                rng = np.random.default_rng(seeds[i * params.n + j])
                last, ids, logps = prompt[-1] % VOCAB, [], []
                while len(ids) < params.max_tokens:
                    logp = torch.log_softmax(self.table[last] / params.temperature, -1)
                    last = int(np.argmax(logp.numpy() + rng.gumbel(size=VOCAB)))
                    ids.append(last)
                    logps.append(np.float32(logp[last].item()))
                    if last == EOS:
                        break
                array = np.array(logps, np.float32)
                if fault("BITS") == weight_version and i == j == 0:
                    array.view(np.int32)[0] += 1
                if fault("NAN") == weight_version and i == j == 0:
                    array[0] = np.nan
                reason = "stop" if ids[-1] == EOS else "length"
                samples.append(Sample(tuple(prompt), tuple(ids), array, i, j, self.version, reason))
        return samples

    def shutdown(self):
        pass


class FakeTrain:
    """SGD on the table (policy) or on a vector of values (critic). Gradients of data- and context-parallel ranks are
    added over gloo; context-parallel ranks deal the positions of a pack out one by one (Megatron: in chunks).
    Faults: TRAIN_DIE, DRIFT (the last rank alone changes one bit)."""

    def __init__(self, model, train, consistency, *, role, rank, world_size, master_addr, master_port, seed):
        self.device = torch.device("cpu")
        self.role, self.rank, self.lr = role, rank, train.lr if role != "critic" else train.critic_lr
        self.world, self.cp = world_size, train.context_parallel_size
        self.table = start_weights(seed).requires_grad_()
        self.value = torch.zeros(VOCAB, requires_grad=True)
        self.steps = 0
        if world_size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo", init_method=f"tcp://{master_addr}:{master_port}", rank=rank, world_size=world_size
            )

    @property
    def parameter(self):
        return self.value if self.role == "critic" else self.table

    def info(self):
        return {"engine": "fake", "contract": CONTRACT, "backends": {"y": "fake"}}

    def local_rows(self, packed: PackedBatch):
        return None if self.cp == 1 else torch.arange(self.rank % self.cp, packed.num_tokens, self.cp)

    def _own(self, packed: PackedBatch, x):
        rows = self.local_rows(packed)
        return x if rows is None else x[rows]

    def _logp(self, packed: PackedBatch, temperature):
        # One row at a time, as the rollout does, so that bits agree.
        rows = [torch.log_softmax(self.table[int(t) % VOCAB] / temperature, -1) for t in packed.tokens]
        target = packed.target_ids.clamp(min=0)
        logp = torch.stack([row[t] for row, t in zip(rows, target)])
        entropy = torch.stack([-(row.exp() * row).sum() for row in rows])
        return tuple(self._own(packed, torch.where(packed.active, x, 0.0)) for x in (logp, entropy))

    def forward_logp(self, packed, temperature):
        with torch.no_grad():
            return SimpleNamespace(logp=self._logp(packed, temperature)[0])

    def forward_values(self, packed):
        return self._own(packed, self.value.detach()[packed.tokens % VOCAB])

    def forward_backward(self, batches, loss_fn, temperature):
        found = []
        for packed in batches:
            if self.role == "critic":
                loss, metrics = loss_fn(self._own(packed, self.value[packed.tokens % VOCAB]), packed)
            else:
                loss, metrics = loss_fn(*self._logp(packed, temperature), packed)
            loss.backward()
            found.append(metrics)
        return found

    def optimizer_step(self):
        parameter = self.parameter
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if self.world > 1:
            torch.distributed.all_reduce(grad)
        if fault("TRAIN_DIE") == self.steps:
            os._exit(7)
        with torch.no_grad():
            parameter -= self.lr * grad
        parameter.grad = None
        self.steps += 1
        return {"grad_norm": float(grad.norm()), "lr": self.lr}

    def replica_digests(self):
        if fault("DRIFT") == self.steps and self.rank == self.world - 1:
            self.table.data.view(torch.int32)[3, 5] += 1
        return replicas.digest([("table", self.table.detach(), True), ("value", self.value.detach(), True)])

    def hf_tensors(self):
        return {f"table.{i}": ((1, VOCAB), "float32") for i in range(VOCAB)}

    def stream_hf_weights(self):
        for i in range(VOCAB):
            yield f"table.{i}", self.table.detach()[i : i + 1]

    def save_state(self, folder):
        data = {"p": self.parameter.detach(), "steps": self.steps}
        torch.save(data, Path(folder) / f"{self.role}_rank{self.rank}.pt")

    def load_state(self, folder):
        data = torch.load(Path(folder) / f"{self.role}_rank{self.rank}.pt")
        self.steps = data["steps"]
        with torch.no_grad():
            self.parameter.copy_(data["p"])

    def shutdown(self):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class FakeTask:
    """Reward: fraction of response tokens that are even. A prompt is two tokens."""

    eos_token_ids = (EOS,)

    def __init__(self, constant: bool = False):
        self.constant = constant

    def take(self, start, count):
        out = []
        for i in range(start, start + count):
            digest = hashlib.sha256(str(i).encode()).digest()
            out.append(Prompt((2 + digest[0] % 14, 2 + digest[1] % 14), "", i))
        return out

    def score(self, prompts, samples):
        if self.constant:
            return summarize([0.5] * len(samples), 0)
        return summarize([sum(t % 2 == 0 for t in s.response_ids) / len(s.response_ids) for s in samples], 0)

    def info(self):
        return {"path": "fake"}

    def close(self):
        pass
