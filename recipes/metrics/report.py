"""``report.html`` of a run: one file, no external requests, light and dark.

python -m recipes.metrics.report RUN_DIR [--compare OTHER_RUN] [--output FILE] [--png FILE [--dark]]
"""

from __future__ import annotations

import argparse
import html
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import DataError, RecipeError
from recipes.metrics import plots
from recipes.metrics.logging import MetricsError, read_metrics
from recipes.metrics.manifest import read_manifest

REPORT_FILE = "report.html"
WINDOW = 20  # steps of the "first" and "last" means


@dataclass(frozen=True)
class RunData:
    """Rows and manifest of one run directory."""

    path: Path
    rows: list[dict[str, Any]]
    manifest: dict[str, Any]

    @property
    def mode(self) -> str:
        """The consistency mode, for legends."""
        return str(_dig(self.manifest, "config.consistency.mode") or self.path.name)


def load_run(path: str | os.PathLike[str]) -> RunData:
    """Read a run directory.

    Raises:
        DataError: there is no ``metrics.jsonl``, or it holds no complete row. A missing manifest is no error.
    """
    folder = Path(path)
    rows = read_metrics(folder)
    if not rows:
        raise DataError("no complete row", where=str(folder / "metrics.jsonl"), fix="Let the run finish a step first.")
    try:
        manifest = read_manifest(folder)
    except DataError:
        manifest = {}
    return RunData(folder, rows, manifest)


def _dig(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree


def _total(rows: Iterable[Mapping[str, Any]], key: str) -> int:
    return sum(int(r[key]) for r in rows if isinstance(r.get(key), (int, float)))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def totals(run: RunData) -> dict[str, Any]:
    """The figures of the summary: sums over all steps, and rewards of the first and last ``WINDOW`` steps."""
    rows = run.rows
    rewards = [float(r["reward/mean"]) for r in rows if isinstance(r.get("reward/mean"), (int, float))]
    seconds = [float(r["time/step"]) for r in rows if isinstance(r.get("time/step"), (int, float))]
    bad_steps = [r["step"] for r in rows if r.get("consistency/mismatch_count")]
    differences = [float(r["consistency/max_abs_diff"]) for r in rows if "consistency/max_abs_diff" in r]
    return {
        "steps": len(rows),
        "active_tokens": _total(rows, "consistency/active_tokens"),
        "mismatch_count": _total(rows, "consistency/mismatch_count"),
        "nonfinite_count": _total(rows, "consistency/nonfinite_count"),
        "mismatching_steps": len(bad_steps),
        "first_mismatching_step": bad_steps[0] if bad_steps else None,
        "max_abs_diff": max(differences, default=None),
        "max_ulp": max((int(r["consistency/max_ulp"]) for r in rows if "consistency/max_ulp" in r), default=None),
        "reward_first": _mean(rewards[:WINDOW]),
        "reward_last": _mean(rewards[-WINDOW:]),
        "seconds": sum(seconds),
        "seconds_per_step": _mean(seconds),
        "fallback_count": max((int(r.get("kernel/fallback_count", 0)) for r in rows), default=0),
    }


# ---------------------------------------------------------------------- formatting


def _number(value: Any, digits: int = 3) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    return f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _escape(value: Any) -> str:
    return html.escape(str(value))


def _table(rows: Iterable[Sequence[Any]], head: Sequence[str] = (), kind: str = "") -> str:
    header = "<thead><tr>" + "".join(f"<th>{_escape(h)}</th>" for h in head) + "</tr></thead>" if head else ""
    body = "".join(
        "<tr><th scope='row'>"
        + _escape(row[0])
        + "</th>"
        + "".join(f"<td>{_escape(v)}</td>" for v in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<div class='scroll'><table class='{kind}'>{header}<tbody>{body}</tbody></table></div>"


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(tree, Mapping):
        return [item for key, value in tree.items() for item in _flatten(value, f"{prefix}{key}.")]
    return [(prefix[:-1], json.dumps(tree, default=str) if not isinstance(tree, str) else tree)]


# ---------------------------------------------------------------------- sections


def _verdict(run: RunData, figures: Mapping[str, Any]) -> tuple[str, str, str]:
    """Class, headline and sentence at the top of the page."""
    active, bad = figures["active_tokens"], figures["mismatch_count"]
    if not active:
        return "warn", "Nothing was compared", "No log-probability of a sampled token was compared in this run."
    headline = f"{bad:,} of {active:,} log-probabilities differ"
    if not bad:
        return "good", headline, f"Rollout and training agree in every bit, in all {figures['steps']:,} steps."
    where = (
        f"{figures['mismatching_steps']:,} of {figures['steps']:,} steps, from step {figures['first_mismatching_step']}"
    )
    largest = _number(figures["max_abs_diff"])
    text = f"{bad / active:.2%} of the tokens, in {where}; the largest distance is {largest} nats."
    if run.mode == "native":
        return "plain", headline, "Stock engines, the control: " + text
    return "bad", headline, text


def _tiles(figures: Mapping[str, Any]) -> str:
    first, last = figures["reward_first"], figures["reward_last"]
    change = "" if first is None or last is None else f"first {WINDOW} steps: {_number(first)}"
    tiles = (
        ("Steps", _number(figures["steps"]), _duration(figures["seconds"]) + " in all"),
        ("Tokens compared", _number(figures["active_tokens"]), f"{_number(figures['nonfinite_count'])} not finite"),
        ("Mismatches", _number(figures["mismatch_count"]), f"largest |Δ| {_number(figures['max_abs_diff'])} nats"),
        (f"Reward, last {WINDOW} steps", _number(last), change),
        (
            "Step",
            _duration(figures["seconds_per_step"] or 0.0),
            f"{_number(figures['fallback_count'])} kernel fallbacks",
        ),
    )
    cells = (
        f"<div class='tile'><h3>{_escape(a)}</h3><b>{_escape(b)}</b><p>{_escape(c)}</p></div>" for a, b, c in tiles
    )
    return "<section class='tiles'>" + "".join(cells) + "</section>"


def build_figures(run: RunData, other: RunData | None = None) -> list[plots.Figure]:
    """Every figure that the rows have data for, in the order of the page."""
    this = plots.Run(run.rows, run.mode if other else "this run", 0)
    both = [this]
    if other is not None:
        label = other.mode if other.mode != run.mode else other.path.name
        both.append(plots.Run(other.rows, label, 1))
    found = [plots.reward(both), plots.mismatches(both), plots.max_abs_diff(both)]
    found += [plots.value_loss(this), plots.losses(this), plots.entropy(this), plots.kl(this), plots.grad_norm(this)]
    found += [plots.response_length(this), plots.stage_times(this), plots.throughput(this)]
    return [figure for figure in found if figure is not None]


def _figure_html(figure: plots.Figure) -> str:
    swatch = "<i style='background: var(--{}){}'></i>"
    keys = "".join(
        "<span>"
        + (swatch.format("muted", "; opacity: .4") if which == "muted" else swatch.format(f"s{int(which) + 1}", ""))
        + f"{_escape(label)}</span>"
        for label, which in figure.legend
    )
    legend = f"<div class='legend'>{keys}</div>" if len(figure.legend) > 1 else ""
    head = f"<figcaption><h3>{_escape(figure.title)}</h3><p>{_escape(figure.note)}</p></figcaption>"
    return f"<figure>{head}{legend}{plots.to_svg(figure)}</figure>"


def _summary_table(runs: Sequence[RunData]) -> str:
    names = (
        ("steps", "steps"),
        ("active_tokens", "active tokens"),
        ("mismatch_count", "mismatches"),
        ("mismatching_steps", "steps with a mismatch"),
        ("nonfinite_count", "not finite"),
        ("max_abs_diff", "largest |Δ|, nats"),
        ("max_ulp", "largest distance, ulp"),
        ("reward_first", f"mean reward, first {WINDOW} steps"),
        ("reward_last", f"mean reward, last {WINDOW} steps"),
        ("seconds_per_step", "seconds a step"),
    )
    columns = [totals(run) for run in runs]
    rows = [(label, *(_number(column[key]) for column in columns)) for key, label in names]
    same = len({run.mode for run in runs}) < len(runs)
    head = ("", *(run.path.name if same else run.mode for run in runs)) if len(runs) > 1 else ()
    return _table(rows, head, "numbers")


def _engines_table(manifest: Mapping[str, Any]) -> str:
    contract = manifest.get("contract") or {}
    backends = {side: (manifest.get("backends") or {}).get(side) or {} for side in ("rollout", "train")}
    rows = [("contract", *(contract.get(side) or "none (stock operators)" for side in ("rollout", "train")))]
    for op in sorted({*backends["rollout"], *backends["train"]}):
        rows.append((op, *(str(backends[side].get(op, "–")) for side in ("rollout", "train"))))
    return _table(rows, ("", "rollout", "training"))


def _facts(run: RunData) -> list[tuple[str, str]]:
    host, git = run.manifest.get("host") or {}, run.manifest.get("git") or {}
    sessions = run.manifest.get("sessions") or [{}]
    facts = [
        ("state", run.manifest.get("state", "unknown")),
        ("started", sessions[0].get("start", "")),
        ("ended", sessions[-1].get("end", "")),
        ("restarts", str(len(sessions) - 1) if len(sessions) > 1 else ""),
        ("commit", git.get("commit", "")[:12] + (" with local changes" if git.get("dirty") else "")),
        ("machine", f"{host.get('processor', '')}, {host.get('cores', '')} cores" if host else ""),
        ("system", host.get("system", "")),
    ]
    return [(name, value) for name, value in facts if value]


def render(run: RunData, other: RunData | None = None) -> str:
    """The page."""
    config = run.manifest.get("config") or {}
    figures = totals(run)
    kind, headline, sentence = _verdict(run, figures)
    model, dtype = _dig(config, "model.name") or "", _dig(config, "model.dtype") or ""
    title = f"{model} {str(_dig(config, 'algorithm.name') or 'run').upper()}, {run.mode}".strip()
    layout = (
        f"{dtype}, training TP {_dig(config, 'train.tensor_parallel_size')}, "
        f"rollout TP {_dig(config, 'rollout.tensor_parallel_size')}, seed {run.manifest.get('seed')}"
        if config
        else str(run.path)
    )
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    for name, palette in (("LIGHT", plots.LIGHT), ("DARK", plots.DARK)):
        style = style.replace(f"/* {name} */", plots.css_variables(palette))
    charts = "".join(_figure_html(figure) for figure in build_figures(run, other))
    runs = [run] if other is None else [run, other]
    command = run.manifest.get("command", "")
    versions = _table(sorted((run.manifest.get("versions") or {}).items()))
    config_table = _table(_flatten(config)) if config else "<p>No manifest.</p>"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(title)}</title><style>{style}</style></head><body><main>
<header><h1>{_escape(title)}</h1><p>{_escape(layout)}</p></header>
<section class="verdict {kind}"><b>{_escape(headline)}</b><p>{_escape(sentence)}</p></section>
{_tiles(figures)}
<h2>Course of the run</h2><section class="figures">{charts}</section>
<h2>Totals</h2><section class="cards"><div class="card">{_summary_table(runs)}</div>
<div class="card"><h3>Run</h3>{_table(_facts(run))}</div></section>
<h2>Contract and backends</h2><section class="cards"><div class="card">{_engines_table(run.manifest)}</div>
<div class="card"><h3>Versions</h3>{versions}</div></section>
<h2>Reproduce</h2><div class="card"><pre>{_escape(command) or "unknown"}</pre>
<details><summary>Configuration</summary>{config_table}</details></div>
<footer>Consistency metrics are defined in recipes/metrics/mismatch.py; the numbers are in metrics.jsonl.</footer>
</main></body></html>
"""


def write_report(
    run_dir: str | os.PathLike[str],
    *,
    compare: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the page; returns its path (``<run_dir>/report.html`` when ``output`` is absent).

    Raises:
        DataError: a run directory has no metrics.
        MetricsError: the file cannot be written.
    """
    page = render(load_run(run_dir), load_run(compare) if compare is not None else None)
    target = Path(output) if output is not None else Path(run_dir) / REPORT_FILE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise MetricsError(
            f"cannot write: {error.strerror}", where=str(target), fix="Choose another --output."
        ) from error
    return target


def write_png(
    run_dir: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    compare: str | os.PathLike[str] | None = None,
    dark: bool = False,
) -> Path:
    """Write a picture with reward, mismatches and largest difference side by side."""
    figures = build_figures(load_run(run_dir), load_run(compare) if compare is not None else None)[:3]
    plots.to_png(figures, path, palette=plots.DARK if dark else plots.LIGHT)
    return Path(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.metrics.report", description="Write report.html of a run.")
    parser.add_argument("run_dir", help="Hydra's run directory, with metrics.jsonl")
    parser.add_argument("--compare", metavar="OTHER_RUN", help="a second run, such as one with consistency=native")
    parser.add_argument("--output", metavar="FILE", help="where the page goes (RUN_DIR/report.html)")
    parser.add_argument("--png", metavar="FILE", help="also write the first three figures as a picture")
    parser.add_argument("--dark", action="store_true", help="the picture on a dark ground")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run_dir, compare=options.compare, output=options.output))
        if options.png:
            print(write_png(options.run_dir, options.png, compare=options.compare, dark=options.dark))
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
