"""``htsrl plot --timeline``: one interval of a timeline as a picture, a lane for each process, as in the HTS-RL paper.

Reads what ``htsrl train --trace`` has written, also of a run that is under way or was killed.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from htsrl.errors import ConfigError
from htsrl.storage.trace import PHASES, Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IDLE: tuple[Phase, ...] = ("wait", "barrier", "gone", "lost")
"""Phases in which a process has nothing to do, or isn't there."""
COLOURS: dict[Phase, str] = {
    "step": "#3f9b4f", "reset": "#12501f", "open": "#a9d8a4", "check": "#a9d8a4", "replay": "#8a8f1d",
    "infer": "#2171b5", "find": "#c6dbef", "gather": "#9ecae1", "scatter": "#6baed6", "post": "#4a6fa5",
    "load": "#08306b",
    "gradient": "#f0861c", "optimizer": "#b8530b", "returns": "#ffd08a", "shuffle": "#fbb45c", "summary": "#ffe3b8",
    "digest": "#8e63b5", "report": "#c3a5dd", "checkpoint": "#d1559f", "noise": "#b7aee0", "evaluation": "#f2a7cf",
    "count": "#8a8a8a", "publish": "#4d4d4d", "trace": "#cfcf8a", "start": "#b8b8b8",
    "wait": "#ececec", "barrier": "#f3c9c4", "gone": "#000000", "lost": "#ff00ff",
}  # fmt: skip
"""A hue for each role: executors green, actors blue, the learner orange, the rest of the run violet and grey."""
MOST_LANES = 96
"""More are left out of the picture, but not of the printed shares."""


@dataclass
class Slices:
    """What one process did: slice k is ``PHASES[phase[k]]`` from ``start[k]`` to ``end[k]``, in milliseconds."""

    start: Any = field(default_factory=lambda: array("d"))
    end: Any = field(default_factory=lambda: array("d"))
    phase: Any = field(default_factory=lambda: array("i"))

    def within(self, begin: float, end: float) -> Slices:
        """The parts that lie between ``begin`` and ``end``, which is where time 0 is then; arrays [K]."""
        starts, ends = np.maximum(self.start, begin), np.minimum(self.end, end)
        some = starts < ends
        return Slices(starts[some] - begin, ends[some] - begin, np.asarray(self.phase)[some])

    def shares(self, length: float) -> dict[Phase, float]:
        """The part of ``length`` milliseconds that each phase takes."""
        spent = np.bincount(self.phase, np.subtract(self.end, self.start), len(PHASES)) / length
        return {phase: float(share) for phase, share in zip(PHASES, spent) if share > 0}


@dataclass(frozen=True)
class Interval:
    """When an interval began and ended, and the CPU time that each lane's process used, in milliseconds."""

    begin: float
    end: float
    cpu: dict[str, float]

    @property
    def length(self) -> float:
        return self.end - self.begin


@dataclass
class Timeline:
    """The content of a file."""

    title: str
    lanes: dict[str, Slices]
    intervals: dict[int, Interval]


def read_timeline(path: Path) -> Timeline:
    """Read a file that ``--trace`` has written; a line that isn't complete ends it.

    Raises:
        ConfigError: it can't be read, is something else, or shows no interval.
    """
    title, names, lanes = "", {}, {}
    intervals: dict[int, Interval] = {}
    codes = {phase: code for code, phase in enumerate(PHASES)}
    try:
        for event in _events(path):
            number, arguments = event["tid"], event["args"]
            if event["ph"] == "M":
                if event["name"] == "process_name":
                    title = arguments["name"]
                elif event["name"] == "thread_name" and number:
                    names[number] = arguments["name"]
                    lanes[number] = Slices()
                continue
            start = event["ts"] / 1000
            end = start + event["dur"] / 1000
            if number == 0:
                intervals[arguments["number"]] = Interval(start, end, arguments["cpu_ms"])
                continue
            lane = lanes[number]
            lane.start.append(start)
            lane.end.append(end)
            lane.phase.append(codes[event["name"]])
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise ConfigError(f"{path} is not a timeline of `htsrl train --trace`") from None
    if not intervals:
        raise ConfigError(f"{path} shows no complete interval yet")
    return Timeline(title, {names[number]: lanes[number] for number in sorted(lanes)}, intervals)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, one per line."""
    with path.open(encoding="utf-8") as lines:
        if next(lines, "") != "[\n":
            raise ValueError
        for line in lines:
            text = line.rstrip("\n").removesuffix(",")
            if text == "]" or not text.endswith("}"):
                return
            yield json.loads(text)


def median_interval(timeline: Timeline) -> int:
    """The interval of middling length: a picture of it shows what is usual."""
    by_length = sorted(timeline.intervals, key=lambda j: timeline.intervals[j].length)
    return by_length[(len(by_length) - 1) // 2]


def plot_timeline(path: Path, output: Path, interval: int | None = None) -> list[str]:
    """Draw one interval of the timeline in ``path`` into ``output``; returns lines on where all of its time went.

    Args:
        path: what ``--trace`` has written.
        output: a picture.
        interval: which; by default the one of median length.

    Raises:
        ConfigError: matplotlib is missing, ``path`` is no timeline or lacks the interval, ``output`` can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError("plot needs matplotlib: pip install 'htsrl[plot]'") from None

    timeline = read_timeline(path)
    first, last = min(timeline.intervals), max(timeline.intervals)
    interval = median_interval(timeline) if interval is None else interval
    if interval not in timeline.intervals:
        raise ConfigError(f"--interval must be one of those in {path}, {first} to {last}, got {interval}")
    this = timeline.intervals[interval]
    shown = {name: lane.within(this.begin, this.end) for name, lane in list(timeline.lanes.items())[:MOST_LANES]}
    shares = {name: lane.shares(this.length) for name, lane in shown.items()}
    unit, unit_name = time_unit(this.length)

    height = min(0.5, 16.0 / len(shown))
    figure = Figure(figsize=(13, height * len(shown) + 2.1), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panel = figure.subplots()
    for place, lane in enumerate(shown.values()):
        _draw_lane(panel, place, lane, unit)
    font = min(11.0, height * 40)
    panel.set_yticks(range(len(shown)), list(shown), fontsize=font)
    uses = panel.secondary_yaxis("right")
    labels = [f"{_busy(shares[name]):.0%} busy, {this.cpu[name] / this.length:.0%} CPU" for name in shown]
    uses.set_yticks(range(len(shown)), labels, fontsize=font)
    for axis in (panel, uses):
        axis.tick_params(axis="y", length=0)
        axis.spines[:].set_visible(False)
    panel.spines["bottom"].set_visible(True)
    panel.set_xlim(0, this.length / unit)
    panel.set_ylim(len(shown) - 0.4, -0.6)
    panel.set_xlabel(f"{unit_name} since the interval began", fontsize=11)
    title = f"{timeline.title}\ninterval {interval} of {first} to {last}, {this.length / unit:.4g} {unit_name}"
    if len(timeline.lanes) > MOST_LANES:
        title += f"; the first {MOST_LANES} of {len(timeline.lanes)} processes"
    panel.set_title(title, fontsize=12, loc="left")
    present = [phase for phase in COLOURS if any(phase in each for each in shares.values())]
    handles = [Patch(color=COLOURS[phase], label=phase) for phase in present]
    columns = math.ceil(len(present) / 2)
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=10, handlelength=1)
    try:
        canvas.print_figure(output, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a format that isn't one
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{output} can't be written: {reason}") from None
    return [f"{output}: interval {interval} of {first} to {last}", *summary(timeline)]


def summary(timeline: Timeline) -> list[str]:
    """Where the time of all intervals went, a line for each role: means over its processes, in percent of the time."""
    intervals = timeline.intervals.values()
    begin, end = min(each.begin for each in intervals), max(each.end for each in intervals)
    roles: dict[str, list[str]] = {}
    for name in timeline.lanes:
        roles.setdefault(name.split()[0], []).append(name)
    length = (end - begin) / len(intervals)
    unit, unit_name = time_unit(length)
    lines = [f"{len(intervals)} intervals of {length / unit:.4g} {unit_name} on average"]
    for role, names in roles.items():
        each = [timeline.lanes[name].within(begin, end).shares(end - begin) for name in names]
        mean = {phase: sum(shares.get(phase, 0.0) for shares in each) / len(each) for phase in PHASES}
        cpu = sum(interval.cpu[name] for interval in intervals for name in names) / len(names) / (end - begin)
        largest = sorted((phase for phase in PHASES if mean[phase] >= 0.005), key=lambda phase: -mean[phase])
        label = role if len(names) == 1 else f"{len(names)} {role}s"
        phases = ", ".join(f"{phase} {mean[phase]:.0%}" for phase in largest)
        lines.append(f"  {label:<13}{_busy(mean):>4.0%} busy, {cpu:>4.0%} CPU: {phases}")
    return lines


def time_unit(length: float) -> tuple[float, str]:
    """The unit, in milliseconds, in which to show times up to ``length`` milliseconds, and its name."""
    return (1000.0, "seconds") if length > 10_000 else (1.0, "milliseconds")


def _busy(shares: dict[Phase, float]) -> float:
    return sum(share for phase, share in shares.items() if phase not in IDLE)


def _draw_lane(panel: Axes, place: int, lane: Slices, unit: float) -> None:
    """The bars of one lane, a call for each phase; ``unit`` is the time axis's in milliseconds."""
    for code in np.unique(lane.phase):
        bars = lane.phase == code
        spans = np.column_stack([lane.start[bars], (lane.end - lane.start)[bars]]) / unit
        panel.broken_barh(spans.tolist(), (place - 0.4, 0.8), facecolors=COLOURS[PHASES[code]], linewidth=0)
