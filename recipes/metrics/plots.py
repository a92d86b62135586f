"""Figures of a run, from the rows of ``metrics.jsonl``; a function returns None when the rows hold nothing to draw.

The same figure becomes an SVG whose colours are CSS variables (so that a page can be light or dark) or a PNG.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Rows = Sequence[dict[str, Any]]

MAX_POINTS = 600  # of one line; longer runs are binned
ZERO_FLOOR = 1e-9  # below this a logarithmic axis becomes linear, so that exact zeros can be shown


@dataclass(frozen=True)
class Palette:
    """Colours by role. ``series`` are told apart by hue and lightness, also with impaired colour vision."""

    ink: str
    muted: str
    grid: str
    surface: str
    series: tuple[str, ...]


LIGHT = Palette(
    "#1f2430",
    "#667085",
    "#e4e7ec",
    "#ffffff",
    ("#2563eb", "#e8590c", "#0d9488", "#9333ea", "#ca8a04", "#db2777", "#64748b"),
)
DARK = Palette(
    "#e6e8ee",
    "#98a2b3",
    "#2b3240",
    "#161b24",
    ("#6ea8ff", "#ff9354", "#2dd4bf", "#c084fc", "#facc15", "#f472b6", "#94a3b8"),
)
# Placeholders that a page's style sheet resolves.
_NAMES = ("ink", "muted", "grid", "surface", *(f"s{i + 1}" for i in range(len(LIGHT.series))))
_SENTINELS = {f"#0102{i:02x}": f"var(--{name})" for i, name in enumerate(_NAMES, start=0x10)}
_KEYS = tuple(_SENTINELS)
CSS = Palette(_KEYS[0], _KEYS[1], _KEYS[2], _KEYS[3], _KEYS[4:])


def css_variables(palette: Palette) -> str:
    """``--name: colour;`` for every role."""
    values = (palette.ink, palette.muted, palette.grid, palette.surface, *palette.series)
    return " ".join(f"--{name}: {value};" for name, value in zip(_NAMES, values))


def column(rows: Rows, key: str, *, reduce: str = "mean") -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of ``key``, binned to at most ``MAX_POINTS`` (mean or max of a bin)."""
    pairs = [(r["step"], float(r[key])) for r in rows if isinstance(r.get(key), (int, float)) and math.isfinite(r[key])]
    if not pairs:
        return np.zeros(0), np.zeros(0)
    steps, values = np.array(pairs, dtype=np.float64).T
    if steps.size <= MAX_POINTS:
        return steps, values
    parts = np.array_split(np.arange(steps.size), MAX_POINTS)
    pick = np.max if reduce == "max" else np.mean
    return np.array([steps[p].mean() for p in parts]), np.array([pick(values[p]) for p in parts])


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average; the window shrinks at the ends."""
    if window < 2 or values.size < 3:
        return values
    half = window // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(values.size) - half, 0)
    high = np.minimum(np.arange(values.size) + half + 1, values.size)
    return (total[high] - total[low]) / (high - low)


@dataclass(frozen=True)
class Run:
    """A run to draw: its rows, its name in legends, and its colour (index into the palette)."""

    rows: Rows
    label: str
    color: int = 0


@dataclass(frozen=True)
class Figure:
    """A finished figure.

    Attributes:
        title: what it shows.
        note: one sentence on how to read it.
        legend: (label, series index or "muted").
        draw: draws into given axes with a palette.
    """

    title: str
    note: str
    legend: tuple[tuple[str, int | str], ...]
    draw: Callable[[Any, Palette], None]


def _hue(palette: Palette, which: int | str) -> str:
    return palette.muted if which == "muted" else palette.series[int(which) % len(palette.series)]


def reward(runs: Sequence[Run]) -> Figure | None:
    """Mean reward of each step, and its moving average."""
    if not column(runs[0].rows, "reward/mean")[0].size:
        return None

    def draw(axes: Any, palette: Palette) -> None:
        for run in reversed(runs):
            steps, values = column(run.rows, "reward/mean")
            color = _hue(palette, run.color)
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
            axes.plot(steps, smooth(values, max(5, values.size // 15)), color=color, linewidth=2)

    legend = tuple((run.label, run.color) for run in runs)
    return Figure("Reward", "Mean over the responses of a step; the strong line is a moving average.", legend, draw)


def mismatches(runs: Sequence[Run]) -> Figure | None:
    """Active tokens of each step and how many of them mismatch."""
    if not column(runs[0].rows, "consistency/mismatch_count")[0].size:
        return None

    def draw(axes: Any, palette: Palette) -> None:
        steps, active = column(runs[0].rows, "consistency/active_tokens")
        axes.fill_between(steps, active, step="mid", color=palette.muted, alpha=0.22, linewidth=0)
        for run in reversed(runs):
            steps, count = column(run.rows, "consistency/mismatch_count", reduce="max")
            axes.plot(steps, count, color=_hue(palette, run.color), linewidth=2, clip_on=False, zorder=5)
        axes.set_ylim(bottom=0)

    legend: tuple[tuple[str, int | str], ...] = tuple((f"{run.label}: mismatches", run.color) for run in runs)
    legend = (*legend, ("tokens compared", "muted"))
    note = "Sampled tokens whose two log-probabilities differ in any of 32 bits."
    return Figure("Mismatching tokens", note, legend, draw)


def max_abs_diff(runs: Sequence[Run]) -> Figure | None:
    """Largest distance of each step on a logarithmic axis that keeps a place for exact zeros."""
    columns = [column(run.rows, "consistency/max_abs_diff", reduce="max") for run in runs]
    if not columns[0][0].size:
        return None
    top = max([float(values.max()) for _, values in columns if values.size] + [1e-2])

    def draw(axes: Any, palette: Palette) -> None:
        for run, (steps, values) in reversed(list(zip(runs, columns))):
            axes.plot(steps, values, color=_hue(palette, run.color), linewidth=2, clip_on=False, zorder=5)
        axes.set_yscale("symlog", linthresh=ZERO_FLOOR, linscale=0.6)
        highest = max(math.ceil(math.log10(top)), -1)
        axes.set_ylim(0, 10.0**highest * 1.5)
        exponents = list(range(-8, highest + 1, 2))
        axes.set_yticks([0.0, *(10.0**e for e in exponents)], ["0", *(f"1e{e}" if e else "1" for e in exponents)])
        axes.minorticks_off()

    legend = tuple((run.label, run.color) for run in runs)
    note = "Largest |training - rollout| in nats. The bottom line is exactly 0."
    return Figure("Largest difference of a log-probability", note, legend, draw)


def _lines(
    title: str, note: str, run: Run, keys: Sequence[tuple[str, str]], *, log: bool = False, smoothed: bool = False
) -> Figure | None:
    found = [(key, label, *column(run.rows, key)) for key, label in keys]
    found = [item for item in found if item[3].any()]  # all zeros: a loop with one update a rollout, for example
    if not found:
        return None

    def draw(axes: Any, palette: Palette) -> None:
        for i, (_, _, steps, values) in enumerate(found):
            color = _hue(palette, i)
            if smoothed:
                axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
                values = smooth(values, max(5, values.size // 15))
            axes.plot(steps, values, color=color, linewidth=1.8)
        if log and all(float(v.min()) > 0 for *_, v in found):
            axes.set_yscale("log")
            axes.minorticks_off()

    return Figure(title, note, tuple((label, i) for i, (_, label, *_) in enumerate(found)), draw)


def losses(run: Run) -> Figure | None:
    """Policy and total loss."""
    keys = (("loss/policy", "policy"), ("loss/total", "total"))
    return _lines("Policy loss", "Mean over the optimizer steps of a rollout.", run, keys, smoothed=True)


def value_loss(run: Run) -> Figure | None:
    """PPO's critic loss."""
    return _lines("Value loss", "Half the squared error of the critic.", run, (("loss/value", "value"),), smoothed=True)


def entropy(run: Run) -> Figure | None:
    """Entropy of the policy."""
    keys = (("loss/entropy", "entropy"), ("rollout/entropy", "entropy of the rollout"))
    return _lines("Entropy", "Of the policy's next-token distribution, in nats.", run, keys)


def kl(run: Run) -> Figure | None:
    """Distance that an update moves the policy, and distance to the reference."""
    keys = (("loss/approx_kl", "new against old policy"), ("loss/kl_ref", "against the reference"))
    return _lines("KL divergence", "Estimated on the sampled tokens, in nats.", run, keys, smoothed=True)


def grad_norm(run: Run) -> Figure | None:
    """Gradient norms before clipping."""
    keys = (("train/policy_grad_norm", "policy"), ("train/critic_grad_norm", "critic"), ("train/grad_norm", "policy"))
    return _lines("Gradient norm", "Before clipping.", run, keys, log=True, smoothed=True)


def response_length(run: Run) -> Figure | None:
    """Mean and longest response."""
    keys = (
        ("rollout/response_len_mean", "mean"),
        ("rollout/response_len_max", "longest"),
    )
    return _lines("Response length", "Tokens, the end token included.", run, keys)


def stage_times(run: Run) -> Figure | None:
    """Seconds of each stage, stacked; one-off stages (checkpoints) are left to the total."""
    keys = sorted({k for r in run.rows for k in r if k.startswith("time/") and k != "time/step"})
    usual = [k for k in keys if sum(k in r for r in run.rows) > len(run.rows) / 2]
    if not usual:
        return None
    parts = {
        k.removeprefix("time/"): column([{"step": r["step"], k: r.get(k, 0.0)} for r in run.rows], k) for k in usual
    }
    ordered = sorted(parts, key=lambda name: -float(parts[name][1].sum()))

    def draw(axes: Any, palette: Palette) -> None:
        steps = parts[ordered[0]][0]
        stack = [smooth(parts[name][1], max(1, steps.size // 60)) for name in ordered]
        axes.stackplot(steps, *stack, colors=[_hue(palette, i) for i in range(len(ordered))], alpha=0.85, linewidth=0)
        top = np.sort(np.sum(stack, axis=0))
        axes.set_ylim(
            0, max(float(top[int(0.98 * (top.size - 1))]) * 1.25, 1e-6)
        )  # a slow first step must not hide the rest

    legend = tuple((name, i) for i, name in enumerate(ordered))
    return Figure("Time of a step", "Seconds by stage.", legend, draw)


def throughput(run: Run) -> Figure | None:
    """Sampled tokens a second of the whole loop."""
    return _lines(
        "Throughput", "Sampled tokens per second, whole step.", run, (("perf/tokens_per_s", "tokens/s"),), smoothed=True
    )


# ---------------------------------------------------------------------- rendering


def _style(axes: Any, palette: Palette, size: float) -> None:
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette.grid)
    axes.grid(axis="y", color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=palette.muted, labelsize=size, length=0, pad=5)
    axes.margins(x=0.01)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step", color=palette.muted, fontsize=size, labelpad=3)


def _new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install matplotlib") from error
    canvas = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(canvas)
    return canvas, list(np.atleast_1d(canvas.subplots(1, columns)))


def to_svg(figure: Figure, *, width: float = 5.6, height: float = 2.6) -> str:
    """An ``<svg>`` element with CSS variables for colours and the page's font; the same bytes for the same figure."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": figure.title, "path.simplify": True}):
        canvas, (axes,) = _new_figure(width, height)
        figure.draw(axes, CSS)
        _style(axes, CSS, 9)
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for sentinel, variable in _SENTINELS.items():
        text = text.replace(sentinel, variable)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", text)
    # Ids are unique within a figure only.
    tag = re.sub(r"\W", "", figure.title.lower())
    text = re.sub(r'id="([^"]+)"', rf'id="{tag}-\1"', text)
    text = re.sub(r'(xlink:href="#|url\(#)([^")]+)', rf"\1{tag}-\2", text)
    label = f'role="img" aria-label="{figure.title}"'
    return re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" {label}>', text, count=1)


def to_png(
    figures: Sequence[Figure], path: Any, *, palette: Palette = LIGHT, width: float = 4.6, height: float = 3.3
) -> None:
    """The figures side by side, with titles and legends, 200 dots an inch."""
    canvas, axes_list = _new_figure(width * len(figures), height, len(figures))
    canvas.patch.set_facecolor(palette.surface)
    canvas.get_layout_engine().set(wspace=0.06, w_pad=0.12, h_pad=0.12)
    from matplotlib.lines import Line2D

    for axes, figure in zip(axes_list, figures):
        figure.draw(axes, palette)
        _style(axes, palette, 9)
        axes.set_title(figure.title, color=palette.ink, fontsize=11.5, fontweight="bold", loc="left", pad=28)
        handles = [
            Line2D([], [], color=_hue(palette, which), linewidth=4, alpha=0.4 if which == "muted" else 1.0)
            for _, which in figure.legend
        ]
        axes.legend(
            handles,
            [name for name, _ in figure.legend],
            loc="lower left",
            bbox_to_anchor=(-0.02, 0.99),
            ncols=len(handles),
            frameon=False,
            fontsize=8.5,
            labelcolor=palette.muted,
            handlelength=0.9,
            columnspacing=1.2,
            handletextpad=0.5,
            borderaxespad=0.3,
        )
    canvas.savefig(path, dpi=200, metadata={"Software": None})
