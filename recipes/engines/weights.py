"""Identity of a set of weights: one hash over Hugging Face names, dtypes, shapes and bits, the same on every device.

The bits of a tensor enter through a 128-bit digest that is a pair of integer sums, so that a GPU computes it at memory
speed and in any order. Let ``w[i]`` be the bytes of the tensor in row-major order as little-endian 64-bit words, the
last one padded with zeros, and all arithmetic modulo 2**64 with logical shifts:

    z = w[i] ^ (i + 1) * G;  z = (z ^ z >> 30) * M1;  z = (z ^ z >> 27) * M2;  z = z ^ z >> 31
    y = (z ^ z >> 32) * M3;  y = y ^ y >> 29
    digest = (sum of z, sum of y)

``w -> z`` is one-to-one for every ``i``: a change of one word always changes the digest, and so do exchanged elements,
-0.0 for 0.0 and another NaN payload, except with a probability of about 2**-128. It is no protection against somebody
who looks for collisions.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterable, Mapping

import torch

TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
HASH_KIND = "sha256-of-sum128-v1"  # recorded beside a hash: two of different kinds do not compare

G, M1, M2, M3 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93
_WORDS = {"cpu": 1 << 15, "cuda": 1 << 23}  # per chunk: what one core keeps in its cache, or enough for a launch
log = logging.getLogger(__name__)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def words_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The 64-bit words of ``tensor`` as int64 [N], and one more [1] for the bytes that are left over."""
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return torch.empty(0, dtype=torch.int64, device=tensor.device), None
    flat = flat.view(torch.uint8)
    whole = flat.numel() // 8 * 8
    last = None
    if whole != flat.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        last[: flat.numel() - whole] = flat[whole:]
        last = last.view(torch.int64)
    body = flat[:whole]
    if body.storage_offset() % 8 or body.data_ptr() % 8:
        body = body.clone()
    return body.view(torch.int64), last


def _steps(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(G)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)  # >> of int64 copies the sign bit


def sums_torch(words: torch.Tensor, start: int = 0) -> torch.Tensor:
    """``(sum of z, sum of y)`` of ``words``, the first of which has index ``start``; int64 [2], in torch operations."""
    chunk = _WORDS.get(words.device.type, 1 << 20)
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    steps = _steps(min(chunk, words.numel()), words.device)
    for begin in range(0, words.numel(), chunk):
        part = words[begin : begin + chunk]
        z = steps[: part.numel()] + _signed((start + begin) * G)
        z ^= part
        for bits, factor in ((30, M1), (27, M2)):
            z ^= _shifted(z, bits)
            z *= _signed(factor)
        z ^= _shifted(z, 31)
        total[0] += z.sum()
        z ^= _shifted(z, 32)
        z *= _signed(M3)
        z ^= _shifted(z, 29)
        total[1] += z.sum()
    return total


@functools.cache
def _kernel() -> object | None:
    """The Triton kernel of the same sums: one pass instead of thirty. Without it the torch operations do the work."""
    try:
        from recipes.engines.digest_triton import sums_triton
    except ImportError as error:
        log.warning("weight digests are computed with torch operations, Triton cannot be imported: %s", error)
        return None
    return sums_triton


def sums(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of ``tensor`` as int64 [2] on its device; nothing waits for the device."""
    words, last = words_of(tensor)
    kernel = _kernel() if tensor.device.type == "cuda" else None
    total = kernel(words) if kernel is not None else sums_torch(words)  # type: ignore[operator]
    if last is not None:
        total = total + sums_torch(last, words.numel())
    return total


def digests(named: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    """16 bytes for each tensor; the device is waited for once."""
    return digests_of_sums({k: sums(v) for k, v in (named.items() if isinstance(named, Mapping) else named)})


def digests_of_sums(found: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The same from what :func:`sums` returned."""
    if not found:
        return {}
    table = torch.stack(list(found.values())).cpu().tolist()
    return {name: b"".join(v.to_bytes(8, "little", signed=True) for v in row) for name, row in zip(found, table)}


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def combined_hash(tensors: Mapping[str, tuple[tuple[int, ...], str]], found: Mapping[str, bytes]) -> str:
    """64 hex digits of the SHA-256 over the sorted ``(name, dtype, shape, digest)``.

    Args:
        tensors: shape and dtype by name.
        found: their digests.
    """
    digest = hashlib.sha256(HASH_KIND.encode() + b"\0")
    for name in sorted(tensors):
        shape, dtype = tensors[name]
        digest.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode())
        digest.update(found[name])
    return digest.hexdigest()


def content_hash(named: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """:func:`combined_hash` of tensors, on whatever device they are.

    Two engines hold the same weights if the hashes of their full tensors under Hugging Face names agree. A tied output
    head is the embedding under a second name, so ``lm_head.weight`` must be left out when it is tied.
    """
    tensors = dict(named)
    described = {name: (tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}
    return combined_hash(described, digests(tensors))
