"""One gloo rank of ``test_real_vime``: real vime and real Megatron-LM, strict log-probabilities against vime's own.

Run by torchrun with ``VIME_ROOT`` and ``MEGATRON_LM_ROOT`` on PYTHONPATH; prints one JSON line on rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

VOCAB, HIDDEN, LENGTHS = 4090, 64, [(23, 9), (64, 40), (7, 1), (51, 50)]  # (total, response) of each sample
TEMPERATURE = 0.7


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.numel())
        return out


def megatron_args(tp: int, cp: int, sequence_parallel: bool, tied: bool) -> Any:
    """vime's and Megatron's parsed arguments for a two-layer Qwen3."""
    from megatron.training.arguments import parse_args
    from vime.utils.arguments import get_vime_extra_args_provider

    flags = {
        "--num-layers": 2,
        "--hidden-size": HIDDEN,
        "--ffn-hidden-size": 96,
        "--num-attention-heads": 4,
        "--num-query-groups": 2,
        "--kv-channels": 32,
        "--norm-epsilon": 1e-6,
        "--rotary-base": 1000000,
        "--vocab-size": VOCAB,
        "--normalization": "RMSNorm",
        "--tensor-model-parallel-size": tp,
        "--context-parallel-size": cp,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--seq-length": 512,
        "--max-position-embeddings": 512,
        "--rollout-temperature": TEMPERATURE,
        "--rollout-batch-size": 4,
        "--transformer-impl": "local",
        "--cp-comm-type": "all_gather",
        "--custom-megatron-init-path": "recipes.vime.init.init",
        "--custom-megatron-before-log-prob-hook-path": "recipes.vime.init.before_log_prob",
    }
    switches = "--swiglu --disable-bias-linear --qk-layernorm --group-query-attention --use-rotary-position-embeddings"
    switches += " --use-cpu-initialization --no-gradient-accumulation-fusion"
    switches += "" if tied else " --untie-embeddings-and-output-weights"
    switches += " --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion"
    switches += " --no-persist-layer-norm --no-rope-fusion --use-dynamic-batch-size"
    sys.argv = ["train.py", *switches.split(), *(str(x) for pair in flags.items() for x in pair)]
    sys.argv += ["--spec", "recipes.vime.spec", "strict_layer_spec"]
    args = parse_args(extra_args_provider=get_vime_extra_args_provider(), ignore_unknown_args=True)
    args.params_dtype, args.bf16 = torch.bfloat16, True
    args.sequence_parallel = sequence_parallel
    args.padded_vocab_size = 4096
    args.variable_seq_lengths, args.moe_token_dispatcher_type = True, "alltoall"  # as vime.validate_args
    args.data_pad_size_multiplier = 8
    args.rope_type = args.position_embedding_type = "rope"
    return args


def wrap_process_groups() -> None:
    """Process groups as vime's trainer has them: wrappers, so that they can be destroyed during rollout."""
    from vime.utils import reloadable_process_group as reloadable

    reloadable.available_memory = lambda *_: {"free_GB": 1e3}  # asks a GPU
    for name in ("all_gather_single", "reduce_scatter_single"):  # newer than the torch that this vime is for
        setattr(reloadable.ReloadableProcessGroup, name, lambda group, *a, _n=name: group._fwd(_n, *a))
    reloadable.monkey_patch_torch_dist()
    reloadable.register_default_process_group(timedelta(minutes=5))


def build(args: Any, role: str) -> Any:
    """vime's own model provider, wrapped as vime's training wraps it."""
    from megatron.core.transformer.module import Float16Module
    from vime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args, role)(pre_process=True, post_process=True)
    if role == "actor":
        from recipes.engines import megatron_weights as weights
        from recipes.vime.layers import fused_name

        config = model_config(args)
        tp, rank = args.tensor_model_parallel_size, int(os.environ["RANK"]) % args.tensor_model_parallel_size
        reader = weights.initial_reader(config, 5)
        params = dict(model.named_parameters())
        shards = weights.shards(config, reader, padded_vocab=args.padded_vocab_size, rank=rank, size=tp)
        with torch.no_grad():
            for name, shard in shards:
                params.pop(fused_name(name)).copy_(shard)
        assert not params, sorted(params)
    return Float16Module(model.config, model)


def model_config(args: Any) -> Any:
    from recipes.config import ModelConfig

    tied = not args.untie_embeddings_and_output_weights
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, head_dim=32, tie_word_embeddings=tied
    )


def exported(args: Any, model: Any) -> dict[str, bool]:
    """Whether vime converts every parameter to its Hugging Face name with the bytes that were loaded."""
    from vime.backends.megatron_utils.megatron_to_hf import convert_to_hf

    from recipes.engines import megatron_weights as weights
    from recipes.engines.megatron_model import unwrap

    reader = weights.initial_reader(model_config(args), 5)
    pairs = [
        pair
        for name, param in unwrap(model).named_parameters()
        for pair in convert_to_hf(args, "qwen3config", f"module.module.{name}", param.data)
    ]
    return {name: torch.equal(tensor, reader(name)) for name, tensor in pairs}


def samples() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, VOCAB, (total,), generator=generator) for total, _ in LENGTHS]
    tokens[0][-1] = VOCAB - 1  # a target in the last shard
    return {
        "tokens": tokens,
        "loss_masks": [torch.ones(response, dtype=torch.int) for _, response in LENGTHS],
        "total_lengths": [total for total, _ in LENGTHS],
        "response_lengths": [response for _, response in LENGTHS],
    }


def batch_of(args: Any) -> dict[str, Any]:
    """A packed micro-batch from vime's own data code."""
    from vime.backends.megatron_utils.data import DataIterator, get_batch

    data = samples()
    iterator = DataIterator(data, [list(range(len(LENGTHS)))])
    return get_batch(iterator, [*data, "multimodal_train_inputs"], args.data_pad_size_multiplier, False)


def roles(args: Any) -> dict[str, list[int]]:
    """Bits of vime's own forward-only passes, policy and reference, over models that no hook has seen before."""
    from vime.backends.megatron_utils import loss
    from vime.backends.megatron_utils.data import DataIterator
    from vime.backends.megatron_utils.model import forward_only

    found = {}
    for prefix in ("", "ref_"):
        model, data = build(args, "actor"), samples()
        data["multimodal_train_inputs"] = None
        iterator = DataIterator(data, [[0, 2], [1], [3]])
        out = forward_only(loss.get_log_probs_and_entropy, args, [model], [iterator], [3], store_prefix=prefix)
        found[prefix] = [int(x) for x in flat(out[f"{prefix}log_probs"]).view(torch.int32)]
    return found


def flat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def compare(args: Any, model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Values and gradients of the strict function beside vime's own on the logits of the same model."""
    from megatron.core import mpu
    from vime.backends.megatron_utils import loss

    from recipes.engines.megatron_model import lm_head_of, unwrap
    from recipes.vime import compat, head
    from rl_kernel import registry

    original = original_function()
    shape = {k: batch[k] for k in ("unconcat_tokens", "total_lengths", "response_lengths")}
    head.attach([model], VOCAB)
    forward = {"input_ids": batch["tokens"], "position_ids": None, "attention_mask": None, "labels": None}
    with Largest() as largest:
        hidden = model(**forward, packed_seq_params=batch["packed_seq_params"])
        _, strict = loss.get_log_probs_and_entropy(hidden, args=args, with_entropy=True, **shape)
        total = flat(strict["log_probs"]).sum()
    strict_grad = torch.autograd.grad(total, hidden)[0]
    rows = hidden.shape[1]

    lm_head = lm_head_of(unwrap(model), global_vocab_size=VOCAB)
    leaf = hidden.detach().requires_grad_()
    logits = torch.nn.functional.linear(leaf[0], lm_head.weight.detach().float())
    columns = lm_head.vocab_start_index + torch.arange(logits.shape[-1])
    logits = logits.masked_fill(columns >= VOCAB, float("-inf"))[None]
    _, own = original(logits, args=args, with_entropy=False, **shape)
    own_grad = torch.autograd.grad(flat(own["log_probs"]).sum(), leaf)[0]
    dist.all_reduce(own_grad, group=mpu.get_tensor_model_parallel_group())

    wide = torch.nn.functional.linear(leaf.detach()[0].double(), lm_head.weight.detach().double()) / TEMPERATURE
    wide = wide.masked_fill(columns >= VOCAB, float("-inf"))
    gathered = [torch.empty_like(wide) for _ in range(lm_head.tp_group.size())]
    dist.all_gather(gathered, wide, group=lm_head.tp_group)
    targets = loss._build_shifted_tokens(rows, wide.device, *shape.values(), False)
    truth_full = torch.log_softmax(torch.cat(gathered, -1), -1).gather(1, targets[:, None])[:, 0]
    truth, _ = loss._extract_per_sample(truth_full, None, shape["total_lengths"], shape["response_lengths"], False)
    mine, theirs, exact = flat(strict["log_probs"]).detach(), flat(own["log_probs"]).detach(), flat(truth)
    return {
        "tokens": mine.numel(),
        "rebound": sum(m.get_log_probs_and_entropy is not original for m in compat.holders()),
        "error_strict": (mine.double() - exact).abs().max().item() if mine.numel() else 0.0,
        "error_vime": (theirs.double() - exact).abs().max().item() if mine.numel() else 0.0,
        "gradient_relative": ((strict_grad - own_grad).norm() / own_grad.norm()).item(),
        "largest_elements": largest.elements,
        "logits_elements": rows * logits.shape[-1],
        "weight_elements": lm_head.weight.numel(),
        "lengths": [len(part) for part in strict["log_probs"]] == [len(part) for part in own["log_probs"]],
        "bits": [int(x) for x in mine.view(torch.int32)],
        "backend": registry.resolve("linear_logp", hidden.device, torch.bfloat16).backend,
    }


_ORIGINAL: Any = None


def original_function() -> Any:
    return _ORIGINAL


def critic(args: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A critic's output layer must stay vime's own."""
    from vime.backends.megatron_utils.loss import get_values

    from recipes.vime import head

    model = build(args, "critic")
    changed = head.attach([model], VOCAB)
    forward = {"input_ids": batch["tokens"], "position_ids": None, "attention_mask": None, "labels": None}
    out = model(**forward, packed_seq_params=batch["packed_seq_params"])
    shape = {k: batch[k] for k in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, values = get_values(out, args=args, **shape)
    return {"critic_changed": changed, "critic_values": int(flat(values["values"]).numel())}


def main() -> None:
    global _ORIGINAL
    tp, cp, sequence_parallel = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
    os.environ["RL_KERNEL_MODE"], os.environ["RL_KERNEL_VIRTUAL_TP"] = "strict", "2"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from recipes.engines import megatron_cpu

    # vime's actor imports a CUDA allocator hook that has no CPU build; nothing of it is called here.
    sys.modules.setdefault("torch_memory_saver", SimpleNamespace(torch_memory_saver=SimpleNamespace()))  # type: ignore[arg-type]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign] - vime's data code moves tensors
    with megatron_cpu.scope(optimizer=True):
        from megatron.core import mpu

        wrap_process_groups()
        mpu.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
        megatron_cpu.seed_rng_tracker(0)
        from vime.backends.megatron_utils import actor, loss  # noqa: F401 - actor holds its own reference
        from vime.utils.misc import load_function

        args = megatron_args(tp, cp, sequence_parallel, tied=sys.argv[4] == "1")
        _ORIGINAL = loss.get_log_probs_and_entropy
        load_function(args.custom_megatron_init_path)(SimpleNamespace(**vars(args)))
        batch = batch_of(args)
        model = build(args, "actor")
        result = {**compare(args, model, batch), **critic(args, batch)}
        result["exported"] = exported(args, model) if tp == 1 else {}
        result["roles"] = roles(args)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, result)
    if dist.get_rank() == 0:
        print(json.dumps(everyone), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
