"""``htsrl plot``: learning curves from the files of finished or running runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from htsrl.errors import ConfigError
from htsrl.logfiles import read_json_lines
from htsrl.rundir import CONFIG, EVALUATIONS, METRICS, require_run
from htsrl.tomlfile import load_config

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = {"return": ("episode_return_mean", "return_mean"), "score": ("score_mean", "score_mean")}
"""What a row of panels shows, and its keys in the records of intervals and of evaluations."""
UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
"""Of wall-clock time; the largest of which the longest run has at least three."""
MOST_POINTS = 2_000
"""Longer curves are thinned: a picture has no more columns."""


@dataclass(frozen=True)
class Curves:
    """What one run measured."""

    label: str
    intervals: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def of(self, measure: str) -> tuple[np.ndarray, ...]:
        """Steps, seconds and values [K] of ``measure`` over the intervals that have one."""
        key = MEASURES[measure][0]
        rows = [(each["steps"], each.get("seconds"), each.get(key)) for each in self.intervals if _real(each.get(key))]
        return _columns(rows, 3)

    def evaluated(self, measure: str) -> tuple[np.ndarray, ...]:
        """Steps, seconds and values [K] of ``measure`` over the evaluations; seconds are those of training."""
        key = MEASURES[measure][1]
        rows = [(each["steps"], each.get(key)) for each in self.evaluations if _real(each.get(key))]
        steps, values = _columns(rows, 2)
        known_steps, known_seconds = _columns([(each["steps"], each.get("seconds")) for each in self.intervals], 2)
        return steps, np.interp(steps, known_steps, known_seconds), values


def plot_runs(run_dirs: Sequence[Path], output: Path) -> None:
    """Draw return (and score, where a run has one) against steps and wall-clock time into ``output``.

    Raises:
        ConfigError: matplotlib is missing, a folder holds no run or no interval yet, or ``output`` can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        raise ConfigError("plot needs matplotlib: pip install 'htsrl[plot]'") from None

    runs = [_read(run_dir, label) for run_dir, label in zip(run_dirs, _labels(run_dirs))]
    measures = [measure for measure in MEASURES if measure == "return" or any(len(run.of(measure)[0]) for run in runs)]
    lasted = [run.intervals[-1].get("seconds") for run in runs]
    longest = max(float(seconds) if _real(seconds) else 0.0 for seconds in lasted)
    unit, unit_name = next(each for each in UNITS if longest > 3 * each[0] or each[0] == 1)

    figure = Figure(figsize=(11, 4.2 * len(measures) + 0.6 + 0.22 * len(runs)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(len(measures), 2, squeeze=False, sharey="row")
    for row, measure in zip(panels, measures):
        for run in runs:
            _draw_run(row, run, measure, unit)
        row[0].set_ylabel(f"{measure} (mean of the last 100 episodes)")
        row[0].set_xlabel("environment steps")
        row[0].xaxis.set_major_formatter(EngFormatter(sep=""))
        row[1].set_xlabel(unit_name)
        for panel in row:
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
            panel.set_xlim(left=0)
    handles, labels = panels[0][0].get_legend_handles_labels()
    if any(run.evaluations for run in runs):
        (dot,) = panels[0][0].plot([], [], "o", color="0.3", markersize=5)
        handles, labels = [*handles, dot], [*labels, "evaluation"]
    figure.legend(handles, labels, loc="outside lower left", frameon=False)
    try:
        canvas.print_figure(output, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a format that isn't one
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{output} can't be written: {reason}") from None


def _draw_run(row: Sequence[Axes], run: Curves, measure: str, unit: float) -> None:
    """One run's line and dots in both panels of a row; ``unit`` is the time axis's in seconds."""
    steps, seconds, values = run.of(measure)
    thin = slice(None, None, math.ceil(max(len(steps), 1) / MOST_POINTS))
    (line,) = row[0].plot(steps[thin], values[thin], label=run.label, linewidth=1.5)
    row[1].plot(seconds[thin] / unit, values[thin], color=line.get_color(), linewidth=1.5)
    steps, seconds, values = run.evaluated(measure)
    row[0].plot(steps, values, "o", color=line.get_color(), markersize=5)
    row[1].plot(seconds / unit, values, "o", color=line.get_color(), markersize=5)


def _read(run_dir: Path, label: str) -> Curves:
    require_run(run_dir)
    intervals = thinned(read_json_lines(run_dir / METRICS, "steps"))
    if not intervals:
        raise ConfigError(f"{run_dir} has no finished interval yet")
    config = load_config(run_dir / CONFIG)
    return Curves(
        f"{label} ({config.algo} on {config.env}, {config.runtime.schedule}, seed {config.seed})".replace("$", r"\$"),
        intervals,
        thinned(read_json_lines(run_dir / EVALUATIONS, "steps")),
    )


def thinned(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most twice MOST_POINTS of ``records``, evenly, and the last: a long run's would not fit into memory."""
    kept: list[dict[str, Any]] = []
    last: dict[str, Any] | None = None
    stride = 1
    for k, last in enumerate(records):
        if k % stride == 0:
            kept.append(last)
        if len(kept) == 2 * MOST_POINTS:
            kept = kept[::2]
            stride *= 2
    return kept if last is None or kept[-1] is last else [*kept, last]


def _labels(run_dirs: Sequence[Path]) -> list[str]:
    """The folders' names; their paths where names repeat."""
    names = [run_dir.resolve().name for run_dir in run_dirs]
    return names if len(set(names)) == len(names) else [str(run_dir) for run_dir in run_dirs]


def _real(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _columns(rows: list[tuple[Any, ...]], count: int) -> tuple[np.ndarray, ...]:
    """Rows of numbers as ``count`` arrays; what is missing, or no number, is NaN."""
    return tuple(np.array([row[k] if _real(row[k]) else math.nan for row in rows], float) for k in range(count))
