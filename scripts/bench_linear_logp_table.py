"""The tables of a report of ``bench_linear_logp.py``: OUT.md, and the page of notes' section on where it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TITLE = "# linear_logp beside its peers"
OURS = {"kept": "kept", "recompute": "recompute", "fused policy loss, 512 MiB": "fused loss"}
TARGETS = {"both": 1.15, "forward": 1.10}
Report = Mapping[str, Any]


def milliseconds(x: float) -> str:
    return f"{x:.3f}" if x < 1 else f"{x:.2f}" if x < 10 else f"{x:.1f}"


def measured(report: Report) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(row["shape"], row["variant"]): row for row in report["rows"] if "both_queued_ms" in row}


def shapes(report: Report) -> list[str]:
    return list(dict.fromkeys(row["shape"] for row in report["rows"]))


def label(report: Report, shape: str) -> str:
    size = report.get("shapes", {}).get(shape)
    return f"{shape}: {' x '.join(map(str, size))}" if size else shape


def spread(row: Mapping[str, Any], name: str) -> str:
    turns = row.get(f"{name}_turns_ms", [])
    if len(turns) < 2:
        return ""
    return f", ±{50 * (max(turns) - min(turns)) / row[f'{name}_ms']:.1f} %"


def cell(row: Mapping[str, Any], name: str) -> str:
    if f"{name}_ms" not in row:
        return "-"
    ratios = f"{row[f'{name}_of_burst']:.2f}, {row[f'{name}_of_library']:.2f}"
    return f"{milliseconds(row[f'{name}_ms'])} ({ratios}{spread(row, name)})"


def memory(report: Report, row: Mapping[str, Any]) -> str:
    """MiB above the inputs, and above inputs and gradients."""
    text, size = f"{row['peak_mib']:.0f}", report.get("shapes", {}).get(row["shape"])
    if size:
        tokens, hidden, vocabulary = size
        text += f" / {row['peak_mib'] - 2 * hidden * (tokens + vocabulary) / 2**20:.0f}"
    return text


def figures(report: Report) -> Iterator[str]:
    """One table a shape, the fastest first."""
    for shape in shapes(report):
        rows = [row for row in report["rows"] if row["shape"] == shape]
        yield f"### {label(report, shape)}"
        yield ""
        if one := next((row for row in rows if row.get("library_ms")), None):
            yield (
                f"Plain cuBLAS products, queued: logits {milliseconds(one['library_forward_ms'])} ms, "
                f"all three {milliseconds(one['library_ms'])} ms."
            )
            yield ""
        yield "| what | gradient | forward, queued | latency | both, queued | latency | MiB | turns | status |"
        yield "|---|---|---|---|---|---|---|---|---|"
        rows.sort(key=lambda row: row.get("both_queued_ms", float("inf")))
        for row in rows:
            name = f"**{row['variant']}**" if row["variant"] in OURS else row["variant"]
            status = row.get("status", "pass")
            status += f": {row['reason']}" if "reason" in row else "" if "both_queued_ms" in row else ": not reached"
            status += f" (later: {row['later']})" if "later" in row else ""
            peak = memory(report, row) if "peak_mib" in row else "-"
            names = ("forward_queued", "forward_latency", "both_queued", "both_latency")
            yield (
                f"| {name} | {row.get('gradient', '')} | {' | '.join(cell(row, name) for name in names)} | {peak} | "
                f"{row.get('turns', '-')} | {status.replace('|', '/')} |"
            )
        yield ""


def verdict(ours: Mapping[str, Any], other: Mapping[str, Any], name: str) -> str:
    """Time of ours over another's, with the range over the turns taken together."""
    ratio = ours[f"{name}_ms"] / other[f"{name}_ms"]
    a, b = (row.get(f"{name}_turns_ms", [row[f"{name}_ms"]]) for row in (ours, other))
    pairs = [x / y for x, y in zip(a, b)]
    if len(pairs) < 2:
        return f"{ratio:.3f}, one turn"
    low, high = min(pairs), max(pairs)
    word = "faster" if high < 1 else "slower" if low > 1 else "within the spread"
    return f"{ratio:.3f} ({low:.3f} to {high:.3f}): {word}"


def comparison(report: Report) -> Iterator[str]:
    """Ours over torch.compile and over the fastest peer, and over what cuBLAS needs for the products alone."""
    by = measured(report)
    yield "| shape | part | ours | ms | over torch.compile | fastest peer | over it |"
    yield "|---|---|---|---|---|---|---|"
    for shape in shapes(report):
        peers = [row for (s, variant), row in by.items() if s == shape and variant not in OURS]
        for variant, short in OURS.items():
            row = by.get((shape, variant))
            if row is None:
                continue
            for name, part in (("both_queued", "both"), ("forward_queued", "forward")):
                if f"{name}_ms" not in row:
                    continue
                compiled = by.get((shape, "torch.compile"))
                against = verdict(row, compiled, name) if compiled and f"{name}_ms" in compiled else "-"
                best = min((p for p in peers if f"{name}_ms" in p), key=lambda p: p[f"{name}_ms"], default=None)
                fastest = f"{best['variant']}, {milliseconds(best[f'{name}_ms'])} ms" if best else "-"
                over = verdict(row, best, name) if best else "-"
                cells = (shape, part, short, milliseconds(row[f"{name}_ms"]), against, fastest, over)
                yield f"| {' | '.join(cells)} |"


def targets(report: Report) -> Iterator[str]:
    by = measured(report)
    yield "| what | limit | method | rate | met | not met |"
    yield "|---|---|---|---|---|---|"
    kinds = [("both", variant, short) for variant, short in OURS.items()] + [("forward", "kept", "kept, forward")]
    for part, variant, short in kinds:
        for method in ("queued", "latency"):
            for rate in ("burst", "library"):
                key, limit = f"{part}_{method}_of_{rate}", TARGETS[part]
                have = [(s, by[s, variant][key]) for s in shapes(report) if key in by.get((s, variant), {})]
                if have:
                    met = ", ".join(f"{s} {x:.3f}" for s, x in have if x <= limit)
                    not_met = ", ".join(f"{s} {x:.3f}" for s, x in have if x > limit)
                    yield f"| {short} | {limit:.2f} | {method} | {rate} | {met or 'none'} | {not_met or 'none'} |"


def facts(report: Report) -> Iterator[str]:
    keys = ("command", "commit", "card", "date", "backend", "seconds", "rest_s", "cublas_tflops")
    for key in keys:
        if key in report:
            yield f"- {key.replace('_', ' ')}: `{report[key]}`"
    yield f"- versions: {', '.join(f'{k} {v}' for k, v in report.get('versions', {'torch': report['torch']}).items())}"


READING = """Milliseconds; in brackets the ratio to the roofline of 2 THV (forward), 6 THV or, where logits are made
again in the backward pass, 8 THV (both: forward and backward), at the burst's rate and at the rate of the plain cuBLAS
products of the shape, then half the range of the turns. Queued: calls follow each other, as in training; latency: a
wait after each. MiB: peak above the inputs, with and without the gradients. torch, QuACK and Liger's Triton path round
the logits to bf16; none of the peers keeps the contract, and only verl makes the entropy, as ours does. "recompute"
has a workspace too small for all logits: 64 MiB at T1, 128 at T2, else 512; it keeps those of the columns
that fit, so that it makes fewer than 8 THV and is held against 8 all the same."""


def markdown(report: Report) -> str:
    notes = {row["variant"]: row["note"] for row in report["rows"] if row.get("note")}
    lines = [TITLE, "", *facts(report), "", READING, "", "## Ours over the others", ""]
    lines += [
        *comparison(report),
        "",
        "Over: time of ours by time of the other, queued; below 1 ours is faster. In brackets",
    ]
    lines += [
        "the range over the turns: where it holds 1, no one is called faster.",
        "",
        "## Targets",
        "",
        *targets(report),
    ]
    lines += ["", "## Figures", "", *figures(report)]
    if notes:
        lines += ["Peers: " + "; ".join(f"{name}: {note}" for name, note in notes.items()) + "."]
    return "\n".join(lines).rstrip() + "\n"


def write(out: str, report: Report) -> None:
    """OUT.json and OUT.md; refuses to write over a page that is not such a report."""
    page = Path(out + ".md")
    if page.exists() and not page.read_text(encoding="utf-8").startswith(TITLE):
        raise SystemExit(f"--out {out}: {page} is no report of this script; name another")
    Path(out + ".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    page.write_text(markdown(report), encoding="utf-8")
