"""Eight real gloo processes that stay up for a whole test session and serve groups of 1, 2, 4 or 8 ranks.

Workers are forked from a server that has imported torch once, so eight of them start in about two seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

MAX_RANKS = 8
TIMEOUT_S = 300


def _serve(rank: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=MAX_RANKS,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3, 4, 8)}
    pipe.send("ready")
    while True:
        job = pipe.recv()
        if job is None:
            break
        size, function, args = job
        try:
            pipe.send((True, function(groups[size], *args)))
        except BaseException as error:  # noqa: BLE001 - carried to the parent
            pipe.send((False, f"rank {rank} of {size}: {error!r}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class RankPool:
    """``run(size, function, *args)`` calls ``function(group, *args)`` on ``size`` ranks; results in rank order."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "rl_kernel"])
        self._folder = tempfile.TemporaryDirectory(prefix="rlk-ranks-")
        store = os.path.join(self._folder.name, "store")
        self._workers = []
        for rank in range(MAX_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            self._workers.append((process, ours))
        for rank, (_, pipe) in enumerate(self._workers):
            if not pipe.poll(TIMEOUT_S) or pipe.recv() != "ready":
                self.close()
                raise RuntimeError(f"rank {rank} did not start in {TIMEOUT_S} s")

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        for _, pipe in self._workers[:size]:
            pipe.send((size, function, args))
        deadline = time.monotonic() + TIMEOUT_S
        results, failures = [], []
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} of {size} gave no result in {TIMEOUT_S} s")
            ok, value = pipe.recv()
            (results if ok else failures).append(value)
        if failures:
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        for process, pipe in self._workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
