"""What tests of linear_logp on Hopper have in common."""

from __future__ import annotations

import pytest
import torch

from tests.ops.gpu_harness import differing

# tokens, hidden, rows of the weight, global vocabulary
SHAPES = [(300, 512, 5120, 5003), (1000, 320, 40960, 40000), (129, 128, 1024, 777), (513, 1024, 20000, 20000)]


def need_hopper():
    """Skips the test module that calls this where linear_logp of csrc/sm90 cannot run."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200", allow_module_level=True)
    from rl_kernel import registry
    from rl_kernel.ops.linear_logp import sm90

    if missing := sm90.supports(registry.Request("linear_logp", "sm90", torch.bfloat16)):
        pytest.skip(missing, allow_module_level=True)


def operands(tokens, hidden, rows, vocabulary, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    w = torch.empty(rows, hidden, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02, generator=g)
    t = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=g)
    row = w[t].float()
    lift = torch.empty(tokens, 1, device="cuda").uniform_(0, 15, generator=g)
    h = torch.randn(tokens, hidden, device="cuda", generator=g) + lift * row / row.pow(2).sum(-1, keepdim=True)
    return h.bfloat16(), w, t


def assert_same(left, right):
    assert [differing(a, b) for a, b in zip(left, right, strict=True)] == [0] * len(left)
