"""Scripted faults: a process kills or stops itself at an exact point of the protocol, and nothing else is changed.

The protocol is counters and messages, so its points are the stores and posts that a process makes. :func:`scripted`
hands executors and actors ports whose arrays and pipe ends pass a point before and after each of these; what runs on
them is the real body. The run's own process passes a point before and after the calls that :func:`run_process` names.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from htsrl import envs, processes
from htsrl.actors.ports import ActorPorts, ExecutorPorts
from htsrl.config import AnyConfig
from htsrl.digests import Trail
from htsrl.run import Run
from htsrl.verify import WatchedReporter, WatchedRun, prepare, temporary_run_dir

WATCHED = {"control": ("posted", "stepped", "finished", "answered"), "even": ("reward", "action")}
WATCHED["odd"] = WATCHED["even"]


@dataclass(frozen=True)
class Fault:
    """Strikes process ``index`` of ``role`` when it passes ``point`` for the ``count``-th time.

    Points of an executor or actor are 'before X' and 'after X', X being a store to a counter (posted, stepped,
    finished, answered) or to a row (reward, action), a message (request, answer, barrier) or a kind of report (ready,
    progress, environment); 'after take'; and 'before body'. Points of the run are 'before X' and 'after X', X being a
    call, 'module:function' or 'module:Class.method', and maybe a word that must stand in its arguments.
    """

    role: str
    point: str
    count: int = 1
    index: int = 0
    number: int = signal.SIGKILL
    life: int = 1
    """The first process that it strikes: 2 is the one that takes the place of the first."""
    times: int = 1
    """How many processes in a row it strikes."""

    def __str__(self) -> str:
        how = "" if self.number == signal.SIGKILL else f" {signal.Signals(self.number).name}"
        lives = f" in life {self.life}" if self.life > 1 else ""
        return f"{self.role} {self.index} {self.point} #{self.count}{how}{lives}" + " again" * (self.times - 1)


# ------------------------------------------------------------------------------------------------ executors and actors


@dataclass(frozen=True)
class FaultyPorts:
    """What a child is given: the real body, its ports, its faults and a folder that gets a file for every strike."""

    body: Callable[[Any], None]
    ports: Any
    faults: list[Fault]
    strikes: Path
    doubled: bool
    environ: dict[str, str]


@contextmanager
def scripted(strikes: Path, *faults: Fault, doubled: bool = False, **environ: str) -> Iterator[None]:
    """Executors and actors that are started meanwhile follow the script.

    ``doubled`` sends each message twice; ``environ`` are variables that the processes get.
    """
    start = processes.start
    lives: Counter[tuple[str, int]] = Counter()

    def start_faulty(body: Callable[[Any], None], ports: Any, name: str) -> Any:
        if not isinstance(ports, ExecutorPorts | ActorPorts):
            return start(body, ports, name)
        who = role_of(ports), ports.index
        lives[who] += 1
        own = [f for f in faults if (f.role, f.index) == who and f.life <= lives[who] < f.life + f.times]
        return start(run_faulty, FaultyPorts(body, ports, own, strikes, doubled, environ), name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start", start_faulty)
        yield


def role_of(ports: ExecutorPorts | ActorPorts) -> str:
    return "executor" if isinstance(ports, ExecutorPorts) else "actor"


def run_faulty(given: FaultyPorts) -> None:
    """Body of an executor or actor that follows a script."""
    os.environ.update(given.environ)
    ports, points = given.ports, Points(given.faults, given.strikes)

    def watched(end: Any, name: str) -> WatchedEnd:
        return WatchedEnd(end, points, name, given.doubled)

    points.passed("before body")
    ports = replace(
        ports,
        arena=WatchedArena(ports.arena, points),
        inbox=watched(ports.inbox, "take"),
        lines=replace(ports.lines, reports=WatchedReports(ports.lines.reports, points)),
    )
    if role_of(ports) == "executor":
        requests = [watched(end, "request") for end in ports.actors]
        ports = replace(ports, actors=requests, barrier=watched(ports.barrier, "barrier"))
    else:
        ports = replace(ports, executors=[watched(end, "answer") for end in ports.executors])
    given.body(ports)


class Points:
    """Counts the points that this process passes, and strikes it where a fault says so."""

    def __init__(self, faults: list[Fault], strikes: Path) -> None:
        self.faults, self.strikes = faults, strikes
        self.seen: Counter[str] = Counter()

    def passed(self, point: str) -> None:
        self.seen[point] += 1
        for fault in self.faults:
            if fault.point == point and fault.count == self.seen[point]:
                (self.strikes / f"{fault} {os.getpid()}").touch()
                os.kill(os.getpid(), fault.number)


class WatchedArray(np.ndarray):
    """Passes a point before and after every store; views of it do, too."""

    def __array_finalize__(self, source: Any) -> None:
        self.points = getattr(source, "points", None)
        self.name = getattr(source, "name", "")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.points.passed(f"before {self.name}")
        super().__setitem__(key, value)
        self.points.passed(f"after {self.name}")


class WatchedArena:
    """Shared memory whose WATCHED arrays are watched."""

    def __init__(self, arena: Any, points: Points) -> None:
        self.arena, self.points = arena, points

    def __getattr__(self, name: str) -> Any:
        return getattr(self.arena, name)

    def views(self, group: str) -> Any:
        views = self.arena.views(group)
        for name in WATCHED.get(group, ()):
            array = getattr(views, name).view(WatchedArray)
            array.points, array.name = self.points, name
            setattr(views, name, array)
        return views


class WatchedEnd:
    """An end of a mailbox."""

    def __init__(self, end: Any, points: Points, name: str, doubled: bool) -> None:
        self.end, self.points, self.name, self.doubled = end, points, name, doubled

    def take(self) -> list[int]:
        numbers = self.end.take()
        self.points.passed("after take")
        return numbers

    def post(self, *numbers: int) -> None:
        self.points.passed(f"before {self.name}")
        self.end.post(*numbers)
        self.points.passed(f"after {self.name}")
        if self.doubled:
            self.end.post(*numbers)


class WatchedReports:
    """The pipe of reports."""

    def __init__(self, reports: Any, points: Points) -> None:
        self.reports, self.points = reports, points

    def send_bytes(self, data: bytes) -> None:
        kind = json.loads(data)["kind"]
        self.points.passed(f"before {kind}")
        self.reports.send_bytes(data)
        self.points.passed(f"after {kind}")


# ---------------------------------------------------------------------------------------------------------- the run


@contextmanager
def fault_once(path: Path) -> Iterator[None]:
    """Have faulty environments strike once: children inherit the environment of the fork server, here of a new one."""
    forkserver._forkserver._stop()
    os.environ["FAULT_ONCE"] = str(path)
    try:
        yield
    finally:
        del os.environ["FAULT_ONCE"]
        forkserver._forkserver._stop()


def launch_quick_server() -> None:
    """Launch a fork server that has loaded what any child loads, torch, too: each starts in a blink."""
    forkserver._forkserver._stop()
    loaded = ("actors.actor", "training", "envs.gymnasium_env", "envs.atari", "envs.football")
    names = ["htsrl.nursery", "torch._inductor.config", *(f"htsrl.{name}" for name in loaded)]
    multiprocessing.set_forkserver_preload(names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


def run_process(given: tuple[Callable[..., Any], tuple, Fault, Path]) -> None:
    """Body of a process that calls ``function(*arguments)`` and passes the point of one fault."""
    function, arguments, fault, strikes = given
    # Its own children come from the fork server from which it came itself
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    watch_call(fault.point.split(" ", 1)[1], Points([fault], strikes))
    function(*arguments)


def watch_call(name: str, points: Points) -> None:
    """Have calls pass the points 'before ``name``' and 'after ``name``'."""
    target, _, word = name.partition(" ")
    module, path = target.split(":")
    *outer, attribute = path.split(".")
    owner: Any = import_module(module)
    for each in outer:
        owner = getattr(owner, each)
    call = getattr(owner, attribute)

    @wraps(call)
    def watched(*arguments: Any, **options: Any) -> Any:
        if word not in repr(arguments):
            return call(*arguments, **options)
        points.passed(f"before {name}")
        outcome = call(*arguments, **options)
        points.passed(f"after {name}")
        return outcome

    setattr(owner, attribute, watched)


# ------------------------------------------------------------------------------------------------------ runs to disturb


@contextmanager
def watched(config: AnyConfig) -> Iterator[Run]:
    """A run of ``config`` that keeps what it does."""
    spec = envs.describe(config.env, config.environment)
    config = prepare(config, spec)
    with (
        temporary_run_dir() as run_dir,
        closing(WatchedReporter(config, spec, run_dir)) as reporter,
        WatchedRun(config, spec, run_dir, reporter) as run,
    ):
        yield run


def trail_of(run: Run) -> tuple[Trail, int]:
    """Train to the end: what the run does, and how many processes were replaced."""
    run.train(threading.Event())
    assert run.result.values["reproducible"]
    return Trail(run.reporter.records, run.rows), run.result.values["recovered"]


@contextmanager
def meanwhile(run: Run, steps: int, action: Callable[[Run], None]) -> Iterator[None]:
    """Call ``action(run)`` in a thread as soon as the run's groups have made ``steps`` steps."""
    failed: list[BaseException] = []
    over = threading.Event()

    def wait_and_act() -> None:
        while run.control.stepped.sum() < steps:
            if over.wait(0.001):
                return
        try:
            action(run)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failed, failed
