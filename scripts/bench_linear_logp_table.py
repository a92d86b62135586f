"""The tables of a report of ``bench_linear_logp.py``: OUT.md, and the page of notes' section on where it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TITLE = "# linear_logp beside its peers"
OURS = {"kept": "kept", "recompute": "recompute", "fused policy loss, 512 MiB": "fused loss"}
METHODS = ("queued", "sustained", "latency")
TARGETS = {"both": 1.15, "forward": 1.10}
Report = Mapping[str, Any]


def milliseconds(x: float) -> str:
    return f"{x:.3f}" if x < 1 else f"{x:.2f}" if x < 10 else f"{x:.1f}"


def star(row: Mapping[str, Any], name: str) -> str:
    """Marks a figure of calls too long for the clock after a rest."""
    return "" if row.get(f"{name}_cold", True) else "*"


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
    rates = [row[key] for of in ("burst", "library") if (key := f"{name}_of_{of}") in row]
    ratios = ", ".join(f"{x:.2f}" for x in rates)
    return f"{milliseconds(row[f'{name}_ms'])}{star(row, name)} ({ratios}{spread(row, name)})"


def memory(report: Report, row: Mapping[str, Any]) -> str:
    """MiB above the inputs, and above inputs and gradients."""
    text, size = f"{row['peak_mib']:.0f}", report.get("shapes", {}).get(row["shape"])
    if size:
        tokens, hidden, vocabulary = size
        text += f" / {row['peak_mib'] - 2 * hidden * (tokens + vocabulary) / 2**20:.0f}"
    return text


def plain(report: Report, row: Mapping[str, Any]) -> Iterator[str]:
    """Times of the plain products of a row's shape."""
    times = report.get("library", {}).get(row["shape"], {})
    for method, infix in (("queued", ""), ("sustained", "_sustained")):
        forward, both = (row.get(f"library{part}{infix}_ms") for part in ("_forward", ""))
        if forward and both:
            stars = [star(times, f"{part}_{method}") for part in ("forward", "both")]
            yield (
                f"{method}: logits {milliseconds(forward)}{stars[0]} ms, all three {milliseconds(both)}{stars[1]} ms"
            )


def figures(report: Report) -> Iterator[str]:
    """One table a shape, the fastest first."""
    for shape in shapes(report):
        rows = [row for row in report["rows"] if row["shape"] == shape]
        yield f"### {label(report, shape)}"
        yield ""
        if one := next((row for row in rows if row.get("library_ms")), None):
            yield f"Plain cuBLAS products, {', '.join(plain(report, one))}."
            yield ""
        heads = ("forward, queued", "sustained", "latency", "both, queued", "sustained", "latency")
        yield f"| what | gradient | {' | '.join(heads)} | MiB | turns | status |"
        yield "|---|---|---|---|---|---|---|---|---|---|---|"
        rows.sort(key=lambda row: row.get("both_queued_ms", float("inf")))
        for row in rows:
            name = f"**{row['variant']}**" if row["variant"] in OURS else row["variant"]
            status = row.get("status", "pass")
            status += f": {row['reason']}" if "reason" in row else "" if "both_queued_ms" in row else ": not reached"
            status += f" (later: {row['later']})" if "later" in row else ""
            peak = memory(report, row) if "peak_mib" in row else "-"
            names = [f"{part}_{method}" for part in ("forward", "both") for method in METHODS]
            yield (
                f"| {name} | {row.get('gradient', '')} | {' | '.join(cell(row, name) for name in names)} | {peak} | "
                f"{row.get('turns', '-')} | {status.replace('|', '/')} |"
            )
        yield ""


def verdict(ours: Mapping[str, Any], other: Mapping[str, Any], name: str) -> str:
    """Time of ours over another's, with the range over the turns taken together."""
    ratio = ours[f"{name}_ms"] / other[f"{name}_ms"]
    if star(ours, name) or star(other, name):
        return f"{ratio:.3f}, clocks mixed"
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
    names = [f"{part}_{method}" for part in ("both", "forward") for method in ("queued", "sustained")]
    for shape in shapes(report):
        peers = [row for (s, variant), row in by.items() if s == shape and variant not in OURS]
        for variant, short in OURS.items():
            row = by.get((shape, variant))
            if row is None:
                continue
            for name in names:
                if f"{name}_ms" not in row:
                    continue
                compiled = by.get((shape, "torch.compile"))
                against = verdict(row, compiled, name) if compiled and f"{name}_ms" in compiled else "-"
                best = min((p for p in peers if f"{name}_ms" in p), key=lambda p: p[f"{name}_ms"], default=None)
                fastest = f"{best['variant']}, {milliseconds(best[f'{name}_ms'])}{star(best, name)} ms" if best else "-"
                over = verdict(row, best, name) if best else "-"
                ms = milliseconds(row[f"{name}_ms"]) + star(row, name)
                cells = (shape, name.replace("_", ", "), short, ms, against, fastest, over)
                yield f"| {' | '.join(cells)} |"


def targets(report: Report) -> Iterator[str]:
    by = measured(report)
    yield "| what | limit | method | rate | met | not met |"
    yield "|---|---|---|---|---|---|"
    kinds = [("both", variant, short) for variant, short in OURS.items()] + [("forward", "kept", "kept, forward")]
    for part, variant, short in kinds:
        for method in METHODS:
            for rate in ("burst", "library"):
                key, limit = f"{part}_{method}_of_{rate}", TARGETS[part]
                rows = [(s, by.get((s, variant), {})) for s in shapes(report)]
                have = [(s, row) for s, row in rows if key in row and not star(row, f"{part}_{method}")]
                if have:
                    texts = {s: f"{s} {row[key]:.3f}" for s, row in have}
                    met = ", ".join(texts[s] for s, row in have if row[key] <= limit)
                    not_met = ", ".join(texts[s] for s, row in have if row[key] > limit)
                    yield f"| {short} | {limit:.2f} | {method} | {rate} | {met or 'none'} | {not_met or 'none'} |"


def facts(report: Report) -> Iterator[str]:
    keys = (
        "command",
        "commit",
        "card",
        "date",
        "backend",
        "seconds",
        "rest_s",
        "stretch_ms",
        "sustained_s",
        "cublas_tflops",
    )
    for key in keys:
        if key in report:
            yield f"- {key.replace('_', ' ')}: `{report[key]}`"
    yield f"- versions: {', '.join(f'{k} {v}' for k, v in report.get('versions', {'torch': report['torch']}).items())}"


REGIMES = """Two clocks: a card that meets its power limit runs such products faster for some tens of milliseconds after
a rest than from then on (seen on an H200: linear_logp_sm90.md). `queued` is the time of calls after a rest that are
over within {stretch:.0f} ms; a star marks calls of which not even two are: their figure may mix the clocks, so it
counts neither as faster or slower nor among the targets. `sustained` is the time after {before:.2f} s of calls without
a pause, as in a training step that keeps the card busy."""

READING = """Milliseconds; in brackets the ratio to the roofline of 2 THV (forward), 6 THV or, where logits are made
again in the backward pass, 8 THV (both: forward and backward), at the burst's rate (not for sustained) and at the rate
of the plain cuBLAS products of the shape, then half the range of the turns. Queued, sustained: calls follow each other;
latency: a wait after each. MiB: peak above the inputs, with and without the gradients. torch, QuACK and Liger's Triton
path round the logits to bf16; none of the peers keeps the contract, and only verl makes the entropy, as ours does.
"recompute" has a workspace too small for all logits: 64 MiB at T1, 128 at T2, else 512; it keeps those of the columns
that fit, so that it makes fewer than 8 THV and is held against 8 all the same."""


def markdown(report: Report) -> str:
    notes = {row["variant"]: row["note"] for row in report["rows"] if row.get("note")}
    lines = [TITLE, "", *facts(report), ""]
    if "stretch_ms" in report:  # not so in older reports
        lines += [REGIMES.format(stretch=report["stretch_ms"], before=report["sustained_s"][0]), ""]
    lines += [READING, "", "## Ours over the others", ""]
    lines += [
        *comparison(report),
        "",
        "Over: time of ours by time of the other; below 1 ours is faster. In brackets",
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
    numbers = re.compile(r'\[\n([^\[\]{}"]*)\]')  # on one line
    text = numbers.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(report, indent=1))
    Path(out + ".json").write_text(text + "\n", encoding="utf-8")
    page.write_text(markdown(report), encoding="utf-8")
