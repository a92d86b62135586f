"""Gradients, optimizer and learning rate of one Megatron model: DDP, fp32 masters, clipping, exact state.

Gradients accumulate in fp32 over micro-batches and are summed over data-parallel ranks in fp32 by Megatron's DDP. The
norm used for clipping is computed here, so that it does not depend on the tensor-parallel size (Megatron adds one
partial sum per rank, in an order of its own); with the distributed optimizer, which shards gradients, Megatron's own
norm is used.

Memory a parameter: 2 bytes of bf16 weight, 4 of gradient, 4 of master weight, and with ``adam`` 8 of moments.
``sgd`` (no momentum) keeps no state, which is what lets one device train a model whose Adam state would not fit.
Temporaries of a step stay below a gibibyte whatever the size of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from recipes.engines import megatron_cpu
from recipes.engines.megatron_weights import all_finite
from recipes.errors import CheckpointError, EngineError

_ROW = 1024  # squares are summed in rows of this many elements, in float64
_CHUNK = 1 << 26  # elements looked at together; a multiple of _ROW, so that rows are the same with and without chunks


class Optimizer:
    """DDP, Megatron's optimizer and its scheduler around one ``GPTModel``.

    Args:
        model: a ``GPTModel`` on its device.
        train: ``recipes.config.TrainConfig``.
        lr: learning rate after warm-up.
        segments: virtual tensor-parallel size S; the gradient norm is summed over S shards of every sharded tensor.
        norm_grads_complete: the model's backward sums the gradients of norm weights over tensor-parallel ranks (strict
            modules do, stock ones leave it to Megatron).
    """

    def __init__(self, model: Any, train: Any, *, lr: float, segments: int, norm_grads_complete: bool) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.model, self.segments, self.norm_grads_complete = model, segments, norm_grads_complete
        self.distributed, self.clip_grad = train.distributed_optimizer, float(train.clip_grad)
        dtype = model.config.params_dtype
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,  # reduce once, after the last micro-batch
            use_distributed_optimizer=self.distributed,
            check_for_nan_in_grad=False,  # checked in step(), with the name of the parameter
        )
        config = OptimizerConfig(
            optimizer=train.optimizer,
            lr=lr,
            min_lr=lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=train.adam_eps,
            sgd_momentum=0.0,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=self.distributed,
            clip_grad=self.clip_grad if self.distributed else 0.0,
        )
        with megatron_cpu.scope(optimizer=True):
            self.ddp = DistributedDataParallel(model.config, ddp_config, model)
            self.optimizer = get_megatron_optimizer(config, [self.ddp], use_gloo_process_groups=False)
        if next(model.parameters()).is_cuda:
            # torch's default on CUDA updates all tensors together, with temporaries of the size of the whole model.
            for group in self.optimizer.param_groups:
                group.update(foreach=False, fused=True)
        warmup = train.lr_warmup_steps
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            # Linear from lr / warmup to lr: no step is spent at a learning rate of 0.
            init_lr=lr / warmup if warmup else lr,
            max_lr=lr,
            min_lr=lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(warmup + 1, 1 << 40),
            lr_decay_style="constant",
            start_wd=train.weight_decay,
            end_wd=train.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clear the accumulated gradients."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def masters_from_model(self) -> None:
        """Copy the model's weights into the optimizer's fp32 masters; call after weights are loaded."""
        with megatron_cpu.scope(optimizer=True):
            self.optimizer.reload_model_params()

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Reduce, check, clip, update, advance the learning rate, clear.

        Returns: ``grad_norm`` before clipping, and ``lr`` of this update.

        Raises:
            EngineError: a gradient is NaN or infinite; raised on every rank before any weight changes, and on the rank
                that holds it the message names the parameter.
        """
        lr = self.learning_rate
        with megatron_cpu.scope(optimizer=True):
            if self.norm_grads_complete:
                self.ddp.finish_grad_sync()
            else:  # also sums the gradients of q/k norms over tensor-parallel ranks
                from megatron.core.distributed import finalize_model_grads

                finalize_model_grads([self.ddp])
        self._require_finite_grads()
        grad_norm = 0.0
        if not self.distributed:
            grad_norm = self.grad_norm()
            if self.clip_grad > 0.0 and grad_norm > self.clip_grad:
                scale = self.clip_grad / (grad_norm + 1e-6)
                for buffer in self._grad_buffers():
                    buffer.mul_(scale)
        with megatron_cpu.scope(optimizer=True):
            if self.distributed:
                _, own_norm, _ = self.optimizer.step()
                grad_norm = float(own_norm or 0.0)
            else:  # the two parts of Megatron's step around a norm that is already known
                self.optimizer.prepare_grads()
                self.optimizer.step_with_ready_grads()
        self.scheduler.step(increment=1)
        self.zero_grad()
        return {"grad_norm": grad_norm, "lr": lr}

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return float(max(group["lr"] for group in self.optimizer.param_groups))

    def _grad_buffers(self) -> Iterator[torch.Tensor]:
        for buffer in self.ddp.buffers:
            yield buffer.grad_data

    def _require_finite_grads(self) -> None:
        finite = torch.stack([all_finite(buffer) for buffer in self._grad_buffers()]).all()
        flag = (~finite).float().view(1)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            return
        names = [n for n, p in self.model.named_parameters() if not bool(all_finite(p.main_grad))]
        self.zero_grad()
        raise EngineError(
            f"not finite in {len(names)} tensors, first {names[0]}" if names else "not finite on another rank",
            where="gradients",
            fix="No weight was changed. Lower the learning rate, or look at this step's rewards and advantages.",
        )

    def grad_norm(self) -> float:
        """Euclidean norm of the gradient of the whole model; bits independent of the tensor-parallel size.

        Every tensor is cut into the S shards of the contract; a shard's sum of squares has one order (rows of 1024 in
        float64), and the shards are added exactly (``math.fsum``).
        """
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        sums = []
        for param in self.model.parameters():
            sharded = getattr(param, "tensor_model_parallel", False)
            count = self.segments // group.size() if sharded else 1
            weight = 1.0 if sharded or group.rank() == 0 else 0.0  # a replicated tensor counts once
            dim = param.partition_dim if sharded else 0
            for shard in param.main_grad.chunk(count, dim=dim):
                sums.append(_sum_of_squares(shard) * weight)
        local = torch.stack(sums)
        parts = [torch.empty_like(local) for _ in range(group.size())]
        if len(parts) > 1:
            dist.all_gather(parts, local, group=group)
        else:
            parts = [local]
        return math.sqrt(math.fsum(torch.cat(parts).tolist()))

    # State -----------------------------------------------------------------------------------------------------------

    def _inner(self) -> list[Any]:
        """torch optimizers inside Megatron's wrappers, each over the tensors it really updates (fp32 masters)."""
        return [part.optimizer for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]

    def state(self) -> dict[str, Any]:
        """Masters, moments, step counts and learning-rate state: with the weights, everything a resume needs."""
        return {
            "inner": [part.state_dict() for part in self._inner()],
            "masters": [[p.detach() for group in part.param_groups for p in group["params"]] for part in self._inner()],
            "scheduler": self.scheduler.state_dict(),
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state`; bytes are copied, nothing is converted.

        Raises:
            CheckpointError: the state is of another model or layout.
        """
        inner = self._inner()
        if len(state["inner"]) != len(inner):
            raise CheckpointError(
                "another number of optimizers", where="optimizer state", fix="Resume the same layout."
            )
        for part, saved, masters in zip(inner, state["inner"], state["masters"]):
            params = [p for group in part.param_groups for p in group["params"]]
            if [p.shape for p in params] != [p.shape for p in masters]:
                raise CheckpointError(
                    "the optimizer holds other shapes",
                    where="optimizer state",
                    fix="Resume with the same model and parallel sizes, or start with trainer.resume=never.",
                )
            part.load_state_dict(saved)
            for param, master in zip(params, masters):
                param.copy_(master)
        self.scheduler.load_state_dict(state["scheduler"])
        self.zero_grad()


def _row_sums(x: torch.Tensor, width: int) -> torch.Tensor:
    """Sums of the rows of ``x`` [n] in rows of ``width``, the last one padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % width)).view(-1, width).sum(dim=1)


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    flat = x.contiguous().view(-1)
    width = min(_ROW, flat.numel())
    flat = torch.cat([_row_sums(part.double().square_(), width) for part in flat.split(_CHUNK)])
    while flat.numel() > 1:
        flat = _row_sums(flat, min(_ROW, flat.numel()))
    return flat.squeeze(0)
