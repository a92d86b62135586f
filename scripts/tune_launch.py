"""Regenerate rl_kernel/launch_tables/<family>.json by measurement on the GPU at hand.

    python scripts/tune_launch.py --out DIR [--only linear,attention] [--write]

Every candidate is checked for equal bits with the first one, timed over rotating weights in a CUDA graph, and the
fastest of each size class is taken (geometric mean over the shapes). ``--write`` replaces the table of this family. A
table changes speed and never bits, so a new one needs no new contract. ``--warm I/N`` only compiles every N-th
candidate: run N such processes first to fill Triton's cache in parallel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from rl_kernel import triton_utils

BF16 = torch.bfloat16
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
ANY = 1 << 62
SIZES: list[int] = []
Case = tuple[str, int, dict[str, int], Callable[[], object], Callable[[], torch.Tensor]]


def timed(run: Callable[[], object], repeats: int = 5) -> float:
    """Microseconds of one call of ``run`` under graph replay, median of ``repeats``."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def linear_candidates(m: int) -> Iterator[dict[str, int]]:
    """Launch rows worth trying at M rows."""

    def row(bm: int, bn: int, bk: int, warps: int, stages: int, swap: int = 0, split: int = 0) -> dict[str, int]:
        return {
            "BM": bm, "BN": bn, "BK": bk, "warps": warps, "stages": stages, "swap": swap, "group": 8, "split": split
        }  # fmt: skip

    if m <= 64:
        tile = max(16, triton_utils.next_power_of_2(m))
        for bn, bk, stages in ((16, 256, 4), (32, 128, 5), (32, 256, 4), (64, 128, 4)):
            yield row(tile, bn, bk, 4, stages, split=1)
        for bm, bk, stages in ((64, 128, 4), (64, 128, 6), (64, 256, 3), (128, 64, 5)):
            yield row(bm, tile, bk, 4, stages, swap=1, split=1)
    elif m <= 256:
        for bm, bn, bk, w, s in (
            (64, 64, 64, 4, 5), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 8, 4),
            (128, 32, 128, 4, 4), (128, 64, 128, 4, 3), (128, 64, 128, 8, 4),
        ):  # fmt: skip
            yield row(bm, bn, bk, w, s)
    else:
        for bm, bn, bk, w, s in (
            (128, 64, 128, 4, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 128, 8, 3),
            (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 256, 64, 8, 4)
        ):  # fmt: skip
            yield row(bm, bn, bk, w, s)


def linear_cases() -> Iterator[Case]:
    from rl_kernel.ops.linear import triton as op

    for upto, m in ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (512, 512), (1024, 1024), (ANY, 8192)):
        if SIZES and m not in SIZES:
            continue
        weights: dict[str, list[torch.Tensor]] = {}
        for name, (n, k) in SHAPES.items():
            copies = max(1, min(6, (256 << 20) // (2 * n * k)))
            weights[name] = [torch.randn(n, k, device="cuda").mul_(0.02).to(BF16) for _ in range(copies)]
        inputs = {name: torch.randn(m, SHAPES[name][1], device="cuda").to(BF16) for name in SHAPES}
        for candidate in linear_candidates(m):
            for name, group in weights.items():
                x = inputs[name]

                def run(x: torch.Tensor = x, group: list[torch.Tensor] = group) -> None:
                    for w in group:
                        op.matmul(x, w)

                yield f"linear/{name}/{len(group)}", upto, candidate, run, lambda x=x, w=group[0]: op.matmul(x, w)
    for upto, m in ((16, 16), (64, 64), (ANY, 4096)) if not SIZES else ():
        small = m <= 64
        inputs, weights = {}, {}
        for name in ("o", "down"):
            n, k = SHAPES[name]
            w = torch.randn(n, k, device="cuda").mul_(0.02).to(BF16)
            weights[name] = [w, *(w.clone() for _ in range(1 if m > 64 else 4))]
            inputs[name] = torch.randn(m, k, device="cuda").to(BF16)
        for candidate in linear_candidates(m) if small else (
            {"BM": 128, "BN": 64, "BK": 64, "warps": 8, "stages": 4, "swap": 0, "group": 8, "split": 0},
            {"BM": 128, "BN": 64, "BK": 64, "warps": 4, "stages": 4, "swap": 0, "group": 8, "split": 0},
            {"BM": 128, "BN": 128, "BK": 64, "warps": 8, "stages": 4, "swap": 0, "group": 8, "split": 1},
        ):  # fmt: skip
            for name in ("o", "down"):
                x, copies = inputs[name], weights[name]

                def run(x: torch.Tensor = x, group: list[torch.Tensor] = copies) -> None:
                    for weight in group:
                        op.matmul(x, weight, segments=4)

                yield (
                    f"linear_segments/{name}/{len(copies)}", upto, candidate, run,
                    lambda x=x, w=copies[0]: op.matmul(x, w, segments=4),
                )  # fmt: skip


def attention_cases() -> Iterator[Case]:
    from rl_kernel.ops.attention import hopper, triton_backward
    from rl_kernel.ops.attention import triton as op

    q, k, v = (torch.randn(8192, heads, 128, device="cuda").to(BF16) for heads in (32, 8, 8))
    cu = torch.tensor([0, 8192], dtype=torch.int32, device="cuda")
    for bm, warps, stages in ((128, 8, 2), (128, 8, 1), (64, 4, 2), (64, 4, 3), (256, 8, 1)):
        yield (
            "attention/8192/1", ANY, {"BM": bm, "warps": warps, "stages": stages},
            lambda: op.portable_forward(q, k, v, cu, cu), lambda: op.portable_forward(q, k, v, cu, cu)[0],
        )  # fmt: skip
    out, lse = op.varlen_forward(q, k, v, cu)
    arguments = (torch.randn_like(q), q, k, v, out, lse, cu, cu, 128**-0.5, 4)
    for name, rows in (
        ("dkdv", ((64, 128, 8, 2), (64, 128, 8, 1), (32, 128, 8, 2), (64, 64, 4, 2), (64, 128, 4, 1))),
        ("dq", ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2))),
    ):
        for bm, bn, warps, stages in rows:
            yield (
                f"attention_{name}/8192/1", ANY, {"BM": bm, "BN": bn, "warps": warps, "stages": stages},
                lambda: triton_backward.portable(*arguments),
                lambda: torch.cat([x.flatten() for x in triton_backward.portable(*arguments)]),
            )  # fmt: skip
    faster = hopper.module(q.device, "backward")
    if not isinstance(faster, str):
        for name, candidates in (
            ("dkdv", ({"stages": 2}, {"stages": 3})),
            ("dq", ({"BN": 128, "stages": 2}, {"BN": 64, "stages": 3}, {"BN": 64, "stages": 4})),
        ):
            for candidate in candidates:
                yield (
                    f"attention_{name}_sm90/8192/1", ANY, candidate, lambda: faster.backward(*arguments),
                    lambda: torch.cat([x.flatten() for x in faster.backward(*arguments)]),
                )  # fmt: skip
    batch, context, page = 64, 4096, 16
    table = torch.randperm(batch * context // page, device="cuda").view(batch, -1).to(torch.int32)
    caches = torch.randn(2, batch * context // page, page, 8, 128, device="cuda").to(BF16)
    one = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    token = torch.randn(batch, 32, 128, device="cuda").to(BF16)

    def decode() -> torch.Tensor:
        return op.paged_forward(token, caches[0], caches[1], table, one, lens, max_query_len=1)

    for warps, stages in ((4, 2), (4, 3), (2, 2), (2, 3), (8, 2), (4, 4)):
        yield (
            "attention_decode/64x4096/1",
            ANY,
            {"BM": 16, "warps": warps, "stages": stages, "blocks": 8},
            decode,
            decode,
        )


def logp_cases() -> Iterator[Case]:
    from rl_kernel.ops.logp import triton as op

    x = torch.randn(4096, 151936, device="cuda")
    for leaves, warps in ((8, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8), (64, 8), (4, 1)):
        yield (
            "logp/4096x151936/1", ANY, {"leaves": leaves, "warps": warps},
            lambda: op.leaf_stats(x, None, 151936), lambda: op.leaf_stats(x, None, 151936),
        )  # fmt: skip


def elementwise_cases() -> Iterator[Case]:
    from rl_kernel.ops.rms_norm import triton as norm
    from rl_kernel.ops.rope import triton as rope
    from rl_kernel.ops.swiglu import triton as swiglu

    x, r, w = (torch.randn(*s, device="cuda").to(BF16) for s in ((8192, 4096), (8192, 4096), (4096,)))
    for op, residual in (("rms_norm", None), ("add_rms_norm", r)):
        for block, warps in ((4096, 4), (4096, 8), (4096, 2), (8192, 4), (8192, 8), (16384, 8)):

            def run(residual: torch.Tensor | None = residual) -> torch.Tensor:
                return norm.forward(x, w, 1e-6, residual)[0]

            for pdl in (0, 1, 2):
                yield f"{op}/4096/1", ANY, {"block": block, "warps": warps, "pdl": pdl}, run, run
    q, head = torch.randn(8192, 32, 128, device="cuda").to(BF16), torch.randn(128, device="cuda").to(BF16)
    position, cache = torch.arange(8192, device="cuda"), torch.randn(8192, 128, device="cuda")

    def turned() -> torch.Tensor:
        return rope.qk_norm_forward(q, q[:, :8], head, head, 1e-6, position, cache)[0]

    for tokens, block, warps in ((1, 2048, 4), (1, 4096, 4), (1, 1024, 1), (2, 512, 1), (4, 512, 1), (8, 512, 4)):
        row = {"tokens": tokens, "block": block, "warps": warps}
        yield "rope/128/1", ANY, row, lambda: rope.forward(q, position, cache), lambda: rope.forward(q, position, cache)
    for tokens, rows, warps, pdl in (
        (1, 8, 1, 0),
        (1, 8, 1, 1),
        (1, 8, 1, 2),
        (1, 4, 1, 2),
        (1, 8, 2, 2),
        (2, 8, 4, 2),
    ):
        row = {"tokens": tokens, "rows": rows, "warps": warps, "least": 2048, "most": 6144 * warps, "pdl": pdl}
        yield "qk_norm_rope/128/1", ANY, row, turned, turned
    g = torch.randn(8192, 24576, device="cuda").to(BF16)
    for block, warps in ((1024, 4), (2048, 4), (4096, 8), (1024, 2), (4096, 4)):
        row = {"block": block, "warps": warps}
        yield "swiglu/12288/1", ANY, row, lambda: swiglu.forward(g), lambda: swiglu.forward(g)
    dy = torch.randn(8192, 12288, device="cuda").to(BF16)
    for block, warps in ((2048, 8), (2048, 4), (4096, 8), (1024, 4)):
        row = {"block": block, "warps": warps}
        yield "swiglu_backward/12288/1", ANY, row, lambda: swiglu.backward(dy, g), lambda: swiglu.backward(dy, g)


GROUPS = {
    "elementwise": elementwise_cases, "linear": linear_cases, "attention": attention_cases, "logp": logp_cases,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--sizes", default="", help="only these M of linear, for example 128,512 (no table is written)")
    parser.add_argument("--warm")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    SIZES.extend(int(x) for x in args.sizes.split(",") if x)
    torch.manual_seed(0)
    index, count = (int(x) for x in args.warm.split("/")) if args.warm else (0, 1)
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    first: dict[tuple[str, int], torch.Tensor] = {}
    cases = itertools.chain.from_iterable(GROUPS[name]() for name in args.only.split(","))
    for number, (label, upto, candidate, run, result) in enumerate(cases):
        if number % count != index:
            continue
        op, shape, calls = label.split("/")
        with triton_utils.override_launch(op, candidate):
            try:
                value = result()
                if args.warm:
                    continue
                reference = first.setdefault((label, upto), value)
                if reference.shape == value.shape and not torch.equal(reference, value):
                    raise SystemExit(f"{label} {candidate}: bits differ from the first candidate's")
                micros = timed(run) / int(calls)
            except (RuntimeError, triton_utils.triton.runtime.errors.OutOfResources) as error:
                print(label, candidate, "failed:", str(error).splitlines()[0], flush=True)
                micros = math.inf
        key = json.dumps(candidate)
        found.setdefault((op, upto), {}).setdefault(key, []).append(micros)
        print(f"{label} upto {upto if upto < ANY else 'any'} {key}: {micros:.1f} us", flush=True)
    if args.warm or SIZES:
        return
    family = "gfx942" if triton_utils.is_hip() else "sm90"
    table = {op: list(rows) for op, rows in triton_utils.launch_table(family).items()}
    for op in {op for op, _ in found}:
        table[op] = []
        for (name, upto), rows in found.items():
            if name == op:
                best = min(rows, key=lambda key: math.prod(rows[key]) ** (1 / len(rows[key])))
                table[op].append({"upto": upto, **json.loads(best)})
    text = "{\n" + ",\n".join(
        f'  "{op}": [\n' + ",\n".join("    " + json.dumps(row) for row in rows) + "\n  ]" for op, rows in table.items()
    ) + "\n}\n"  # fmt: skip
    Path(args.out, f"launch_{family}.json").write_text(text, encoding="utf-8")
    if args.write:
        Path(triton_utils.__file__).with_name("launch_tables").joinpath(f"{family}.json").write_text(text)


if __name__ == "__main__":
    main()
