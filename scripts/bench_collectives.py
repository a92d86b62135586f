"""Times of the collectives between the GPUs of this machine, by one command.

    python scripts/bench_collectives.py [--ranks 2] [--out reports/collectives_h200] [--paths]

One process a GPU. Compared are the exchange through peer memory (the default path), the same call through NCCL's gather
and the local tree (the path across machines), and NCCL's own call, whose sum has no promised order. A row is the median
over graph replays of back-to-back calls, the slower rank's; every row's result is first compared, bit by bit, with the
reference. ``--paths`` also times every kernel of all_reduce at every size, which is where the limits in
rl_kernel/ops/collectives/peer.py come from. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from revision import revision

F32, BF16 = torch.float32, torch.bfloat16
KIB, MIB = 1 << 10, 1 << 20
SMALL = tuple(KIB << i for i in range(3, 11))  # 8 KiB to 1 MiB: decoding
LARGE = (16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB)  # training


def timed(run: Callable[[], object], calls: int, replays: int = 9) -> float:
    """Microseconds of one call: graphs of ``calls`` calls, median of ``replays``."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            run()
    together = torch.zeros(1, device="cuda")
    times = []
    for _ in range(replays + 1):
        dist.all_reduce(together)  # the ranks start together
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    del graph
    return sorted(times[1:])[replays // 2]


def eager(run: Callable[[], object], calls: int = 60) -> float:
    """Microseconds of one call without a graph: what the host adds."""
    for _ in range(5):
        run()
    dist.barrier()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    view = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return int((a.contiguous().view(view) != b.contiguous().view(view)).sum())


class Bench:
    """The rows of one rank."""

    def __init__(self, group: Any) -> None:
        from rl_kernel.ops import collectives
        from rl_kernel.ops.collectives import peer, reference

        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.collectives, self.peer, self.reference = collectives, peer, reference
        self.prepared = collectives.prepare(group)
        self.rows: list[dict[str, Any]] = []

    def gathering(self, run: Callable[[], object], calls: int) -> float:
        """``run`` through NCCL's gather."""
        known = self.peer._known[self.group.group_name]
        peers, known.peers = known.peers, None
        try:
            return timed(run, calls)
        finally:
            known.peers = peers

    def limited(self, run: Callable[[], object], calls: int, small: int, whole: int) -> float:
        peers = self.peer._known[self.group.group_name].peers
        assert peers is not None
        before, peers.limits = peers.limits, self.peer.Limits(small, whole)
        try:
            return timed(run, calls)
        finally:
            peers.limits = before

    def row(
        self, op: str, size: int, dtypes: str, run: Callable[[], torch.Tensor], expected: Callable[[], torch.Tensor],
        stock: Callable[[], object],
    ) -> dict[str, Any]:  # fmt: skip
        calls = 40 if size <= MIB else 4
        row: dict[str, Any] = {"op": op, "bytes": size, "dtypes": dtypes}
        row["differing"] = differing(run(), expected())
        if self.prepared:
            row["peer_us"] = timed(run, calls)
        row["gather_us"] = self.gathering(run, calls)
        row["nccl_us"] = timed(stock, calls)
        if size <= 64 * KIB:
            row["eager_us"], row["nccl_eager_us"] = eager(run), eager(stock)
        self.rows.append(row)
        return row

    def payload(self, rank: int, numel: int) -> torch.Tensor:
        generator = torch.Generator(device="cuda").manual_seed(rank)
        return torch.randn(numel, device="cuda", generator=generator)

    def total(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        parts = torch.stack([self.payload(r, numel) for r in range(self.ranks)])
        return self.reference.reduce_parts(parts, dtype)

    def all_reduce(self, size: int, out: torch.dtype, paths: bool) -> None:
        numel = size // 4
        x = self.payload(self.rank, numel)
        stock = x.to(out)

        def run() -> torch.Tensor:
            return self.collectives.all_reduce(x, self.group, out_dtype=out)

        names = f"fp32 -> {'fp32' if out == F32 else 'bf16'}"
        row = self.row(
            "all_reduce", size, names, run,
            lambda: self.total(numel, out), lambda: dist.all_reduce(stock, group=self.group),
        )  # fmt: skip
        if paths and self.prepared:
            calls = 40 if size <= MIB else 4
            everything = 1 << 60
            if size <= 256 * KIB:
                row["small_us"] = self.limited(run, calls, everything, 0)
            row["whole_us"] = self.limited(run, calls, 0, everything)
            row["sliced_us"] = self.limited(run, calls, 0, 0)

    def reduce_scatter(self, size: int) -> None:
        numel = size // 4
        x = self.payload(self.rank, numel)
        out = torch.empty(numel // self.ranks, device="cuda")

        def expected() -> torch.Tensor:
            return self.total(numel, BF16).view(self.ranks, -1)[self.rank]

        self.row(
            "reduce_scatter", size, "fp32 -> bf16",
            lambda: self.collectives.reduce_scatter(x, self.group, out_dtype=BF16), expected,
            lambda: dist.reduce_scatter_tensor(out, x, group=self.group),
        )  # fmt: skip

    def all_gather(self, size: int) -> None:
        numel = size // 2
        x = self.payload(self.rank, numel).to(BF16)
        out = torch.empty(self.ranks * numel, device="cuda", dtype=BF16)
        self.row(
            "all_gather", size, "bf16",
            lambda: self.collectives.all_gather(x, self.group),
            lambda: torch.cat([self.payload(r, numel).to(BF16) for r in range(self.ranks)]),
            lambda: dist.all_gather_into_tensor(out, x, group=self.group),
        )  # fmt: skip

    def run(self, paths: bool) -> None:
        for size in (*SMALL, 2 * MIB, 4 * MIB, *LARGE):
            self.all_reduce(size, F32, paths)
        for size in (8 * KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB):
            self.all_reduce(size, BF16, False)
            self.reduce_scatter(size)
            self.all_gather(size // 2)
            torch.cuda.empty_cache()


def work(rank: int, ranks: int, store: str, paths: bool, result: str) -> None:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=device,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    assert dist.group.WORLD is not None
    bench = Bench(dist.group.WORLD)
    bench.run(paths)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, bench.rows)
    if rank == 0:
        rows = []
        for own in zip(*everyone, strict=True):  # the slower rank's time
            rows.append({
                key: max(other[key] for other in own) if key.endswith("_us") or key == "differing" else value
                for key, value in own[0].items()
            })  # fmt: skip
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        text = json.dumps({"rows": rows, "report": bench.collectives.report(), "nccl": nccl})
        Path(result).write_text(text, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def judge(row: dict[str, Any]) -> None:
    """At most NCCL's time to 1 MiB, and within 1.2 times of it above; no differing bit."""
    ours = row.get("peer_us", row["gather_us"])
    row["ratio"] = round(ours / row["nccl_us"], 3)
    row["limit"] = 1.0 if row["bytes"] <= MIB else 1.2
    row["status"] = "failure" if row["differing"] or row["ratio"] > row["limit"] else "pass"
    for key in list(row):
        if key.endswith("_us"):
            row[key] = round(row[key], 2)


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to use, one process each")
    parser.add_argument("--out", help="OUT.json and OUT.md; default: reports/collectives_<gpu>")
    parser.add_argument("--paths", action="store_true", help="also time every kernel of all_reduce")
    args = parser.parse_args()
    if not torch.cuda.is_available() or not 2 <= args.ranks <= torch.cuda.device_count():
        parser.error(f"--ranks {args.ranks} needs as many GPUs, at least 2; torch sees {torch.cuda.device_count()}")
    name = torch.cuda.get_device_name(0)
    out = args.out or f"reports/collectives_{re.sub('[^a-z0-9]+', '_', name.lower().removeprefix('nvidia '))}"
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "rows.json")
        mp.spawn(work, (args.ranks, os.path.join(folder, "store"), args.paths, result), nprocs=args.ranks)
        found = json.loads(Path(result).read_text(encoding="utf-8"))
    for row in found["rows"]:
        judge(row)
    head = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": revision(),
        "gpus": f"{args.ranks} x {name}",
        "torch": torch.__version__,
        "nccl": found["nccl"],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),  # noqa: UP017
    }
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    report = {**head, "collectives": found["report"], "rows": found["rows"]}
    Path(out + ".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# Collectives between the GPUs of one machine",
        "",
        *(f"- {key}: `{value}`" for key, value in head.items()),
    ]
    lines += [
        "",
        *(f"- group {key}: {value['path']} {value['reason'] or ''}" for key, value in found["report"].items()),
    ]
    lines += [
        "",
        "Microseconds; payload of one rank. gather: NCCL's all-gather and the local tree. ratio: ours to",
    ]
    lines += [
        "NCCL's own call on the result's dtype (all_reduce), fp32 (reduce_scatter), bf16 (all_gather).",
        "",
    ]
    columns = ["peer_us", "gather_us", "nccl_us", "ratio", "eager_us", "nccl_eager_us"]
    columns += ["small_us", "whole_us", "sliced_us"] if args.paths else []
    lines += ["| op | payload | dtypes | " + " | ".join(c.removesuffix("_us").replace("_", " ") for c in columns)
              + " | differing bits | status |", "|---|---|---|" + "---|" * (len(columns) + 2)]  # fmt: skip
    for row in found["rows"]:
        cells = [row["op"], size_name(row["bytes"]), row["dtypes"], *(str(row.get(c, "")) for c in columns)]
        lines.append(f"| {' | '.join(cells)} | {row['differing']} | {row['status']} |")
    Path(out + ".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
