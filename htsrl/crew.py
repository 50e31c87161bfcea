"""The crew of a run: starts executors and actors, replaces those that fail, and ends them all.

One supervisor thread waits, without polling, on every child and on the barrier, also while the learner computes. A
child that dies or hangs is replaced where it stood: an executor replays the current episodes of its replicas, an actor
is given the unanswered groups again. Counters in shared memory say where that is; an answer is a function of row,
parameters and noise, and a step of seed and actions, so that whatever is done twice gives the same bits.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from htsrl import processes
from htsrl.actors.actor import run_actor
from htsrl.actors.executor import run_executor
from htsrl.actors.mailbox import LOOK, STOP, mailbox
from htsrl.actors.ports import ActorPorts, ExecutorPorts, Lines
from htsrl.actors.reports import Stack
from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.errors import EnvironmentFailed, RunFailed
from htsrl.storage.episodes import EpisodeLog, EpisodeLogs
from htsrl.storage.layout import Layout
from htsrl.storage.memory import Arena
from htsrl.storage.observations import observation
from htsrl.storage.snapshots import SnapshotFile
from htsrl.storage.trace import lane_mark

STOP_TIMEOUT_S = 5.0
MEMORY_EVERY_S = 10.0
# A reported failure that comes back at the same step would come back for ever. Whoever kills processes from outside may
# strike twice before one has made a step.
SAME_PLACE_LIMIT = {"reported": 2, "silent": 4}


@dataclass
class Child:
    """A process of the crew, the line on which it reports, and when it last made progress."""

    role: str
    index: int
    process: BaseProcess
    pidfd: int
    """Becomes readable when the process ends, and never means another process; see :func:`end_of`."""
    reports: Connection
    stack: Stack
    ready: bool = False
    fault: dict[str, Any] | None = None
    """Its report of why it can't go on."""
    progress: int = 0
    since: float = field(default_factory=time.monotonic)
    reminded: bool = False
    """Its messages were sent again since."""
    started: float = field(default_factory=time.monotonic)
    start_s: float = 0.0
    """How long it took to get ready."""
    leaving: bool = False
    """It is to end, and not to be replaced."""

    def __str__(self) -> str:
        return f"{self.role} {self.index}"

    def kill(self) -> None:
        """Kill it and wait until it is gone."""
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except OSError:
            return
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        poll.poll()

    def close(self) -> None:
        """Release what the run holds of a process that has ended."""
        processes.join(self.process)
        self.process.close()
        self.reports.close()
        self.stack.close()
        os.close(self.pidfd)


def end_of(process: BaseProcess) -> int:
    """A descriptor that becomes readable when ``process`` ends: its pidfd, or another if it has ended already."""
    assert process.pid is not None
    try:
        return os.pidfd_open(process.pid)
    except ProcessLookupError:
        return os.dup(process.sentinel)


class Crew:
    """All child processes of one run."""

    executor_body = staticmethod(run_executor)
    actor_body = staticmethod(run_actor)

    def __init__(
        self,
        config: AnyConfig,
        spec: EnvSpec,
        layout: Layout,
        arena: Arena,
        logs: EpisodeLogs,
        delay_ms: float = 0.0,
        most_executors: int = 0,
    ) -> None:
        """Create the pipes and start every process; they come up in parallel. See :meth:`await_ready`.

        Args:
            config: the run's configuration.
            spec: its environment.
            layout: who serves which column.
            arena: all shared memory.
            logs: where the replicas stand; read again whenever an executor is replaced.
            delay_ms: longest injected pause, see :mod:`htsrl.actors.delays`.
            most_executors: of a layout that it may change to, see :meth:`rearrange`.
        """
        self.changes = threading.Condition()
        """Hold it while the interval changes: a child is replaced either before or after that."""
        self.recovered = 0
        """Processes that were replaced."""
        self.reproducible = True
        """False once a replay led to another observation than before."""
        self.snapshots = SnapshotFile()
        """What the executors have published of their environments."""
        self._config, self._spec, self._layout, self._arena, self._logs = config, spec, layout, arena, logs
        self._delay_ms = delay_ms
        self._control = arena.views("control")
        self._up = False
        self._measured_at = -math.inf
        self._looked_at = time.monotonic()
        self._failure: RunFailed | None = None
        self._stopping = False
        self._events: list[str] = []
        self._notes: set[str] = set()
        self._failed_at: Counter[Hashable] = Counter()

        self._prepare()

        # All edges of the process graph
        self._to_executor = [mailbox() for _ in range(max(layout.num_executors, most_executors))]
        self._to_actor = [mailbox() for _ in range(layout.num_actors)]
        self._barrier, self._at_barrier = mailbox()
        self._wake, self._waker = mailbox()

        self.children: list[Child] = []
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        try:
            self._start_missing()
            self._supervisor.start()
        except BaseException:
            self.stop()
            raise

    # ------------------------------------------------------------------------------------------- for the main thread

    def await_ready(self) -> None:
        """Wait until every process is ready to work; a start that can't finish says who did not come up, and why."""
        with self.changes:
            while not all(child.ready for child in self.children):
                self.check()
                self.changes.wait()
            self.check()
            self._up = True

    def begin_interval(self) -> None:
        """Let the executors begin the interval that the control block announces."""
        for _, post in self._to_executor[: self._layout.num_executors]:
            post.post(LOOK)

    def await_barrier(self) -> None:
        """Wait until every executor has completed the current interval."""
        with self.changes:
            own = slice(self._layout.num_executors)
            while not (self._control.finished[own] > self._control.interval[0]).all():
                self.check()
                self.changes.wait()
            self.check()

    def rearrange(self, layout: Layout) -> None:
        """Go on in another layout: between two intervals, when nobody works. Returns when every process is ready.

        The executors end, and those of ``layout`` begin where the logs stand, as after a stop. Actors, which take the
        longest to start, stay, as far as it has as many; between them, they find the groups in the control block.
        """
        with self.changes:
            for child in self.children:
                child.leaving = child.role == "executor" or child.index >= layout.num_actors
                boxes = self._to_executor if child.role == "executor" else self._to_actor
                if child.leaving and child.ready:
                    boxes[child.index][1].post(STOP)
                elif child.leaving:  # it can't hear yet
                    child.kill()

            def gone() -> bool:
                self.check()
                return not any(child.leaving for child in self.children)

            if not self.changes.wait_for(gone, STOP_TIMEOUT_S):
                for child in self.children:
                    if child.leaving:
                        child.kill()
                self.changes.wait_for(gone)
            for inbox, _ in (*self._to_executor, *self._to_actor[layout.num_actors :]):
                inbox.drop()  # one that was killed may not have read that it should stop
            self._layout = layout
            self._start_missing()
            self._waker.post(LOOK)  # the supervisor waits on others now
        self.await_ready()

    def start_seconds(self, layout: Layout) -> float:
        """How long :meth:`rearrange` may take, by how long processes like those that it starts took to get ready."""
        with self.changes:
            executors = [child.start_s for child in self.children if child.role == "executor"]
            actors = [child.start_s for child in self.children if child.role == "actor"]
        return max(executors + (actors if layout.num_actors > self._layout.num_actors else []), default=0.0)

    def check(self) -> None:
        """Raise the failure that ends the run, if there is one; from any thread."""
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise RunFailed("the run is being stopped")

    def take_events(self) -> list[str]:
        """What a person should know of recoveries since the last call."""
        with self.changes:
            events, self._events = self._events, []
        return events

    def memory(self) -> dict[str, float]:
        """Proportional set size in MiB, of this process and summed over each role; looked up every ten seconds."""
        now = time.monotonic()
        if now - self._measured_at < MEMORY_EVERY_S:
            return {}
        self._measured_at = now
        totals: Counter[str] = Counter()
        with self.changes:
            processes_by_role = [("run", os.getpid()), *((child.role, child.process.pid) for child in self.children)]
        for role, pid in processes_by_role:
            with contextlib.suppress(psutil.Error):
                totals[f"memory/{role}_mb"] += psutil.Process(pid).memory_full_info().pss / 2**20
        return dict(totals)

    def stop(self) -> None:
        """End every process: those that don't leave when asked, or can't hear yet, are killed. Safe to call twice."""
        with self.changes:
            if self._stopping:
                return
            self._stopping = True
        for _, post in (*self._to_executor, *self._to_actor):
            post.post(STOP)
        self._waker.post(STOP)
        if self._supervisor.ident is not None:
            self._supervisor.join()
        for child in self.children:
            if not child.ready:
                child.kill()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        waiting = {child.pidfd for child in self.children}
        while waiting and time.monotonic() < deadline:
            waiting -= set(wait(list(waiting), deadline - time.monotonic()))
        for child in self.children:
            child.kill()
            child.close()
        self.snapshots.close()
        ends = (self._barrier, self._at_barrier, self._wake, self._waker)
        for end in (*ends, *(end for pair in (*self._to_executor, *self._to_actor) for end in pair)):
            end.close()

    # ---------------------------------------------------------------------------------------------------- the children

    def _prepare(self) -> None:
        """Make what another kind of crew needs beside this one's, before any process begins."""

    def _start_missing(self) -> None:
        """Start what the layout has, where the logs stand; actors that are there stay."""
        self._control.layout[:] = self._layout.numbers
        self._to_actor += [mailbox() for _ in range(len(self._to_actor), self._layout.num_actors)]
        present = {child.index for child in self.children}
        for a in range(self._layout.num_actors):
            if a not in present:
                self.children.append(self._start_actor(a))
        standing = dict(enumerate(self._logs.logs))
        for e in range(self._layout.num_executors):
            self.children.append(self._start_executor(e, standing))

    def _start_executor(self, e: int, logs: dict[int, EpisodeLog]) -> Child:
        def ports(lines: Lines) -> ExecutorPorts:
            return ExecutorPorts(
                index=e,
                arena=self._arena,
                layout=self._layout,
                spec=self._spec,
                options=self._config.environment,
                squash_actions=self._config.network.squash_actions,
                seed=self._config.seed,
                sync_interval=self._config.runtime.sync_interval,
                logs=[logs[n] for n in self._layout.executor_columns[e]],
                snapshots=self.snapshots,
                inbox=self._to_executor[e][0],
                actors=[post for _, post in self._to_actor[: self._layout.num_actors]],
                barrier=self._at_barrier,
                lines=lines,
                delay_ms=self._delay_ms,
            )

        return self._start("executor", e, self.executor_body, ports)

    def _start_actor(self, a: int) -> Child:
        def ports(lines: Lines) -> ActorPorts:
            return ActorPorts(
                index=a,
                arena=self._arena,
                num_envs=self._layout.num_envs,
                spec=self._spec,
                network=self._config.network,
                seed=self._config.seed,
                sync_interval=self._config.runtime.sync_interval,
                lockstep=self._config.runtime.schedule == "sync",
                device=self._config.runtime.device,
                inbox=self._to_actor[a][0],
                executors=[post for _, post in self._to_executor],
                lines=lines,
                delay_ms=self._delay_ms,
            )

        return self._start("actor", a, self.actor_body, ports)

    def _start(self, role: str, index: int, body: Callable, ports: Callable[[Lines], Any]) -> Child:
        reports, report = multiprocessing.Pipe(duplex=False)
        stack = Stack()
        try:
            process = processes.start(body, ports(Lines(report, stack)), f"{role}-{index}")
        except RunFailed:
            stack.close()
            raise
        report.close()
        return Child(role, index, process, end_of(process), reports, stack)

    # ------------------------------------------------------------------------------------------------- the supervisor

    def _supervise(self) -> None:
        """Wait on every child and on the barrier until the run stops."""
        while not self._stopping and self._failure is None:
            try:
                lines = {child.reports: child for child in self.children if not child.reports.closed}
                ended = {child.pidfd: child for child in self.children}
                waited: list[Any] = [self._barrier, self._wake, *lines, *ended]
                patience = self._patience()
                events = wait(waited, patience)
                with self.changes:
                    if self._stopping:
                        return
                    if self._wake in events:
                        self._wake.take()
                    if self._barrier in events:
                        self._arrived(self._barrier.take())
                    for event in events:
                        if event in lines:
                            self._hear(lines[event])
                    for event in events:
                        if event in ended:
                            self._replace(ended[event])
                    self._kill_hung(patience)
            except RunFailed as failure:
                self._failure = failure
            except Exception as error:
                self._failure = RunFailed(f"the supervisor of executors and actors failed: {error!r}")
            finally:
                with self.changes:
                    self.changes.notify_all()

    def _arrived(self, numbers: list[int]) -> None:
        """Take in what executors post: here that they are at the barrier, which their counters say, too."""

    def _hear(self, child: Child) -> None:
        """Take in one report of a child."""
        try:
            report = json.loads(child.reports.recv_bytes())
        except (EOFError, OSError):
            child.reports.close()
            return
        if report["kind"] == "ready":
            child.ready = True
            child.since = time.monotonic()
            child.start_s = child.since - child.started
        elif report["kind"] == "progress":
            child.since = time.monotonic()
        elif report["kind"] == "unreproducible":
            if self.reproducible:
                self._events.append(
                    f"{self._spec.env_id} does not repeat itself: replaying seed and actions led replica "
                    f"{report['replica']} to another observation; such replicas begin a new episode, and this run is "
                    "marked as not reproducible"
                )
            self.reproducible = False
        elif report["kind"] == "note":
            if report["text"] not in self._notes:
                self._notes.add(report["text"])
                self._events.append(report["text"])
        else:
            child.fault = report
            child.kill()  # it ends by itself, unless it is stopped first

    def _replace(self, child: Child) -> None:
        """Put a new process in the place of one that has ended.

        Raises:
            RunFailed: it failed in a way that comes back, or too often.
        """
        while not child.reports.closed and child.reports.poll():
            self._hear(child)
        if child.leaving:
            self._bury(child)
            return
        reason = self._reason(child)
        if self._restoring(child):  # then it is no failure of the run
            self._logs.forget_snapshots(self._layout.executor_columns[child.index])
            how = "replaced by one that replays episodes instead of going on from snapshots"
        else:
            how = "replaced, and going on"
            self._count_failure(child, reason)
        self._events.append(f"{str(reason).splitlines()[0].rstrip(':')}; {how}")
        self._bury(child)
        if child.role == "executor":
            self.children.append(self._start_executor(child.index, self._standing(child.index)))
        else:
            self.children.append(self._start_actor(child.index))
            # Whatever may have been lost with its predecessor
            for other in self.children:
                self._remind(other)

    def _bury(self, child: Child) -> None:
        """Let go of a process that has ended."""
        child.kill()
        child.close()
        lane_mark(self._arena, str(child))("gone")
        self.children.remove(child)

    def _restoring(self, child: Child) -> bool:
        """Whether ``child`` has not come up yet from snapshots of environments, which may be what ended it."""
        if child.role != "executor" or child.ready:
            return False
        return any(self._logs.logs[n].snapshot is not None for n in self._layout.executor_columns[child.index])

    def _count_failure(self, child: Child, reason: RunFailed) -> None:
        """Raise ``reason`` if it comes back, or if there have been too many."""
        place, kind = self._place(child)
        _, idle = self._progress(child)
        if kind == "reported" or not idle or not child.ready:  # one that had nothing to do did not fail at it
            self._failed_at[place] += 1
        if (child.fault or {}).get("kind") == "internal":
            raise reason
        times, most = self._failed_at[place], self._config.runtime.max_restarts
        if times >= SAME_PLACE_LIMIT[kind]:
            raise type(reason)(
                f"{reason}\nThis was failure {times} at the same place: one more try would end there, too"
            )
        if self.recovered >= most:
            raise type(reason)(f"{reason}\nNo more restarts: {self.recovered} have been made (--max-restarts {most})")
        self.recovered += 1

    def _standing(self, e: int) -> dict[int, EpisodeLog]:
        """Where the replicas of executor ``e`` stand, which has just ended."""
        T = self._config.runtime.sync_interval
        storage = self._arena.views(("even", "odd")[self._logs.interval % 2])
        standing = {}
        for g in self._layout.executor_groups[e]:
            # The logs may be those of the next interval's start already
            row = int(self._control.stepped[g]) - self._logs.interval * T
            for n in self._layout.groups[g]:
                standing[n] = self._logs.as_of(storage, n, row)
                if standing[n].last_obs is None and self._control.posted[g] > self._logs.interval * T:
                    standing[n] = replace(standing[n], last_obs=observation(storage, 0, n))
        return standing

    def _remind(self, child: Child) -> None:
        """Have ``child`` look at the counters of all its groups: a message may be lost with who should have sent it."""
        if child.role == "actor":
            self._to_actor[child.index][1].post(*(self._layout.actor_of == child.index).nonzero()[0].tolist())
        else:
            self._to_executor[child.index][1].post(*self._layout.executor_groups[child.index])

    def _limit(self, child: Child) -> float | None:
        """For how many seconds ``child`` may show no progress."""
        runtime = self._config.runtime
        return runtime.step_timeout if child.ready else runtime.start_timeout

    def _patience(self) -> float | None:
        """For how many seconds nobody has to be looked after."""
        limits = [limit for child in self.children if (limit := self._limit(child)) is not None]
        return min(limits) / 4 if limits else None

    def _kill_hung(self, patience: float | None) -> None:
        """Kill children that have had something to do for too long without getting anywhere.

        After half of that they are reminded: the one that hangs may be the one that should have told them. ``patience``
        is for how many seconds they were not looked after on purpose.

        Raises:
            RunFailed: the run has not come up yet; the next try would only take as long.
        """
        now = time.monotonic()
        late = now - self._looked_at - (patience or math.inf)
        self._looked_at = now
        hung = []
        for child in self.children:
            # Ctrl-Z or a paused container stopped this process, too: nobody is to blame for that time
            child.since += max(late, 0.0)
            progress, idle = self._progress(child)
            limit = self._limit(child)
            if child.ready and (idle or progress != child.progress):
                child.progress, child.since, child.reminded = progress, now, False
            elif limit is None or child.fault is not None:
                continue
            elif child.ready and now - child.since > limit / 2 and not child.reminded:
                self._remind(child)
                child.reminded = True
            elif now - child.since > limit:
                hung.append(child)
        for child in hung:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, Stack.REQUEST)
        if hung:
            time.sleep(Stack.SECONDS)
        for child in hung:
            child.fault = {"kind": "hung", "seconds": now - child.since, "stack": child.stack.read()}
            child.kill()
        if hung and not self._up and not any(self._restoring(child) for child in hung):
            raise RunFailed("\n".join(str(self._reason(child)) for child in hung))

    def _progress(self, child: Child) -> tuple[int, bool]:
        """A number that grows with a child's work, and whether it has nothing to do."""
        control = self._control
        if child.role == "actor":
            own = (self._layout.actor_of == child.index).nonzero()[0]
            waits = control.answered[own] >= control.posted[own]
            idle = waits.all()
            if self._config.runtime.schedule == "sync":
                # In lock-step one missing group keeps it waiting, unless that has made all its rows
                end = (int(control.interval[0]) + 1) * self._config.runtime.sync_interval
                idle |= (waits & (control.answered[own] < end)).any()
            return int(control.answered[own].sum()), bool(idle)
        return self._executor_progress(child.index)

    def _executor_progress(self, e: int) -> tuple[int, bool]:
        control, own = self._control, self._layout.executor_groups[e]
        finished, interval = int(control.finished[e]), int(control.interval[0])
        start = interval * self._config.runtime.sync_interval
        end = start + self._config.runtime.sync_interval
        posted, answered, stepped = control.posted[own], control.answered[own], control.stepped[own]
        waits = (posted > answered).any() and not ((answered > stepped) | (posted <= start)).any()
        return int((posted + stepped).sum()) + finished, finished > interval or bool(waits and (stepped < end).any())

    def _place(self, child: Child) -> tuple[Hashable, str]:
        """Where a child failed, and whether it said so itself. One that is stopped can't even say where it hangs."""
        fault = child.fault
        if fault is not None and fault["kind"] == "environment":
            return (fault["replica"], fault["episode"], fault["step"]), "reported"
        progress, _ = self._progress(child)
        silent = fault is None or fault.get("stack") == ""
        return (child.role, child.index, progress), "silent" if silent else "reported"

    def _reason(self, child: Child) -> RunFailed:
        """Why a child ended, for the user."""
        fault = child.fault
        if fault is None:
            processes.join(child.process)
            code = child.process.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            hint = " (the system kills processes like this when memory runs out)" if code == -9 else ""
            stack = child.stack.read()  # of a crash in C code
            return RunFailed(f"{child} {how}:\n{stack}" if stack else f"{child} {how} without a word{hint}")
        if fault["kind"] == "hung":
            stack = fault["stack"] or "it could not write its stack: it is stopped, or not in Python yet"
            what = "has made no progress" if child.ready else "did not come up: no sign of life"
            flag = "--step-timeout" if child.ready else "--start-timeout"
            return RunFailed(f"{child} {what} for {fault['seconds']:.0f} s ({flag}):\n{stack}")
        if fault["kind"] == "internal":
            return RunFailed(f"{child} failed:\n{fault['traceback']}")
        action = "" if fault["action"] is None else f", action {fault['action']}"
        return EnvironmentFailed(
            f"{self._spec.env_id} failed in {fault['phase']}: replica {fault['replica']}, episode {fault['episode']}, "
            f"step {fault['step']} (episode seed {fault['seed']}{action}; {child}):\n{fault['traceback']}"
        )
