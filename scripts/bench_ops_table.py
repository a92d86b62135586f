"""OUT.json and OUT.md of ``bench_ops.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def summary(report: Mapping[str, Any]) -> Iterator[str]:
    found, count = report["rows"], dict[str, int]()
    for row in found:
        count[row["status"]] = count.get(row["status"], 0) + 1
    yield "Rows: " + ", ".join(f"{n} {status}" for status, n in sorted(count.items())) + "."
    yield ""
    if report.get("unfinished"):
        yield "Parts that did not end: " + ", ".join(report["unfinished"]) + "."
        yield ""
    late = [row for row in found if row["status"] not in ("pass", "measured")]
    if late:
        yield "Not within a stated limit:"
        yield ""
        for row in late:
            why = row.get("reason") or f"{row.get('ratio')} of {row['reference']}, limit {row['limit'] or 0:.2f}"
            yield f"- {row['op']}, {row['shape']}, {row['backend']}: {why}"
        yield ""


def markdown(report: Mapping[str, Any], method: str) -> str:
    """``method``: how the times were taken."""
    keys = ("command", "commit", "gpu", "torch", "triton", "date", "seconds")
    lines = ["# Operators on one GPU", "", *(f"- {key}: `{report[key]}`" for key in keys if key in report), ""]
    lines += summary(report)
    lines += [method.replace("\n", " ").replace("``", "`"), ""]
    lines += [
        "| op | shape | backend | us | reference | reference us | ratio | limit | status | second reference | ratio |",
        "|---|" + "---|" * 10,
    ]
    for row in report["rows"]:
        limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
        if "tb_s" in row:
            limit += f" ({row['tb_s']} TB/s)"
        second = f"{row['second']}, {row['second_us']} us | {row['second_ratio']}" if "second" in row else " | "
        peak = f", peak {row['peak_mib']} MiB (reference {row['reference_peak_mib']})" if "peak_mib" in row else ""
        lines.append(
            f"| {row['op']} | {row['shape']}{peak} | {row['backend']} | {row.get('us', '')} | {row['reference']} | "
            f"{row.get('reference_us', '')} | {row.get('ratio', '')} | {limit} | "
            f"{row['status']}{': ' + row['reason'] if 'reason' in row else ''} | {second} |"
        )
    return "\n".join(lines) + "\n"


def write(out: str, report: Mapping[str, Any], method: str) -> None:
    Path(out + ".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    Path(out + ".md").write_text(markdown(report, method), encoding="utf-8")


def join(out: str, files: Sequence[str], sections: Sequence[str], method: str) -> None:
    """One table out of the tables of parts, which must be of one commit, in the order of ``sections``."""
    parts = [json.loads(Path(name).read_text(encoding="utf-8")) for name in files]
    commits = {part["commit"] for part in parts}
    if len(commits) > 1:
        raise SystemExit(f"--join: the parts are of different commits: {', '.join(sorted(commits))}")
    whole = {**parts[0], "command": "; ".join(part["command"] for part in parts)}
    whole["seconds"] = {name: value for part in parts for name, value in part["seconds"].items()}
    whole["unfinished"] = [name for part in parts for name in part.get("unfinished", [])]
    whole["cublaslt"] = [part["cublaslt"] for part in parts]
    whole["rows"] = sorted(
        (row for part in parts for row in part["rows"]), key=lambda row: sections.index(row["section"])
    )
    write(out, whole, method)
    print("\n".join(summary(whole)))
