"""Timelines: what a process is doing, as marks in a ring of its own in shared memory.

A mark says "from now on I am in this phase": one look at the clock and one write, about 0.3 microseconds, without
allocation or lock. All processes of a host share the clock (CLOCK_MONOTONIC). In a run that isn't traced a mark is a
call that does nothing. The run reads the rings once per interval (``htsrl.trace``).
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from contextvars import ContextVar
from typing import Literal, Protocol

import numpy as np

from htsrl.storage.fields import MARK, trace_field_names
from htsrl.storage.memory import Arena

Phase = Literal[
    "start", "gone", "lost", "wait", "barrier",
    "replay", "open", "step", "reset", "check",
    "load", "find", "gather", "infer", "scatter", "post",
    "returns", "shuffle", "gradient", "optimizer", "summary",
    "digest", "report", "checkpoint", "noise", "count", "evaluation", "publish", "trace",
]  # fmt: skip

ARGUMENTS: dict[Phase, tuple[str, ...]] = {
    # Every process: comes up; has died and isn't replaced yet; made marks that were overwritten before they were read;
    # waits for answers, or for observations to answer; waits at the barrier.
    "start": (),
    "gone": (),
    "lost": ("marks",),
    "wait": (),
    "barrier": (),
    # Executor: brings a replica to where it stands; opens the interval's rows; steps a group's replicas, in which a
    # replica may begin its next episode (the rest of the step has no arguments); looks for NaN after the last row.
    "replay": ("replica",),
    "open": (),
    "step": ("group", "row"),
    "reset": ("replica",),
    "check": (),
    # Actor: takes new parameters; looks up the rows of the groups that wait; collects rows into a batch; forward pass
    # and sampling; writes the answers; tells the executors.
    "load": ("version",),
    "find": ("groups",),
    "gather": ("rows",),
    "infer": ("rows",),
    "scatter": ("rows",),
    "post": ("groups",),
    # Learner: last value row, returns and advantages; deals out the rows of an epoch; forward, backward and clipping of
    # a minibatch; its application; reads the metrics back (on a GPU, waits for it) and joins the parameters.
    "returns": (),
    "shuffle": ("epoch",),
    "gradient": ("epoch", "minibatch"),
    "optimizer": ("epoch", "minibatch"),
    "summary": (),
    # The run, in the learner's thread: digest of the trajectory; log files and terminal; checkpoint; noise of an
    # interval; accounts at the barrier; hands parameters to the evaluator; publishes; writes the timeline itself.
    "digest": (),
    "report": (),
    "checkpoint": (),
    "noise": ("interval",),
    "count": (),
    "evaluation": (),
    "publish": ("interval",),
    "trace": (),
}
"""Every phase, and what its numbers are called."""
PHASES = list(ARGUMENTS)
"""A phase's place here is its code in a mark."""
_PROCESS_CLOCK = 2
"""Linux's clock of a process's CPU time is ``~pid << 3 | 2``, see clock_getcpuclockid(3)."""
NONE = -1
"""A mark's number that means nothing."""


class Mark(Protocol):
    """From now on this process is in ``phase``; ``a`` and ``b`` are its ARGUMENTS."""

    def __call__(self, phase: Phase, a: int = NONE, b: int = NONE) -> None: ...


def unmarked(phase: Phase, a: int = NONE, b: int = NONE) -> None:
    """The mark of a run that isn't traced."""


_current: ContextVar[Mark] = ContextVar("mark", default=unmarked)


def mark(phase: Phase, a: int = NONE, b: int = NONE) -> None:
    """Mark the lane that this thread has opened; without one, nothing."""
    _current.get()(phase, a, b)


def open_lane(arena: Arena, lane: str) -> Mark:
    """Make ``lane`` that of this thread, for :func:`mark`; returns the same without the detour, for hot loops."""
    own = lane_mark(arena, lane)
    if own is not unmarked:
        getattr(arena.views("trace"), trace_field_names(lane)[2])[0] = os.getpid()
    _current.set(own)
    return own


def close_lane() -> None:
    """This thread has no lane any more."""
    _current.set(unmarked)


def lane_mark(arena: Arena, lane: str) -> Mark:
    """A function that marks ``lane``, which has one writer at a time; goes on after the marks that are there."""
    if "trace" not in arena.fields:
        return unmarked
    views = arena.views("trace")
    ring, made, _ = (getattr(views, name) for name in trace_field_names(lane))
    capacity, size = len(ring), MARK.itemsize
    bytes_of_ring, counter, on = memoryview(ring.view(np.uint8)), memoryview(made), memoryview(views.on)
    number = int(counter[0])
    codes = {phase: code for code, phase in enumerate(PHASES)}
    write, clock = struct.Struct("=qiii").pack_into, time.perf_counter_ns

    def own(phase: Phase, a: int = NONE, b: int = NONE) -> None:
        nonlocal number
        if on[0]:
            write(bytes_of_ring, number % capacity * size, clock(), codes[phase], a, b)
            number += 1
            counter[0] = number  # only now does a reader see it

    return own


class LaneReader:
    """The run's end of a lane: what has been marked since it looked last."""

    def __init__(self, arena: Arena, lane: str) -> None:
        views = arena.views("trace")
        self._ring, self._made, self._pid = (getattr(views, name) for name in trace_field_names(lane))
        self._taken = int(self._made[0])
        self._cpu = (0, 0)  # a process, and what it had used when it was looked at

    def take(self) -> tuple[np.ndarray, int]:
        """New marks [K] MARK in their order, and how many before them were overwritten since the last call.

        The writer may go on meanwhile.
        """
        capacity = len(self._ring)
        end = int(self._made[0])
        first = max(self._taken, end - capacity)
        marks = self._ring[np.arange(first, end) % capacity]
        # What the writer has reached since, or is writing at this moment, isn't what was read
        sound = min(max(first, int(self._made[0]) + 1 - capacity), end)
        lost, self._taken = sound - self._taken, end
        return marks[sound - first :], lost

    def cpu_ns(self) -> int:
        """CPU time in nanoseconds that the lane's process, with all its threads, has used since the last call."""
        pid, used = int(self._pid[0]), 0
        if pid:
            with contextlib.suppress(OSError):  # it is gone
                used = time.clock_gettime_ns((~pid << 3) | _PROCESS_CLOCK)
        before = self._cpu[1] if self._cpu[0] == pid else 0
        self._cpu = (pid, used)
        return max(used - before, 0)
