"""``--trace``: what every process of a run was doing, as a file in Chrome's Trace Event Format (a JSON array).

``htsrl plot --timeline``, ui.perfetto.dev and chrome://tracing read it. Each line is an event; an interval's events are
written with one system call, after the next has begun. So a run that is killed leaves a file that ends with its last
complete interval: all that is missing is the closing bracket, which no reader asks for.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from htsrl.config import AnyConfig
from htsrl.errors import ConfigError
from htsrl.storage.fields import MARK
from htsrl.storage.layout import Layout
from htsrl.storage.memory import Arena
from htsrl.storage.trace import ARGUMENTS, NONE, PHASES, LaneReader, Phase, close_lane, mark

MOST_BYTES = 1 << 30
"""A timeline ends early rather than become larger than about this."""
LEARNER = "learner"
"""Lane of the run's own process: its main thread is the learner."""
LEARNER_MARKS = 1 << 14
"""Marks that the learner's ring holds: a few for each gradient step."""


def lanes(layout: Layout, T: int) -> dict[str, int]:
    """Every process's lane, and the size of its ring: twice what it can mark in an interval.

    Twice, because an interval's marks are read while the next one's are made.
    """
    sizes = {LEARNER: LEARNER_MARKS}
    for a in range(layout.num_actors):
        groups = [group for g, group in enumerate(layout.groups) if layout.actor_of[g] == a]
        # A batch is of one group at least; one that is larger than the largest bucket is answered in pieces
        sizes[f"actor {a}"] = 2 * T * (7 * len(groups) + sum(map(len, groups))) + 64
    for e, columns in enumerate(layout.executor_columns):
        # Every row may be the last of its episode
        sizes[f"executor {e}"] = 2 * T * (2 * len(layout.executor_groups[e]) + 2 * len(columns)) + 4 * len(columns) + 64
    return sizes


def refuse_unwritable(path: Path | None, run_dir: Path | None) -> None:
    """Refuse a timeline that would overwrite something, or that has no folder; ``run_dir`` may be about to be made.

    Raises:
        ConfigError: naming it.
    """
    if path is None:
        return
    if path.exists():
        raise ConfigError(f"{path} exists already; name another file for --trace, or delete that one first")
    if not path.parent.is_dir() and path.parent != run_dir:
        raise ConfigError(f"{path} can't be written: there is no folder {path.parent}")


def slice_writer(name: str, arguments: Sequence[str]) -> Callable[..., str]:
    """A function from lane, start and duration in microseconds, and the values of ``arguments``, to an event's text."""
    values = ",".join(f'"{argument}":{{{place}}}' for place, argument in enumerate(arguments, start=3))
    head = f'{{{{"ph":"X","name":"{name}","pid":1,"tid":{{0}},"ts":{{1:.3f}},"dur":{{2:.3f}},'
    return f'{head}"args":{{{{{values}}}}}}}}}'.format


SLICE = [slice_writer(phase, ARGUMENTS[phase]) for phase in PHASES]
BARE_SLICE = [slice_writer(phase, ()) for phase in PHASES]
INTERVAL = slice_writer("interval", ("number", "cpu_ms"))


def single(time: int, phase: Phase, a: int = NONE) -> np.ndarray:
    """One mark, [1] MARK."""
    return np.array([(time, PHASES.index(phase), a, NONE)], MARK)


@dataclass
class Lane:
    """A process's lane in the file."""

    name: str
    number: int
    reader: LaneReader
    open: np.ndarray = field(default_factory=lambda: single(0, "start"))
    """The mark whose phase has not ended yet, [1] MARK. Before its first, a process is coming up."""
    lost: int = 0
    """Marks that were overwritten before they were read."""

    def slices(self, origin: int | None, until: int | None) -> list[str]:
        """What has been marked since the last call, as slices from one mark to the next: a microsecond for each.

        Nothing before ``origin`` is shown, and nothing at all without one. The last mark's phase lasts until the next
        call, or else, like everything, ``until`` there.
        """
        marks, lost = self.reader.take()
        if lost:
            self.lost += lost
            self.open = single(int(self.open["time"][0]), "lost", lost)
        marks = np.concatenate([self.open, marks])
        self.open = marks[-1:]
        if origin is None:
            return []
        if until is not None:
            marks = np.append(marks, single(until, "gone"))
        times = np.clip(marks["time"], origin, until) - origin
        # A nanosecond short: Perfetto cuts off what its arithmetic leaves of the last one, and must not see an overlap
        starts, lengths = times[:-1] / 1000, (np.diff(times) - 1) / 1000
        numbers = (marks[name][:-1].tolist() for name in ("phase", "a", "b"))
        return [
            (SLICE if a != NONE else BARE_SLICE)[phase](self.number, start, length, a, b)
            for start, length, phase, a, b in zip(starts.tolist(), lengths.tolist(), *numbers)
            if length >= 0
        ]


class TraceFile:
    """The file, and how far it has come. One that can't be written to any more is given up: the run goes on."""

    def __init__(
        self, config: AnyConfig, layout: Layout, arena: Arena, interval: int, note: Callable[[str], None]
    ) -> None:
        """Open ``--trace``.

        Args:
            config: the run's configuration.
            layout: its processes.
            arena: with the rings of :func:`lanes`.
            interval: the first that will begin.
            note: takes sentences for the person.

        Raises:
            ConfigError: the file can't be made.
        """
        output = config.output
        assert output.trace is not None
        self._path, self._note = output.trace, note
        self._on = arena.views("trace").on
        self._on[0] = 1
        names = list(lanes(layout, config.runtime.sync_interval))
        self._lanes = [Lane(name, number, LaneReader(arena, name)) for number, name in enumerate(names, start=1)]
        self._first = interval + output.trace_after
        self._end = self._first + output.trace_intervals
        # Where no interval is left out, the start is shown, too
        self._origin = None if output.trace_after else time.perf_counter_ns()
        self._running: tuple[int, int] | None = None  # an interval that is shown, and when it began
        self._size = 0
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"{self._path} can't be written: {_reason(error)}") from None
        self._write("[\n" + ",\n".join(metadata(config, names)))

    def begun(self, j: int, at: int) -> None:
        """Interval ``j`` began ``at`` (nanoseconds), or would have if the run went on: write what happened before."""
        if self._fd < 0:
            return
        mark("trace")
        if j == self._first and self._origin is None:
            self._origin = at
        used = {lane.name: round(lane.reader.cpu_ns() / 1e6, 3) for lane in self._lanes}
        ended = []
        if self._running is not None and self._origin is not None:
            number, began = self._running
            ended = [INTERVAL(0, (began - self._origin) / 1000, (at - began - 1) / 1000, number, json.dumps(used))]
        self._running = (j, at) if j >= self._first else None
        self._append(ended, until=at if j == self._end else None)
        if j == self._end:
            self._close()
        elif self._size > MOST_BYTES:
            self._note(f"{self._path} has grown to {self._size / 2**30:.1f} GiB: the timeline ends here")
            self._close()

    def close(self) -> None:
        """The run has ended: write what is left. Safe to call twice."""
        if self._fd >= 0:
            self._append([], until=time.perf_counter_ns())
            if self._origin is None:
                self._note(f"{self._path} is empty: the run ended within the intervals that --trace-after leaves out")
            self._close()
        close_lane()

    def _append(self, events: list[str], until: int | None) -> None:
        """Write ``events`` and what the processes did since the last time; ``until`` says that this is the end."""
        slices = [text for lane in self._lanes for text in lane.slices(self._origin, until)]
        self._write("".join(f",\n{text}" for text in (*events, *slices)))

    def _write(self, text: str) -> None:
        """Write ``text`` whole or not at all."""
        data = text.encode()
        try:
            written = os.write(self._fd, data)
            while written < len(data):  # the disk is full: a second attempt says so
                written += os.write(self._fd, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self._note(f"no more timeline in {self._path}, the run goes on: {_reason(error)}")
            self._give_up()
        else:
            self._size += len(data)

    def _close(self) -> None:
        """End the file; from now on a mark costs next to nothing."""
        lost = sum(lane.lost for lane in self._lanes)
        if lost:
            self._note(f"{self._path} lacks {lost} marks that came too fast to be read: its slices called 'lost'")
        if self._fd >= 0:
            self._write("\n]\n")
            self._give_up()

    def _give_up(self) -> None:
        self._on[0] = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def metadata(config: AnyConfig, names: list[str]) -> list[str]:
    """Events that name the run and its lanes, in the order in which they are to be shown."""
    runtime = config.runtime
    size = f"{runtime.num_envs} replicas x {runtime.sync_interval} steps"
    title = f"{config.algo} on {config.env}, {runtime.schedule}, {size}"

    def named(kind: str, number: int, **values: str | int) -> str:
        return json.dumps({"ph": "M", "name": kind, "pid": 1, "tid": number, "args": values})

    events = [named("process_name", 0, name=title)]
    for number, name in enumerate(["interval", *names]):
        events += [named("thread_name", number, name=name), named("thread_sort_index", number, sort_index=number)]
    return events


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
