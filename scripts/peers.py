"""Other implementations of a language model's loss from hidden states, behind one signature, for the benchmarks.

Each is called through what its package offers to users; nothing of a package is imported before its ``load`` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.nn.functional as F  # noqa: N812

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
IGNORE = -100


@dataclass(frozen=True)
class Peer:
    """``load()`` gives f(hidden [T, H], weight [V, H], targets [T]) -> losses [T], or what the fields below say."""

    name: str
    distribution: str
    load: Callable[[], Call]
    operations: int  # THV multiply-adds of forward and backward, counted twice: 6, or 8 where logits are made again
    logp: bool = False  # returns log-probabilities instead of losses
    mean: bool = False  # returns the mean loss and takes one upstream gradient, not one a token
    multiple: int = 1  # of tokens; the rest is filled with ignored ones, before the clock starts
    note: str = ""

    def missing(self) -> str | None:
        """Why it cannot run here, as far as that shows without importing it."""
        try:
            metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return f"{self.distribution} is not installed (pip install {self.distribution})"
        return None


def torch_eager() -> Call:
    return lambda h, w, t: F.cross_entropy((h @ w.T).float(), t, reduction="none")


def torch_compile() -> Call:
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64  # one for each shape, with and without gradients
    return torch.compile(torch_eager(), dynamic=False)


def quack() -> Call:
    from quack.linear_cross_entropy import linear_cross_entropy_func

    return lambda h, w, t: linear_cross_entropy_func(h, w, None, t, ignore_index=IGNORE, reduction="none")


def quack_chunked() -> Call:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def call(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        # The default chunk is 4096 tokens. QuACK 0.6.5 refuses a chunk of H tokens where the vocabulary is a multiple
        # of 128, and then 2048 is what runs. Untuned: its tuner takes longer than the whole benchmark.
        chunk = 2048 if w.shape[1] == 4096 and w.shape[0] % 128 == 0 else 4096
        return chunked_linear_cross_entropy(
            h, w, t, chunk_size=chunk, ignore_index=IGNORE, reduction="mean", tuned=False
        )

    return call


def liger() -> Call:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE, reduction="none")
    return lambda h, w, t: loss(w, h, t)


def liger_cute() -> Call:
    import cutlass.cute  # noqa: F401 - what its kernel for sm90 is written in
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

    return lambda h, w, t: Function.apply(h, w, t, 1.0, IGNORE)


def cut_cross_entropy() -> Call:
    from cut_cross_entropy import linear_cross_entropy

    return lambda h, w, t: linear_cross_entropy(h, w, t, ignore_index=IGNORE, reduction="none")


def verl() -> Call:
    from verl.utils.kernel import kernels  # noqa: F401 - what the function below imports when it is called
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda h, w, t: linear_cross_entropy(h, w, t, 1.0, "none", None)[0]


# In the order in which they are measured: first what comes near.
PEERS = {
    "compile": Peer("torch.compile", "torch", torch_compile, 6, note="full logits in bf16"),
    "quack": Peer("QuACK, full logits", "quack-kernels", quack, 6, note="full logits in bf16"),
    "eager": Peer("torch eager", "torch", torch_eager, 6, note="full logits in bf16, their log-softmax in fp32"),
    "quack-chunked": Peer(
        "QuACK, chunked", "quack-kernels", quack_chunked, 6, mean=True, multiple=8, note="mean loss only"
    ),
    "liger-cute": Peer("Liger, CuTe for sm90", "liger-kernel", liger_cute, 8, note="logits made again in backward"),
    "liger": Peer("Liger, Triton", "liger-kernel", liger, 8, note="chunks; gradients made in backward"),
    "cce": Peer(
        "cut-cross-entropy", "cut-cross-entropy", cut_cross_entropy, 8, note="leaves out small gradients (its default)"
    ),
    "verl": Peer("verl, Triton", "verl", verl, 8, logp=True, note="makes the entropy too"),
}
