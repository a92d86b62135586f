"""Ranks agree on the layout of the vocabulary once for each shard on accelerators, at every call on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rl_kernel.ops.logp import shards


class Group:
    def size(self) -> int:
        return 2


@pytest.fixture
def asked(monkeypatch):
    """Two ranks whose second one has the columns after the first's; the list of headers that were exchanged."""
    headers = []

    def gather(header, group):
        headers.append(header.tolist())
        other = header.clone()
        other[0] = header[1]
        return torch.stack([header, other])

    monkeypatch.setattr(shards, "gather_bytes", gather)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    return headers


@pytest.mark.parametrize("backend, times", [("nccl", 1), ("gloo", 3)])
def test_asked_once_on_accelerators(monkeypatch, asked, backend, times):
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    group = Group()
    found = [shards.vocab_layout(group, 0, 128, 250, rows, 64) for rows in (5, 7, 5)]
    assert len(asked) == times and len(set(found)) == 1 and found[0].borders == (0, 128, 256)


def test_another_shard_group_or_open_size_is_asked_again(monkeypatch, asked):
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    group, other = Group(), Group()
    for who, size, vocabulary in [(group, 128, 250), (group, 256, 500), (other, 128, 250), (group, 128, None)]:
        shards.vocab_layout(who, 0, size, vocabulary, 5)
    assert len(asked) == 4
    shards.vocab_layout(group, 0, 128, None, 5)
    assert len(asked) == 5  # without global_vocab_size a rank cannot know that the others' shards have stayed


def test_a_real_group_can_be_remembered(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert shards._layouts.setdefault(group, {}) is shards._layouts[group]
        del shards._layouts[group]
    finally:
        dist.destroy_process_group()
