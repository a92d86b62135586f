#!/usr/bin/env python3
"""Compare bytes of every GPU operator over random cases, and write a table of what was compared.

    python scripts/verify_bits.py --out reports/gpu_bits_h200 [--cases 2000] [--workers 14] [TEST FILES]

Runs the byte tests (``tests/ops/test_{gpu,sm90}_*.py``) with pytest-xdist, the workers spread over all visible GPUs.
Each operator's test counts its comparisons; OUT.json and OUT.md add them up. Status: ``pass``, ``failure`` (a byte
differs; the first ones are named), ``missing`` (its test left no count), ``ended early``, ``too few cases``. Failed
tests are listed, counted or not. The exit code is pytest's, or 1 when an operator has not passed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from revision import revision

ROOT = Path(__file__).resolve().parents[1]
# What the tests count, and what "alone" etc. were compared with is in the kinds.
OPERATORS = {
    "linear": "library and Triton products",
    "linear_segments": "row-parallel, S segments",
    "linear_backward": "gradients of both operands",
    "linear_hopper": "default on H100 / H200 (csrc/sm90), against Triton",
    "rms_norm": "with residual, forward and backward",
    "rope": "alone and fused with q/k norm",
    "swiglu": "forward and backward",
    "embedding": "vocabulary shards, forward and backward",
    "collectives": "tree of fp32 partial sums",
    "attention": "Triton and Gluon: packed, chunked, paged",
    "attention_fa3": "FlashAttention-3 with one split",
    "attention_backward": "deterministic backward",
    "attention_hopper": "Gluon, against Triton",
    "logp": "log-probability, log-sum-exp, entropy of logits",
    "linear_logp": "leaf statistics, library and Triton",
    "linear_logp_backward": "dH and dW, library and Triton",
    "linear_logp_hopper": "default on H100 / H200: kept, recomputed, fused loss, against library and Triton",
    "sampling": "token and log-probability",
}
TESTS = ("test_gpu_*.py", "test_sm90_[!b]*.py")
LIBRARY = ("linear", "linear_segments", "linear_backward", "attention_fa3")  # beside a library that gfx942 has not
HOPPER = ("linear_hopper", "attention_hopper", "linear_logp_hopper")
CONTROLS = {
    "cublas": "default cuBLAS, first and last row alone against the batch",
    "sdpa": "SDPA decode against prefill, by position",
    "log_softmax": "torch logsumexp in shards against whole, by TP size",
}


def operator_of(name: str) -> str:
    """The operator of a record: its parts are numbered or named (``logp_3``, ``sampling_batch_0``)."""
    return max((op for op in OPERATORS if name == op or name.startswith(f"{op}_")), key=len)


def collect(folder: Path, cases: int) -> list[dict[str, Any]]:
    """One row an operator out of the records of all parts."""
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("bits_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        op = operator_of(record["op"])
        row = rows.setdefault(
            op,
            {"op": op, "cases": 0, "elements": 0, "cases_differing": 0, "kinds": {}, "failures": [], "unfinished": 0},
        )
        row["unfinished"] += not record["finished"]
        for key in ("cases", "elements", "cases_differing"):
            row[key] += record[key]
        for kind, count in record["kinds"].items():
            row["kinds"][kind] = row["kinds"].get(kind, 0) + count
        row["failures"] += record["failures"]
        probe = record.get("probe")
        if probe:
            row["probe_replaced"] = row.get("probe_replaced", 0) + len(probe.get("replaced", ()))
    for row in rows.values():
        few = row["cases"] < cases
        ended = "ended early" if row["unfinished"] else "too few cases"
        row["status"] = "failure" if row["cases_differing"] else ended if few or row["unfinished"] else "pass"
    return [rows.get(op, {"op": op, "status": "missing"}) for op in OPERATORS]


def page(report: dict[str, Any]) -> str:
    rows = report["operators"]
    total, differing, elements = (
        sum(row.get(key, 0) for row in rows) for key in ("cases", "cases_differing", "elements")
    )
    lines = [
        "# Bytes of the GPU operators\n",
        *(
            f"- {key}: `{report[key]}`"
            for key in ("command", "commit", "gpu", "torch", "triton", "date", "seconds", "tests")
        ),
        f"\n**{differing:,} of {total:,} cases differ**, {elements:,} elements. A case is one comparison "
        "of two results of random shape and data; it differs when one byte does.\n",
        "| operator | | cases | elements | differ | status | what was compared |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        kinds = "; ".join(f"{kind} {count}" for kind, count in row.get("kinds", {}).items())
        lines.append(
            f"| {row['op']} | {OPERATORS[row['op']]} | {row.get('cases', 0):,} | {row.get('elements', 0):,} | "
            f"{row.get('cases_differing', '')} | {row['status']} | {('; '.join(row.get('failures', ())) or kinds)} |"
        )
    if report["failed"]:
        lines += ["\nFailed tests:\n", *(f"- {name}" for name in report["failed"])]
    lines.append("\nNegative controls, elements that differ:\n")
    for name, what in CONTROLS.items():
        found = report["negative_controls"].get(name)
        counts = "missing" if found is None else ", ".join(f"{key}: {count}" for key, count in found.items())
        lines.append(f"- {what}: {counts}")
    return "\n".join(lines) + "\n"


def run(command: list[str], environment: dict[str, str], seconds: float | None) -> tuple[str, int]:
    """Output and exit code of the tests; they and their workers end after ``seconds``."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        tests = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = tests.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
            code = 124
        log.seek(0)
        return log.read(), code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="writes OUT.json and OUT.md")
    parser.add_argument("--cases", type=int, default=2000, help="comparisons an operator, at least")
    parser.add_argument("--workers", type=int, default=14, help="processes of pytest-xdist")
    parser.add_argument("--seconds", type=float, help="end the tests after this time; what is not done is missing")
    parser.add_argument("--log", help="pytest's output goes here")
    parser.add_argument("tests", nargs="*", help="files instead of all byte tests")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "verify_bits.py compares bytes on a GPU, and torch sees none; the CPU's are in scripts/test.sh"
        )
    import triton

    if importlib.util.find_spec("xdist") is None:
        raise SystemExit("verify_bits.py runs the tests side by side: pip install pytest-xdist")
    tests = arguments.tests or sorted(
        str(path.relative_to(ROOT)) for glob in TESTS for path in (ROOT / "tests/ops").glob(glob)
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "RLK_TEST_SECONDS": "900", "RLK_SPREAD_WORKERS": "1", **os.environ, "RLK_CASES": str(arguments.cases),
            "RLK_REPORT_DIR": folder,
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(arguments.workers),
                   "--durations=15", *tests]  # fmt: skip
        output, code = run(command, environment, arguments.seconds)
        if arguments.log:
            Path(arguments.log).write_text(output, encoding="utf-8")
        rows = collect(Path(folder), arguments.cases)
        names = Path(folder, "failed.txt")
        failed = names.read_text(encoding="utf-8").splitlines() if names.exists() else []
        controls = {
            name: json.loads(path.read_text(encoding="utf-8"))
            for name in CONTROLS
            if (path := Path(folder, f"control_{name}.json")).exists()
        }
    if not any(row["status"] != "missing" for row in rows):
        print(output[-3000:])
        raise SystemExit("verify_bits.py: no test has counted anything; nothing is written")
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", output.splitlines()[-1] if output else "")
    cards = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
    report = {
        "command": " ".join(["python", "scripts/verify_bits.py", *sys.argv[1:]]),
        "commit": revision(),
        "gpu": f"{torch.cuda.device_count()} x {', '.join(cards)}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(time.monotonic() - began),
        "tests": ", ".join(counts) or f"pytest ended with {code}",
        "failed": failed,
        "operators": rows,
        "negative_controls": controls,
    }
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(page(report), encoding="utf-8")
    hopper = torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
    absent = () if hopper else HOPPER if torch.version.hip is None else (*HOPPER, *LIBRARY)
    bad = [row["op"] for row in rows if row["status"] != "pass" and row["op"] not in absent]
    print("\n".join(failed))
    print(f"{report['tests']}; {report['seconds']} s; not passed: {', '.join(bad) or 'none'}")
    return code or bool(bad and not arguments.tests)


if __name__ == "__main__":
    raise SystemExit(main())
