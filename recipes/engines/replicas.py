"""Training ranks that hold copies of one parameter must hold the same bits, after every update.

Data- and context-parallel ranks hold the same shards; under the contract, tensor-parallel ranks hold the same norm
weights. Copies that drift apart (a memory fault, a collective that did not reach a rank, a gradient that was summed in
another order) would train on without a word, since engines receive the weights of few ranks. So every rank digests its
own parameters where they are, one pass at memory speed, and the digests are compared by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from recipes.engines import weights


@dataclass(frozen=True)
class Digests:
    """Digests of one rank's parameters, by name: see :mod:`recipes.engines.weights`.

    ``sharded`` are the same on the ranks of one tensor-parallel rank, ``replicated`` on all ranks.
    """

    sharded: dict[str, bytes]
    replicated: dict[str, bytes]


@torch.no_grad()
def digest(parameters: Iterable[tuple[str, torch.Tensor, bool]]) -> Digests:
    """Digest ``(name, tensor, replicated)``; the device is waited for once."""
    listed = list(parameters)
    if listed and listed[0][1].is_cuda:
        torch.cuda.synchronize(listed[0][1].device)  # whatever stream wrote the weights
    found = weights.digests((name, tensor) for name, tensor, _ in listed)
    everywhere = {name for name, _, replicated in listed if replicated}
    return Digests(
        {name: value for name, value in found.items() if name not in everywhere},
        {name: value for name, value in found.items() if name in everywhere},
    )


def difference(ranks: Sequence[Digests], names: Sequence[str], tensor_parallel_size: int) -> str | None:
    """Which copies differ, in words; None where all agree.

    Args:
        ranks: by rank; ranks count tensor parallel first.
        names: of the ranks.
        tensor_parallel_size: ranks ``r`` and ``r + tensor_parallel_size`` hold the same shards.
    """
    groups = [list(range(first, len(ranks), tensor_parallel_size)) for first in range(tensor_parallel_size)]
    compared = [({rank: ranks[rank].sharded for rank in group}) for group in groups]
    compared.append({rank: found.replicated for rank, found in enumerate(ranks)})
    differing: list[tuple[str, dict[bytes, list[str]]]] = []
    for copies in compared:
        for name in dict.fromkeys(name for held in copies.values() for name in held):
            holders: dict[bytes, list[str]] = {}
            for rank, held in copies.items():
                holders.setdefault(held.get(name, b""), []).append(names[rank])
            if len(holders) > 1:
                differing.append((name, holders))
    if not differing:
        return None
    name, holders = differing[0]
    told = ", ".join(f"{value.hex()[:16] or 'nothing'} on {' and '.join(which)}" for value, which in holders.items())
    more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"{name} ({told}){more}"
