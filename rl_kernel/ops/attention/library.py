"""FlashAttention-3's forward with one split, as the attention of the sm90 contract's ``fa3`` variant.

With ``num_splits=1`` this library merges key blocks of a row in one fixed order wherever the row is computed, so
packed prefill, chunked prefill, paged decode and head shards agree; with its own heuristic a decode call splits and
does not. Its bits are not those of our own kernel (it walks the keys downwards with a running accumulator), so the two
are different contracts: ``RLK_SM90_ATTENTION=fa3`` chooses this one for a process, the fingerprint shows it, and the
``blocks`` kernel refuses to serve such a process. The library comes with vLLM's wheel; it has no backward there, so
its output is paired with our deterministic backward.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from rl_kernel.contract import attention_variant
from rl_kernel.ops.attention import triton as own
from rl_kernel.registry import Request


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    if request.family != "sm90":
        return f"FlashAttention-3 is a backend of sm90 only, not of {request.family}"
    if request.dtype is not torch.bfloat16:
        return f"{request.op}: GPU families define bfloat16 attention only, not {request.dtype}"
    if attention_variant(request.family) != "fa3":
        return "the attention contract of this process is 'blocks'; set RLK_SM90_ATTENTION=fa3 on both engines for this"
    return _load() or _probe()


def _candidates() -> list[Path]:
    paths = []
    if "RLK_FA3_LIBRARY" in os.environ:
        paths.append(Path(os.environ["RLK_FA3_LIBRARY"]))
    found = importlib.util.find_spec("vllm")  # finds the folder without importing it
    for folder in (found.submodule_search_locations or []) if found else []:
        paths += sorted(Path(folder, "vllm_flash_attn").glob("_vllm_fa3_C*.so"))
    return paths


@functools.cache
def _load() -> str | None:
    """Load the library; the reason when that fails."""
    try:
        torch.ops._vllm_fa3_C.fwd  # noqa: B018 - loaded already?
        return None
    except (AttributeError, RuntimeError):
        pass
    paths = _candidates()
    if not paths:
        return "FlashAttention-3 is not installed: it comes with vLLM, or name its library in RLK_FA3_LIBRARY"
    try:
        torch.ops.load_library(str(paths[0]))
        torch.ops._vllm_fa3_C.fwd  # noqa: B018
    except (OSError, AttributeError, RuntimeError) as error:
        return f"{paths[0]} cannot be loaded: {error}"
    unknown = {"q", "k", "v", "out", "num_splits", "seqused_k", "page_table"} - set(_names())
    return f"{paths[0]} has another interface (no {', '.join(sorted(unknown))})" if unknown else None


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(argument.name for argument in torch.ops._vllm_fa3_C.fwd.default._schema.arguments)


# Told that no sequence has more than one query, the library drops the causal mask and may take a wider key tile for it.
_TWO = 2
_NEUTRAL = {
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "num_splits": 1,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


def _call(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values = {**_NEUTRAL, **given}
    out = torch.ops._vllm_fa3_C.fwd(*(values.get(name) for name in _names()))
    return out[0], out[1]


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of packed sequences; arguments and result as in ``triton.varlen_forward``."""
    if q.shape[0] == 0:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    out, lse = _call(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_q if cu_k is None else cu_k,
        max_seqlen_q=max(q.shape[0], _TWO),
        max_seqlen_k=k.shape[0],
        softmax_scale=q.shape[2] ** -0.5 if scale is None else scale,
    )
    return out, lse.t().contiguous()


def paged_forward(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None = None,
    *,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode and chunked prefill over a paged cache; arguments and result as in ``triton.paged_forward``."""
    if q.shape[0] == 0:
        return torch.empty_like(q) if out is None else out
    keys = block_table.shape[1] * k_cache.shape[1]
    return _call(
        q=q,
        k=k_cache,
        v=v_cache,
        out=out,
        cu_seqlens_q=cu_q,
        seqused_k=seq_lens,
        max_seqlen_q=max(max_query_len or q.shape[0], _TWO),
        max_seqlen_k=min(keys, max_seq_len or keys),
        page_table=block_table,
        softmax_scale=q.shape[2] ** -0.5 if scale is None else scale,
    )[0]


varlen_backward = own.varlen_backward


@functools.cache
def _probe() -> str | None:
    """Prefill against paged decode and chunks on random data, once a process."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    lengths, page = [1000, 333, 64], 16
    starts = [0, 1000, 1333, 1397]
    q, k, v = (
        torch.randn(starts[-1], heads, 128, device="cuda", generator=generator).to(torch.bfloat16)
        for heads in (32, 8, 8)
    )
    whole, _ = varlen_forward(q, k, v, torch.tensor(starts, device="cuda", dtype=torch.int32))
    pages = [-(-n // page) for n in lengths]
    cache = torch.zeros((2, sum(pages), page, 8, 128), dtype=q.dtype, device="cuda")
    table = torch.zeros((3, max(pages)), dtype=torch.int32, device="cuda")
    first = 0
    for i, n in enumerate(lengths):
        table[i, : pages[i]] = torch.arange(first, first + pages[i], device="cuda")
        for side, x in enumerate((k, v)):
            cache[side, first : first + pages[i]].view(-1, 8, 128)[:n] = x[starts[i] : starts[i + 1]]
        first += pages[i]
    differing = 0
    for new in ([1, 1, 1], [1, 40, 1], [200, 1, 64]):
        rows = torch.cat([torch.arange(starts[i + 1] - n, starts[i + 1], device="cuda") for i, n in enumerate(new)])
        cu = torch.tensor([0, *new], device="cuda").cumsum(0).to(torch.int32)
        used = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        got = paged_forward(q[rows], cache[0], cache[1], table, cu, used)
        differing += int((got.view(torch.int16) != whole[rows].view(torch.int16)).sum())
    return (
        f"this build of FlashAttention-3 differs between prefill and decode ({differing} elements)"
        if differing
        else None
    )
