"""Identity of a set of weights: one hash over Hugging Face names, dtypes, shapes and bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of ``tensor`` in row-major order (bit patterns: -0.0 and NaN payloads are kept)."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def content_hash(named: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """64 hex digits of the SHA-256 over the sorted ``(name, dtype, shape, bytes)``.

    Two engines hold the same weights if and only if the hashes of their full tensors under Hugging Face names agree.
    A tied output head is the embedding under a second name, so ``lm_head.weight`` must be left out when it is tied.
    """
    digest = hashlib.sha256()
    items = named.items() if isinstance(named, Mapping) else named
    for name, tensor in sorted(items, key=lambda item: item[0]):
        header = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{','.join(map(str, tensor.shape))}\0"
        digest.update(header.encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
