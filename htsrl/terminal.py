"""What a person sees of a run: a table that updates in place, plain lines, or only the end.

Views never draw random numbers, and drawing is rationed: at most four times a second, and never more than one percent
of the time.
"""

from __future__ import annotations

import math
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.segment import Segment

import htsrl
from htsrl.config import AnyConfig
from htsrl.rundir import CHECKPOINTS

PLAIN_SECONDS = 5.0
"""Least time between two plain lines."""
REDRAW_SECONDS = 0.25
"""Least time between two drawings of the live table."""
WINDOW_SECONDS = 30.0
"""Speed and shares of time are means over about this long."""
MOST_IN_WINDOW = 1000
"""Intervals that are remembered for it; where there are more, the shorter ones count with their neighbours."""
PHASES = ("rollout", "learn", "wait")
"""Where time goes: the records' ``time/*``."""
LABELS = {"loss/policy": "policy loss", "loss/value": "value loss", "loss/grad_norm": "gradient norm"}
"""Words of the table where the key's own don't do."""
HIDDEN = {"loss/total", "loss/gradient_steps", "loss/grad_norm_clipped"}
"""Keys that only the files have."""


@dataclass
class Board:
    """The numbers to show. Written by the run's thread alone; every field is replaced, never changed."""

    config: AnyConfig
    has_score: bool
    frame_skip: int
    record: Mapping[str, Any] = field(default_factory=dict)
    """The latest interval's."""
    evaluation: Mapping[str, Any] | None = None
    """The latest."""
    recovered: int = 0
    """Processes that were replaced."""
    speed: float = 0.0
    """Steps per second over the window."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Parts of the wall-clock time; collecting and learning overlap."""
    _window: deque[tuple[float, float, dict[str, float]]] = field(default_factory=lambda: deque([(0.0, 0.0, {})]))
    """Seconds, steps and time spent so far at the ends of intervals: what was between two is their difference."""

    def update(self, record: Mapping[str, Any]) -> None:
        """Take in the record of an interval."""
        seconds, steps = float(record.get("seconds") or 0.0), float(record["steps"])
        window = self._window
        before = window[-1][2]
        spent = {
            name: before.get(name, 0.0) + float(record[f"time/{name}"] or 0.0)
            for name in PHASES
            if f"time/{name}" in record
        }
        if len(window) > 2 and window[-1][0] - window[-2][0] < WINDOW_SECONDS / MOST_IN_WINDOW:
            window.pop()
        window.append((seconds, steps, spent))
        while len(window) > 2 and window[1][0] < seconds - WINDOW_SECONDS:
            window.popleft()
        first_seconds, first_steps, first_spent = window[0]
        passed = max(seconds - first_seconds, 1e-9)
        self.speed = (steps - first_steps) / passed
        self.shares = {name: min((total - first_spent.get(name, 0.0)) / passed, 1.0) for name, total in spent.items()}
        self.record = record

    @property
    def fraction(self) -> float:
        """How much of the step budget is spent."""
        return min(self.record.get("steps", 0) / self.config.total_steps, 1.0)

    @property
    def seconds_left(self) -> float | None:
        """Until the step budget is spent, at the present speed."""
        missing = self.config.total_steps - self.record.get("steps", 0)
        return max(missing, 0) / self.speed if self.speed > 0 else None


class View(Protocol):
    """Where a run's numbers are shown."""

    def greet(self, lines: Sequence[str]) -> None: ...
    def start(self, facts: str) -> None: ...
    def interval(self) -> None: ...
    def evaluation(self, line: str) -> None: ...
    def note(self, message: str) -> None: ...
    def finish(self, lines: Sequence[str]) -> None: ...
    def close(self) -> None: ...


class Terminal(Console):
    """A console that says that nobody reads any more; rich would end the program."""

    def on_broken_pipe(self) -> None:
        """Called while a BrokenPipeError is handled."""
        raise


def make_view(progress: str, board: Board) -> View:
    """The view for ``--progress``; 'auto' shows the table on a terminal that can move its cursor."""
    console = Terminal(highlight=False, force_terminal=True if progress == "live" else None)
    if progress == "auto":
        progress = "live" if console.is_terminal and not console.is_dumb_terminal else "plain"
    if progress == "live":
        return LiveView(board, console)
    return PlainView(board) if progress == "plain" else QuietView()


class QuietView:
    """Only warnings and the end."""

    def greet(self, lines: Sequence[str]) -> None:
        """Say nothing."""

    def start(self, facts: str) -> None:
        """Say nothing."""

    def interval(self) -> None:
        """Say nothing."""

    def evaluation(self, line: str) -> None:
        """Say nothing."""

    def note(self, message: str) -> None:
        """Warn where a script that reads the output doesn't stumble over it."""
        print(f"htsrl: note: {message}", file=sys.stderr, flush=True)

    def finish(self, lines: Sequence[str]) -> None:
        """Print the end."""
        print(*lines, sep="\n", flush=True)

    def close(self) -> None:
        """Nothing is open."""


class PlainView:
    """Aligned lines for files and pipes: the first interval, then at most one in five seconds, and the last."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._next = 0.0
        self._shown: Mapping[str, Any] | None = None

    def greet(self, lines: Sequence[str]) -> None:
        """Print what the run is, before its processes start."""
        print(*lines, sep="\n", flush=True)

    def start(self, facts: str) -> None:
        """Print what it runs on."""
        print(facts, flush=True)

    def interval(self) -> None:
        """Print a line when it is time to."""
        now = time.monotonic()
        if now >= self._next:
            self._print()
            self._next = now + PLAIN_SECONDS

    def evaluation(self, line: str) -> None:
        """Print the result of an evaluation."""
        print(line, flush=True)

    def note(self, message: str) -> None:
        """Print a warning."""
        print(f"note: {message}", flush=True)

    def finish(self, lines: Sequence[str]) -> None:
        """Print the last interval, unless it was, and the end."""
        if self._board.record and self._shown is not self._board.record:
            self._print()
        print(*lines, sep="\n", flush=True)

    def close(self) -> None:
        """Nothing is open."""

    def _print(self) -> None:
        self._shown = self._board.record
        print(plain_line(self._board), flush=True)


class LiveView:
    """A table that updates in place; a second thread keeps its clock going while an interval takes long."""

    def __init__(self, board: Board, console: Console) -> None:
        self._board, self._console = board, console
        self._updated = time.monotonic()
        self._next = 0.0
        self._closed = threading.Event()
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._render)
        self._ticker = threading.Thread(target=self._tick, name="htsrl-terminal", daemon=True)

    def greet(self, lines: Sequence[str]) -> None:
        """Print what the run is, before its processes start."""
        for line in lines:
            self._console.print(line, markup=False, soft_wrap=True)

    def start(self, facts: str) -> None:
        """Print what it runs on, and open the table below."""
        self._console.print(facts, markup=False)
        self._updated = time.monotonic()
        self._live.start(refresh=True)
        self._ticker.start()

    def interval(self) -> None:
        """Redraw when it is time to."""
        self._updated = time.monotonic()
        if self._updated >= self._next:
            self._draw()

    def evaluation(self, line: str) -> None:
        """The table holds the latest; the line goes above it."""
        self._console.print(line, markup=False)

    def note(self, message: str) -> None:
        """Print a warning above the table."""
        self._console.print(f"note: {message}", style="yellow", markup=False)

    def finish(self, lines: Sequence[str]) -> None:
        """Leave the table in its last state and print the end below."""
        self.close()
        for line in ("", *lines):
            self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stop drawing and give the cursor back; twice is fine."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._ticker.is_alive():
            self._ticker.join()
        if self._live.is_started:
            try:
                self._live.refresh()
            finally:
                self._live.stop()  # it gives standard output back, too

    def _tick(self) -> None:
        with suppress(OSError):  # the terminal is gone, which the run's thread will notice
            while not self._closed.wait(1.0):
                if time.monotonic() >= self._next + 1.0 - REDRAW_SECONDS:
                    self._draw()

    def _draw(self) -> None:
        began = time.monotonic()
        self._live.refresh()
        now = time.monotonic()
        self._next = now + max(REDRAW_SECONDS, 100 * (now - began))

    def _render(self) -> Drawing:
        since = 0.0 if self._closed.is_set() else time.monotonic() - self._updated
        return table(self._board, self._console.width, since, ascii_only=self._console.options.ascii_only)


# ------------------------------------------------------------------------------------------------------------- lines


def greeting(config: AnyConfig, run_dir: Path) -> list[str]:
    """What a run is."""
    return [
        f"htsrl {htsrl.__version__}: {config.algo} on {config.env}, {config.total_steps:,} steps, seed {config.seed}",
        f"run folder: {run_dir}",
    ]


def facts_line(config: AnyConfig, facts: Mapping[str, str]) -> str:
    """What it runs on."""
    runtime = config.runtime
    layout = (
        f"{runtime.num_envs} environments x {runtime.sync_interval} steps per interval, schedule {runtime.schedule}"
    )
    return ", ".join((layout, *(f"{name} {value}" for name, value in facts.items())))


def plain_line(board: Board) -> str:
    """One interval on one line, in columns that stay where they are."""
    record = board.record
    width = len(f"{board.config.total_steps:,}")
    parts = [
        f"{record['steps']:>{width},} steps {board.fraction:>4.0%}",
        f"{board.speed:>8,.0f}/s",
        f"{record.get('episodes', 0):>8,} episodes",
        f"return {number(record.get('episode_return_mean')):>7}",
    ]
    if board.has_score:
        parts.append(f"score {number(record.get('score_mean')):>6}")
    if "policy_lag_max" in record:
        parts.append(f"lag {number(record['policy_lag']):>5} to {record['policy_lag_max']:>2}")
    if board.shares:
        parts.append(" ".join(f"{name} {share:>4.0%}" for name, share in board.shares.items()))
    parts.append(f"{duration(board.seconds_left):>7} left")
    return "  ".join(parts)


def evaluation_line(record: Mapping[str, Any]) -> str:
    """The result of an evaluation during training."""
    line = f"evaluation after {record['steps']:,} steps: return {number(record['return_mean'])}"
    if record.get("return_std") is not None:
        line += f" ± {number(record['return_std'])}"
    if record.get("score_mean") is not None:
        line += f", score {number(record['score_mean'])}"
    return f"{line}, {record['episodes']} episodes"


def last_lines(result: Mapping[str, Any], config: AnyConfig, run_dir: Path) -> list[str]:
    """How a run ended, where its policy is, and the command to try next."""
    steps, seconds = result["steps"], result.get("seconds")
    if result.get("interrupted"):
        first = f"interrupted after {steps:,} of {config.total_steps:,} steps, {duration(seconds)}"
    else:
        first = f"finished {steps:,} steps in {duration(seconds)}"
    lines = [f"{first}: {number(result.get('steps_per_second'))} steps/s, {result.get('episodes', 0):,} episodes"]
    if result.get("episode_return_mean") is not None:
        score = f", score {number(result['score_mean'])}" if result.get("score_mean") is not None else ""
        lines.append(f"return {number(result['episode_return_mean'])}{score} (mean of the last 100 episodes)")
    if result.get("policy_lag") is not None:
        lag = result["policy_lag"]
        lines.append(f"policy lag {number(lag['mean'])} updates, at most {lag['max']}")
    if result.get("recovered"):
        lines.append(f"recovered from {result['recovered']} failures of processes")
    if result.get("reproducible") is False:
        timing = config.runtime.schedule == "async"
        reason = "schedule async depends on timing" if timing else "the environment did not repeat what it did before"
        lines.append(f"not reproducible: {reason}")
    lines.append(f"checkpoint: {result.get('checkpoint', run_dir / CHECKPOINTS)}")
    if result.get("interrupted"):
        lines.append(f"go on: htsrl resume {shlex.quote(str(run_dir))}")
    lines.append(f"evaluate it: htsrl eval {shlex.quote(str(run_dir))}")
    return lines


# ------------------------------------------------------------------------------------------------------------- table

Line = list[tuple[str, str]]
"""Pieces of text, each with a rich style."""


@dataclass(frozen=True)
class Drawing:
    """Lines that fit the terminal, for rich: far cheaper to draw than its texts and tables, which measure and wrap."""

    lines: list[Line]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for k, line in enumerate(self.lines):
            if k:
                yield Segment.line()
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)


def table(board: Board, width: int, since: float = 0.0, ascii_only: bool = False) -> Drawing:
    """The live table for a terminal of ``width`` columns, ``since`` seconds after the latest record."""
    columns = 4 if width >= 112 else 3 if width >= 84 else 2 if width >= 48 else 1
    gap = 3
    column_width = max(min(30, (width - 1 - gap * (columns - 1)) // columns), 16)
    run, episodes, learning, spent = (
        _section(title, rows, column_width, ascii_only) for title, rows in _numbers(board, since)
    )
    arranged = {
        1: [[*run, [], *spent, [], *episodes, [], *learning]],
        2: [[*run, [], *spent], [*episodes, [], *learning]],
        3: [[*run, [], *spent], episodes, learning],
        4: [run, episodes, learning, spent],
    }[columns]
    lines = [[], *_bar(board, columns * (column_width + gap) - gap, ascii_only), []]
    for cells in zip_longest(*arranged, fillvalue=[]):
        line: Line = []
        for k, cell in enumerate(cells):
            missing = column_width - sum(len(text) for text, _ in cell) + gap
            line += [*cell, (" " * missing, "")] if k + 1 < columns else cell
        lines.append(line)
    return Drawing(lines)


Rows = list[tuple[str, str | float]]
"""Label, and a text or the fraction that a bar shows."""


def _numbers(board: Board, since: float) -> list[tuple[str, Rows]]:
    """Titles and rows of the four sections."""
    record = board.record
    left = board.seconds_left
    run: Rows = [
        ("steps/s", number(board.speed)),
        ("elapsed", duration(record.get("seconds", 0.0) + since)),
        ("left", duration(None if left is None else max(left - since, 0.0))),
        ("intervals", f"{record.get('interval', -1) + 1:,}"),
    ]
    if board.frame_skip > 1:
        run.append(("frames", f"{record.get('frames', 0):,}"))
    if board.recovered:
        run.append(("recovered", f"{board.recovered:,}"))
    episodes: Rows = [
        ("finished", f"{record.get('episodes', 0):,}"),
        ("return, last 100", number(record.get("episode_return_mean"))),
    ]
    if board.has_score:
        episodes.append(("score, last 100", number(record.get("score_mean"))))
    if board.evaluation is not None:
        episodes.append(("evaluation return", number(board.evaluation.get("return_mean"))))
        if board.evaluation.get("score_mean") is not None:
            episodes.append(("evaluation score", number(board.evaluation["score_mean"])))
        episodes.append(("evaluated at", f"{board.evaluation['steps']:,}"))
    learning: Rows = [("policy lag", number(record.get("policy_lag")))]
    if "policy_lag_max" in record:
        learning.append(("largest lag", number(record["policy_lag_max"])))
    if "learning_rate" in record:
        learning.append(("learning rate", number(record["learning_rate"])))
    learning += [
        (LABELS.get(name, name[5:].replace("_", " ")), number(value))
        for name, value in record.items()
        if name.startswith("loss/") and name not in HIDDEN
    ]
    spent: Rows = [(name, share) for name, share in board.shares.items()]
    return [("run", run), ("episodes", episodes), ("learning", learning), ("time", spent)]


def _section(title: str, rows: Rows, width: int, ascii_only: bool) -> list[Line]:
    lines: list[Line] = [[(title, "bold")]]
    for label, value in rows:
        if isinstance(value, float):
            room = max(width - 14, 0)
            full = round(value * room)
            bar = ("#" if ascii_only else "█") * full + " " * (room - full)
            lines.append([(f"{label:<8} ", "dim"), (bar, "cyan"), (f"{value:>5.0%}", "")])
        else:
            label = label[: max(width - len(value) - 1, 0)]
            lines.append([(label, "dim"), (f"{value:>{width - len(label)}}", "")])
    return lines


def _bar(board: Board, width: int, ascii_only: bool) -> list[Line]:
    """The progress bar, with its words beside it where there is room, below where there isn't."""
    words = f"{board.fraction:.0%}  {board.record.get('steps', 0):,} / {board.config.total_steps:,} steps"
    beside = width >= len(words) + 32
    room = width - len(words) - 2 if beside else width
    full = int(board.fraction * room)
    done, left = ("=", "-") if ascii_only else ("━", "━")
    bar: Line = [(done * full, "green"), (left * (room - full), "bright_black")]
    return [[*bar, (f"  {words}", "")]] if beside else [bar, [(words[:width], "")]]


# ------------------------------------------------------------------------------------------------------------- words


def number(value: float | None) -> str:
    """A measurement in a few characters."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if value == 0 or (isinstance(value, int) and size < 1000):
        return str(int(value))
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}" if size >= 1e-3 else f"{value:.1e}"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
