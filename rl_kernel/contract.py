"""The numeric contract: what every implementation of an operator must compute, to the bit.

A formula does not fix an execution path. For each operator the contract fixes six observable behaviours; two kernels
that keep them may differ in tiles, layout, parallelism and scheduling and still return the same bits, so every call
site (paged decode, packed training, any batch, any tensor-parallel size) is free to be fast.

Bits are promised inside one arithmetic family (see :mod:`rl_kernel.platform`). The fields are the same in all
families; ``primitives`` and the block sizes differ. :func:`fingerprint` hashes a contract; two engines whose
fingerprints differ must not train together.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace

from rl_kernel.errors import ContractError

VERSION = 1
VOCAB_LEAF = 128  # columns of the global vocabulary in one leaf of the log-sum-exp tree
# GPU families: columns of one block of the dH reduction. A block is one ascending chain, blocks merge ascending by one
# fp32 addition, so that the dlogits of one block at a time are enough and library products can accumulate them.
VOCAB_BLOCK = 16384
MAX_VIRTUAL_TP = 8


@dataclass(frozen=True)
class OpContract:
    """The six observable behaviours of one operator.

    Attributes:
        inputs: which elements an output element depends on.
        partition: how the reduction domain is divided into partial results.
        merge: the order in which partial results are combined.
        precision: dtypes of inputs, accumulators, state and output.
        rounding: every point at which a value is rounded to a narrower dtype.
        primitives: the scalar and matrix primitives, by name.
        parameters: the numbers the sentences above refer to.
    """

    inputs: str
    partition: str
    merge: str
    precision: str
    rounding: str
    primitives: tuple[str, ...]
    parameters: dict[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contract:
    """All operators of one family, with the run-wide parameters."""

    family: str
    virtual_tp: int
    model_dtype: str
    ops: dict[str, OpContract]
    version: int = VERSION

    def fingerprint(self) -> str:
        """16 hex digits of the SHA-256 of the canonical JSON form."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_op(self, name: str, **changes: object) -> Contract:
        """A copy with fields of one operator changed (used by negative controls)."""
        return replace(self, ops={**self.ops, name: replace(self.ops[name], **changes)})  # type: ignore[arg-type]


# Matrix and scalar primitives by family. The MMA primitive is what separates families.
_DOT = {
    "cpu": ("dot16: 16 interleaved fp32 accumulators, fma, tree over lanes",),
    "sm90": ("mma m*n*k16 bf16 -> fp32, ascending k",),
    "gfx942": ("v_mfma_f32_16x16x16_bf16 -> fp32, ascending k",),
}
_EXP = {
    "cpu": "rlk_expf (Cody-Waite, fp32 fma)",
    "sm90": "ex2.approx.ftz.f32 of the rounded product x*log2e",
    "gfx942": "v_exp_f32 of the rounded product x*log2e",
}
_LOG = {
    "cpu": "rlk_logf (fp32 fma)",
    "sm90": "logf of the CUDA math library",
    "gfx942": "v_log_f32 with two-term ln2 correction",
}
KEY_BLOCK = {"cpu": 32, "sm90": 128, "gfx942": 64}
_ELEMENTWISE = "fp32 add/mul/div/sqrt rounded separately (no contraction)"


def attention_variant(family: str) -> str:
    """The attention arithmetic of this process: ``blocks`` everywhere, or ``fa3`` on sm90 by RLK_SM90_ATTENTION.

    Raises:
        ContractError: the variable holds another name.
    """
    if family != "sm90":
        return "blocks"
    variant = os.environ.get("RLK_SM90_ATTENTION", "blocks")
    if variant not in ("blocks", "fa3"):
        raise ContractError(f"RLK_SM90_ATTENTION={variant!r} must be blocks or fa3")
    return variant


def choose_attention(variant: str) -> None:
    """Make ``variant`` (``blocks`` or ``fa3``) the sm90 attention of this process and of those it starts.

    Call it before the first operator runs.

    Raises:
        ContractError: ``variant`` is another name.
    """
    if variant not in ("blocks", "fa3"):
        raise ContractError(f"attention={variant!r} must be blocks or fa3")
    os.environ["RLK_SM90_ATTENTION"] = variant


_FA3 = OpContract(
    inputs="one query head of one token, keys and values at positions 0..p of its sequence",
    partition="keys in blocks of the library's tile from absolute position 0, no split",
    merge="blocks descending, online (m, l, o) with a running accumulator",
    precision="bfloat16 q, k, v; fp32 scores and state",
    rounding="P to bfloat16 before P@V, the output once",
    primitives=("FlashAttention-3 forward, num_splits=1, as probed at start-up",),
    parameters={"variant": "fa3"},
)


def _ops(family: str, virtual_tp: int, dtype: str, attention: str) -> dict[str, OpContract]:
    dot, exp, log = _DOT[family], _EXP[family], _LOG[family]
    vocab_block = {} if family == "cpu" else {"vocab_block": VOCAB_BLOCK}
    to_dtype = f"once, to {dtype}"
    return {
        "linear": OpContract(
            inputs="row of x, row of weight",
            partition=f"K_global in {virtual_tp} equal segments when row-parallel, one segment otherwise",
            merge="inside a segment ascending k; segments, then ranks, in one balanced binary tree",
            precision=f"{dtype} inputs, fp32 accumulators and partial results",
            rounding=to_dtype + ", after the root of the tree (fp32 output: never)",
            primitives=dot,
            parameters={"segments": virtual_tp},
        ),
        "linear_backward": OpContract(
            inputs="dX: row of dY, all rows of weight; dW: column of dY, column of x",
            partition=f"dX of a column-parallel weight: N_global in {virtual_tp} segments; dW: all tokens of the batch",
            merge="ascending inside a segment; segments, then ranks, in one balanced binary tree",
            precision=f"{dtype} inputs, fp32 accumulators",
            rounding=to_dtype,
            primitives=("single accumulator fma, ascending",) if family == "cpu" else dot,
            parameters={"segments": virtual_tp},
        ),
        "rms_norm": OpContract(
            inputs="one row (and its residual), the weight",
            partition="the hidden dimension of one row",
            merge="one fixed order per hidden size, whatever the launch shape",
            precision=f"{dtype} in and out, fp32 inside; weight read in its storage dtype {dtype}",
            rounding="the residual sum once, the output once; (x * rstd) * weight in fp32",
            primitives=(*(dot if family == "cpu" else ("binary tree of squares",)), _ELEMENTWISE),
        ),
        "rope": OpContract(
            inputs="one head of one token, its position",
            partition="none",
            merge="none",
            precision="fp32 inside, cos/sin fp32 table built in float64",
            rounding=to_dtype,
            primitives=(_ELEMENTWISE,),
        ),
        "attention": _FA3
        if attention == "fa3"
        else OpContract(
            inputs="one query head of one token, keys and values at positions 0..p of its sequence",
            partition=f"keys in blocks of {KEY_BLOCK[family]} from absolute position 0"
            + ("" if family == "cpu" else ", each with its own maximum and fresh accumulators"),
            merge="blocks ascending, online (m, l, o)",
            precision=f"{dtype} q, k, v; fp32 scores and state",
            rounding=f"P to {dtype} before P@V, the output once"
            + (
                ""
                if family == "cpu"
                else "; l sums the rounded P by the same matrix instruction; a block enters (l, o) by one fma"
            ),
            primitives=(*dot, exp, log, _ELEMENTWISE)
            if family == "cpu"
            else (*dot, "exp2 of fma(score, scale*log2e, -block maximum)", "log2", _ELEMENTWISE),
            parameters={"key_block": KEY_BLOCK[family]},
        ),
        "swiglu": OpContract(
            inputs="one gate and one up element",
            partition="none",
            merge="none",
            precision=f"{dtype} in and out, fp32 inside",
            rounding=to_dtype,
            primitives=(exp, _ELEMENTWISE),
        ),
        "embedding": OpContract(
            inputs="one row of the table",
            partition="none",
            merge="ranks: exact (one summand is not zero)",
            precision=dtype,
            rounding="none; -0.0 becomes +0.0",
            primitives=("gather",),
        ),
        "lm_head": OpContract(
            inputs="row of hidden states, row of weight",
            partition="K in one segment",
            merge="ascending k",
            precision=f"{dtype} inputs, fp32 accumulator and logits",
            rounding="none",
            primitives=dot,
        ),
        "logp": OpContract(
            inputs="all columns below global_vocab_size of one row of fp32 logits, the target",
            partition=f"leaves of {VOCAB_LEAF} columns of the global vocabulary",
            merge="global maximum exact; columns of a leaf, then leaves, in one balanced binary tree",
            precision="fp32; one division by the temperature",
            rounding="none",
            primitives=(exp, log, _ELEMENTWISE),
            parameters={"leaf": VOCAB_LEAF},
        ),
        "linear_logp_backward": OpContract(
            inputs="one row of logits, its upstream gradients",
            partition=f"dH: padded vocabulary in {virtual_tp} segments; dW: all tokens of the batch",
            merge=(
                "ascending inside a segment"
                if family == "cpu"
                else f"{VOCAB_BLOCK}-column blocks of a segment ascending"
            )
            + "; segments, then ranks, in one balanced binary tree",
            precision=f"dlogits {dtype}, fp32 accumulators",
            rounding=(
                ("" if family == "cpu" else f"exp(logit - leaf maximum) once to {dtype}; ")
                + f"dlogits once to {dtype}; dH once to {dtype}; dW once or accumulated in fp32"
            ),
            primitives=(*dot, exp),
            parameters={"segments": virtual_tp, "leaf": VOCAB_LEAF, **vocab_block},
        ),
        "all_reduce": OpContract(
            inputs="the fp32 partial results of all ranks",
            partition="one payload a rank",
            merge="ranks in one balanced binary tree, the continuation of the segment tree",
            precision="fp32 payload",
            rounding=to_dtype,
            primitives=("fp32 add",),
        ),
    }


def contract_for(family: str, *, virtual_tp: int = 1, model_dtype: str = "bfloat16") -> Contract:
    """The contract of ``family``.

    Args:
        family: ``cpu``, ``sm90`` or ``gfx942``.
        virtual_tp: number S of segments of row-parallel reductions, a power of two up to 8. It must be a multiple of
            the tensor-parallel size of both engines; the larger of the two costs nothing extra.
        model_dtype: ``bfloat16`` or ``float32`` (cpu only).

    Raises:
        ContractError: a field is out of range.
    """
    if family not in _DOT:
        raise ContractError(f"family {family!r} has no contract; choose one of {', '.join(_DOT)}")
    if virtual_tp not in (1, 2, 4, 8):
        raise ContractError(f"virtual_tp={virtual_tp} must be 1, 2, 4 or {MAX_VIRTUAL_TP}")
    if model_dtype not in ("bfloat16", "float32"):
        raise ContractError(f"model_dtype={model_dtype!r} must be bfloat16 or float32")
    if model_dtype == "float32" and family != "cpu":
        raise ContractError(f"model_dtype=float32 is defined for the cpu family only, not for {family}; use bfloat16")
    return _build(family, virtual_tp, model_dtype, attention_variant(family))


@functools.lru_cache(maxsize=64)
def _build(family: str, virtual_tp: int, model_dtype: str, attention: str) -> Contract:
    return Contract(family, virtual_tp, model_dtype, _ops(family, virtual_tp, model_dtype, attention))


def fingerprint(family: str, *, virtual_tp: int = 1, model_dtype: str = "bfloat16") -> str:
    """Fingerprint of :func:`contract_for` with the same arguments."""
    return contract_for(family, virtual_tp=virtual_tp, model_dtype=model_dtype).fingerprint()


def require_equal(rollout: str, train: str) -> None:
    """Refuse to start a run whose engines keep different contracts.

    Raises:
        ContractError: the fingerprints differ.
    """
    if rollout != train:
        raise ContractError(
            f"contract fingerprints differ: rollout {rollout}, training {train}. Both engines need the same family, "
            "virtual_tp, model dtype and rl_kernel version; compare 'contract' of both sides in manifest.json"
        )


def padded_vocab_size(vocab_size: int, virtual_tp: int) -> int:
    """Smallest multiple of ``128 * virtual_tp`` that holds ``vocab_size``: shards of every TP size nest in it."""
    step = VOCAB_LEAF * virtual_tp
    return (vocab_size + step - 1) // step * step
