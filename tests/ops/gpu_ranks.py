"""One process a GPU, with NCCL, that stays up for a test session and runs functions of the test modules."""

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

TIMEOUT_S = 150
_ENVIRONMENT = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # several ranks of one GPU must not queue behind each other
    "RLK_COLLECTIVES_TIMEOUT_S": "40",  # a rank that never arrives fails the test instead of holding it up
}


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    os.environ.update(_ENVIRONMENT)
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit, device_id=device
    )
    group = dist.new_group(list(range(size)))
    pipe.send("ready")
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, args = job
        try:
            result = function(group, *args)
            torch.cuda.synchronize()
            pipe.send((True, result))
        except BaseException as error:  # noqa: BLE001 - carried to the parent
            pipe.send((False, f"rank {rank} of {size}: {error!r}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class GpuRanks:
    """``run(function, *args)`` calls ``function(group, *args)`` on every rank; results in rank order."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="rlk-gpus-")
        store = os.path.join(self._folder.name, "store")
        self._workers = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            self._workers.append((process, ours))
        for rank, (_, pipe) in enumerate(self._workers):
            if not pipe.poll(TIMEOUT_S) or pipe.recv() != "ready":
                self.close()
                raise RuntimeError(f"rank {rank} did not start in {TIMEOUT_S} s")

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._workers:
            raise RuntimeError("the ranks were ended after an earlier failure")
        for _, pipe in self._workers:
            pipe.send((function, args))
        deadline = time.monotonic() + TIMEOUT_S
        results, failures = [], []
        for rank, (_, pipe) in enumerate(self._workers):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank} gave no result in {TIMEOUT_S} s")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, f"rank {rank} ended"
            (results if ok else failures).append(value)
        if failures:
            if any("no result" in text or "CUDA error" in text or "ended" in text for text in failures):
                self.close()  # ranks that disagree about the next collective are of no use
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        for process, pipe in self._workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(8)
            if process.is_alive():
                process.kill()
        self._workers = []
        self._folder.cleanup()
