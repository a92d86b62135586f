"""Two engines of different modes in one process: each call runs in the mode of its own engine."""

from __future__ import annotations

from typing import Any

import pytest

import rl_kernel
from recipes.actors import load

CALLS = [
    ("vllm:VllmEngine", "generate", ([], None, [])),
    ("vllm:VllmEngine", "update_weights", ({}, 0)),
    ("megatron:MegatronEngine", "forward_logp", (None,)),
    ("megatron:MegatronEngine", "forward_values", (None,)),
    ("megatron:MegatronEngine", "forward_backward", ([], None)),
    ("megatron:MegatronEngine", "optimizer_step", ()),
]


class Probe:
    """Stands for every attribute that a call may read first; reports the mode then."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(rl_kernel.get_mode())


@pytest.mark.parametrize(("engine", "call", "arguments"), CALLS, ids=[call for _, call, _ in CALLS])
@pytest.mark.parametrize("mode", ["strict", "fast", "native"])
def test_a_call_runs_in_the_mode_of_its_engine(engine: str, call: str, arguments: tuple, mode: str) -> None:
    pytest.importorskip("megatron.core")
    method = getattr(load(f"recipes.engines.{engine}"), call)
    with rl_kernel.set_mode("audit"):  # of an engine built later
        with pytest.raises(RuntimeError, match=f"^{mode}$"):
            method(Probe(mode), *arguments)
        assert rl_kernel.get_mode() == "audit"
