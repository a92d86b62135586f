"""What the Megatron tests run inside training processes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from recipes.engines.types import PackedBatch
from tests.engines.megatron_ranks import Case, make_batch, make_samples, nll, raw, squared


def forward(rank: int, port: int, case: Case, temperature: float, pad: int = 1) -> dict[str, Any]:
    """Log-probabilities of the standard batch and the weight hash."""
    engine = case.engine(rank, port)
    batch = make_batch(pad_to_multiple=pad)
    out = engine.forward_logp(batch, temperature)
    active = batch.active
    result = {
        "bytes": b"".join(raw(part[active]) for part in out),
        "logp": out.logp[active].numpy(),
        "hash": engine.weight_hash(),
        "info": engine.info(),
    }
    engine.shutdown()
    return result


def splits(rank: int, port: int, case: Case) -> dict[str, bytes]:
    """One batch in one pack, in packs of two, alone, and in another order."""
    engine = case.engine(rank, port)
    result = packings(engine)
    engine.shutdown()
    return result


def packings(engine: Any) -> dict[str, bytes]:
    """Bits of the same samples, packed in different ways."""
    samples = make_samples(6)

    def logp(order: list[int]) -> dict[int, bytes]:
        batch = PackedBatch.from_samples([samples[i] for i in order], indices=order)
        out, borders = engine.forward_logp(batch, 0.7).logp, batch.cu_seqlens.tolist()
        return {
            i: raw(out[a:b][batch.active[a:b]]) for i, a, b in zip(batch.sample_index.tolist(), borders, borders[1:])
        }

    ways = {
        "together": logp(list(range(6))),
        "pairs": {k: v for n in (0, 2, 4) for k, v in logp([n, n + 1]).items()},
        "alone": {k: v for n in range(6) for k, v in logp([n]).items()},
        "reversed": logp([5, 4, 3, 2, 1, 0]),
    }
    return {name: b"".join(part[i] for i in range(6)) for name, part in ways.items()}


def gpu(rank: int, port: int, case: Case, folder: str) -> dict[str, Any]:
    """Everything that one process of a GPU run can tell: the same training with engines of other settings."""
    from dataclasses import replace

    found: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = {
        "first": {},
        "second": {},
        "recompute": {"recompute": True},
        "recompute_one": {"recompute": True, "recompute_layers": 1},
        "sgd": {"optimizer": "sgd", "lr": 1.0},
    }
    for name, settings in variants.items():
        one = replace(case, train=settings)
        engine = one.engine(rank, port)
        start = engine.weight_hash()
        if name == "first":
            found["packings"], found["info"] = packings(engine), engine.info()
        state = os.path.join(folder, name)
        history = train_steps(engine, one, rank, range(3), state, 1 if name in ("first", "sgd") else -1)
        found[name] = {"history": history, "hash": engine.weight_hash(), "last": outcome(engine, one), "start": start}
        if name in ("first", "sgd"):  # resume after two of the three steps
            del engine
            engine = one.engine(rank, port)
            engine.load_state(state)
            history[2:] = train_steps(engine, one, rank, range(engine.weight_version, 3))
            found[name + "_resumed"] = {
                "history": history,
                "hash": engine.weight_hash(),
                "last": outcome(engine, one),
                "start": start,
            }
    engine.shutdown()
    return found


def train_steps(
    engine: Any, case: Case, rank: int, steps: range, folder: str = "", save_at: int = -1, pad: int = 1
) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of every step on two micro-batches a data-parallel rank."""
    dp_rank = rank // (case.tp * case.cp)
    history = []
    for step in steps:
        batches = [make_batch(4, seed=100 * step + 10 * dp_rank + n, pad_to_multiple=pad) for n in range(2)]
        scale = 1.0 / 200.0
        loss = squared(scale) if case.role == "critic" else nll(scale)
        metrics = engine.forward_backward(batches, loss, 0.7)
        result = engine.optimizer_step()
        history.append((sum(m["loss"] for m in metrics), result["grad_norm"], result["lr"]))
        if step == save_at:
            engine.save_state(folder)
    return history


def outcome(engine: Any, case: Case, pad: int = 1) -> bytes:
    """Bits of the standard batch."""
    batch = make_batch(pad_to_multiple=pad)
    if case.role == "critic":
        return raw(engine.forward_values(batch))
    return b"".join(raw(part) for part in engine.forward_logp(batch, 1.3))


def train(
    rank: int, port: int, case: Case, steps: int, folder: str = "", save_at: int = -1, pad: int = 1
) -> dict[str, Any]:
    """``steps`` updates on two micro-batches a data-parallel rank; resumes from ``folder`` if it holds a state."""
    engine = case.engine(rank, port)
    first = 0
    if folder and os.path.isdir(folder):
        engine.load_state(folder)
        first = engine.weight_version
    history = train_steps(engine, case, rank, range(first, steps), folder, save_at, pad)
    last = outcome(engine, case, pad)
    result = {"history": history, "hash": engine.weight_hash(), "last": last}
    engine.shutdown()
    return result


def gradients(rank: int, port: int, case: Case) -> dict[str, np.ndarray]:
    """fp32 gradient of the loss under Hugging Face names, before any update."""
    from recipes.engines import megatron_weights

    engine = case.engine(rank, port)
    engine.forward_backward([make_batch()], nll(1.0 / 100.0), 0.7)
    grads = {name: param.main_grad for name, param in engine.model.named_parameters()}
    full = dict(megatron_weights.export(grads, engine.config, engine.tp_group))
    result = {name: grad.detach().cpu().numpy().copy() for name, grad in full.items()}
    engine.shutdown()
    return result


def round_trip(rank: int, port: int, case: Case) -> dict[str, Any]:
    """Train, export, load the export into a second engine of the same process, compare."""
    engine = case.engine(rank, port)
    before = engine.weight_hash()
    engine.forward_backward([make_batch()], nll(0.01))
    engine.optimizer_step()
    exported, trained = engine.export_hf_weights(), engine.weight_hash()
    case.role = "reference"
    reference = case.engine(rank, port)
    start = reference.weight_hash()
    reference.load_hf_weights(exported, version=5)
    batch = make_batch()
    same = raw(reference.forward_logp(batch).logp) == raw(engine.forward_logp(batch).logp)
    result = {
        "before": before,
        "trained": trained,
        "start": start,
        "loaded": reference.weight_hash(),
        "same_logp": same,
        "shapes": {name: tuple(t.shape) for name, t in exported.items()},
    }
    engine.shutdown()
    return result


def head(rank: int, port: int, case: Case) -> dict[str, Any]:
    """The LM head as other loops read it."""
    from recipes.engines.megatron import lm_head_of

    engine = case.engine(rank, port)
    assert engine.optimizer is not None
    found = lm_head_of(engine.optimizer.ddp)  # wrapped: the head is found through DDP
    tied = found.weight is engine.model.embedding.word_embeddings.weight
    result = {
        "shape": tuple(found.weight.shape),
        "start": found.vocab_start_index,
        "vocab": found.global_vocab_size,
        "padded": found.padded_vocab_size,
        "ranks": found.tp_group.size(),
        "segments": found.grad_segments,
        "tied": tied,
        "zero_padding": not bool(found.weight[max(0, found.global_vocab_size - found.vocab_start_index) :].any()),
    }
    engine.shutdown()
    return result


def errors(rank: int, port: int, folder: str) -> dict[str, str]:
    """Every refusal of one engine, by name."""
    case = Case()
    engine = case.engine(rank, port)
    batch = make_batch()
    found: dict[str, str] = {}

    def refused(name: str, call: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
            found[name] = "not refused"
        except Exception as error:  # noqa: BLE001 - the test reads its type and text
            found[name] = f"{type(error).__name__}: {error}"

    bad = make_batch()
    bad.tokens[3] = 300
    refused("token", engine.forward_logp, bad)
    long = PackedBatch.from_samples(make_samples(1, longest=40) * 1)
    long.cu_seqlens[-1] = 999
    refused("long", engine.forward_logp, long)
    refused("role", engine.forward_values, batch)
    refused("loss", engine.forward_backward, [batch], lambda logp, entropy, b: (logp.sum() * float("nan"), {}))

    weights = engine.export_hf_weights()
    held = engine.weight_hash()
    refused("missing", engine.load_hf_weights, {k: v for k, v in weights.items() if "q_norm" not in k})
    refused("extra", engine.load_hf_weights, {**weights, "model.layers.9.mlp.up_proj.weight": torch.zeros(1)})
    refused("shape", engine.load_hf_weights, {**weights, "model.norm.weight": torch.ones(3)})
    broken = {**weights, "model.norm.weight": weights["model.norm.weight"].clone()}
    broken["model.norm.weight"][5] = float("nan")
    refused("nan_loaded", engine.load_hf_weights, broken)
    engine.load_hf_weights(weights)

    def poison(logp: torch.Tensor, entropy: torch.Tensor, b: PackedBatch) -> Any:
        engine.model.decoder.layers[1].mlp.linear_fc2.weight.main_grad[0, 0] = float("inf")
        return logp.sum(), {}

    engine.forward_backward([batch], poison)
    refused("nan_gradient", engine.optimizer_step)
    found["unchanged"] = str(engine.weight_hash() == held)

    with torch.no_grad():
        engine.model.decoder.layers[0].self_attention.linear_qkv.weight[1, 2] = float("nan")
    refused("nan_weight", engine.forward_logp, batch)
    engine.load_hf_weights(weights)

    engine.save_state(folder)
    size = os.path.getsize(os.path.join(folder, "policy_rank0.pt"))
    real, os.fsync = os.fsync, lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    refused("disk", engine.save_state, folder)
    os.fsync = real
    found["kept"] = str(sorted(os.listdir(folder)) == ["policy_rank0.pt"] and size > 0)
    engine.load_state(folder)
    refused("no_state", engine.load_state, folder + "/nothing")
    with open(os.path.join(folder, "policy_rank0.pt"), "r+b") as file:
        file.truncate(size // 2)
    refused("damaged", engine.load_state, folder)
    engine.shutdown()
    return found


def refusals_at_start(rank: int, port: int) -> dict[str, str]:
    """Settings that no engine is built for."""
    cases = {
        "world": Case(dp=2, world_size=1),
        "virtual_tp": Case(virtual_tp=4),  # 2 key/value heads
        "recompute": Case(train={"recompute": True}),
        "role": Case(role="judge"),
    }
    found = {}
    for name, case in cases.items():
        try:
            case.engine(rank, port)
            found[name] = "not refused"
        except Exception as error:  # noqa: BLE001 - the test reads its type and text
            found[name] = f"{type(error).__name__}: {error}"
    return found


def accumulate(rank: int, port: int, case: Case) -> str:
    """One update from two micro-batches, dealt to the data-parallel ranks."""
    engine = case.engine(rank, port)
    batches = [make_batch(4, seed=n) for n in range(2)]
    engine.forward_backward(batches if case.dp == 1 else [batches[rank]], nll(1.0 / 200.0))
    engine.optimizer_step()
    result = engine.weight_hash()
    engine.shutdown()
    return result


def context_parallel(rank: int, port: int, case: Case) -> dict[str, Any]:
    """Results by token, as the loop asks for them, one update, and the results after it."""
    from recipes.batching import gather, padding_of

    engine = case.engine(rank, port)
    sequence, total = padding_of(engine.train_config)
    batch = PackedBatch.from_samples(make_samples(3), sequence_multiple=sequence, pad_to_multiple=total)
    rows = engine.local_rows(batch)

    def own() -> dict[int, dict[int, int]]:
        """Bits of this rank's tokens, by sample and token."""
        critic = case.role == "critic"
        computed = engine.forward_values(batch) if critic else engine.forward_logp(batch, 0.7).logp
        parts = gather(batch, computed, rows)
        return {i: dict(zip(t.tolist(), v.view(np.int32).tolist())) for i, (t, v) in parts.items()}

    def value_loss(values: torch.Tensor, packed: PackedBatch) -> Any:
        active = packed.active if rows is None else packed.active[rows]
        return ((values - 1.0).square() * active).sum() / 50.0, {}

    before = own()
    engine.forward_backward([batch], value_loss if case.role == "critic" else nll(1.0 / 50.0), 0.7)
    norm = engine.optimizer_step()["grad_norm"]
    result = {"before": before, "after": own(), "grad_norm": norm, "hash": engine.weight_hash()}
    engine.shutdown()
    return result


def drift(rank: int, port: int, case: Case, perturbed: dict[int, str]) -> list[Any]:
    """Digests of this rank's parameters after an update, and after one bit of ``perturbed[rank]`` has changed."""
    engine = case.engine(rank, port)
    train_steps(engine, case, rank, range(1))
    found = [engine.replica_digests()]
    if rank in perturbed:
        with torch.no_grad():
            dict(engine.model.named_parameters())[perturbed[rank]].data.view(torch.int16).view(-1)[-1] ^= 1
    found.append(engine.replica_digests())
    engine.shutdown()
    return found
