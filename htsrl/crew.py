"""The crew of a run: starts executors and actors, notices when one fails, and ends them all.

One supervisor thread waits, without polling, on every child and on the barrier, also while the learner computes.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from htsrl import processes
from htsrl.actors.actor import run_actor
from htsrl.actors.executor import run_executor
from htsrl.actors.mailbox import LOOK, STOP, Inbox, Outbox, mailbox
from htsrl.actors.ports import ActorPorts, ExecutorPorts, Lines
from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.errors import EnvironmentFailed, RunFailed
from htsrl.storage.episodes import EpisodeLog
from htsrl.storage.layout import Layout
from htsrl.storage.memory import Arena

# Start-up imports torch and builds environments, 16 football engines at worst; after this long something is wrong.
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 5.0


@dataclass
class Child:
    """A process of the crew and the line on which it reports."""

    role: str
    index: int
    process: BaseProcess
    reports: Connection
    ready: bool = False

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


class Crew:
    """All child processes of one run."""

    def __init__(
        self,
        config: AnyConfig,
        spec: EnvSpec,
        layout: Layout,
        arena: Arena,
        logs: list[EpisodeLog],
        delay_ms: float = 0.0,
    ) -> None:
        """Create the pipes and start every process; they come up in parallel. See :meth:`await_ready`."""
        self._spec = spec
        self._control = arena.views("control")
        self._changed = threading.Condition()
        self._failure: RunFailed | None = None
        self._stopping = False
        self.unreproducible: list[int] = []
        """Replicas whose replay led elsewhere: they began a new episode instead."""

        # All edges of the process graph
        to_executor = [mailbox() for _ in range(layout.num_executors)]
        to_actor = [mailbox() for _ in range(layout.num_actors)]
        self._barrier, at_barrier = mailbox()
        self._lifeline, hold_lifeline = mailbox()
        self._wake, self._waker = mailbox()
        self._inboxes: list[Outbox] = [post for _, post in (*to_executor, *to_actor)]
        self._ends: list[Inbox | Outbox] = [
            self._barrier, at_barrier, self._lifeline, hold_lifeline, self._wake, self._waker,
            *(end for pair in (*to_executor, *to_actor) for end in pair),
        ]  # fmt: skip
        self._executor_posts = [post for _, post in to_executor]

        def executor_ports(e: int, lines: Lines) -> ExecutorPorts:
            return ExecutorPorts(
                index=e,
                arena=arena,
                layout=layout,
                spec=spec,
                options=config.environment,
                seed=config.seed,
                sync_interval=config.runtime.sync_interval,
                logs=[logs[n] for n in layout.executor_columns[e]],
                inbox=to_executor[e][0],
                actors=[post for _, post in to_actor],
                barrier=at_barrier,
                lines=lines,
                delay_ms=delay_ms,
            )

        def actor_ports(a: int, lines: Lines) -> ActorPorts:
            return ActorPorts(
                index=a,
                arena=arena,
                layout=layout,
                spec=spec,
                network=config.network,
                seed=config.seed,
                sync_interval=config.runtime.sync_interval,
                lockstep=config.runtime.schedule == "sync",
                device=config.runtime.device,
                inbox=to_actor[a][0],
                executors=[post for _, post in to_executor],
                lines=lines,
                delay_ms=delay_ms,
            )

        self.children = [self._start("actor", a, run_actor, actor_ports) for a in range(layout.num_actors)]
        self.children += [self._start("executor", e, run_executor, executor_ports) for e in range(layout.num_executors)]
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._supervisor.start()

    # ------------------------------------------------------------------------------------------- for the main thread

    def await_ready(self) -> None:
        """Wait until every process is ready to work; a start that can't finish says who did not come up."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with self._changed:
            while not all(child.ready for child in self.children):
                self._raise_failure()
                if not self._changed.wait(deadline - time.monotonic()):
                    missing = ", ".join(str(child) for child in self.children if not child.ready)
                    raise RunFailed(f"not ready {START_TIMEOUT_S:.0f} s after the start: {missing}")
            self._raise_failure()

    def begin_interval(self) -> None:
        """Let the executors begin the interval that the control block announces."""
        for post in self._executor_posts:
            post.post(LOOK)

    def await_barrier(self) -> None:
        """Wait until every executor has completed the current interval."""
        with self._changed:
            while not self._all_finished():
                self._raise_failure()
                self._changed.wait()
            self._raise_failure()

    def check(self) -> None:
        """Raise the failure of a child, if there is one: for use inside long computations."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End every process: those that don't leave when asked are killed. Safe to call twice."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
        for post in self._inboxes:
            post.post(STOP)
        self._waker.post(STOP)
        self._supervisor.join()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self.children:
            child.process.join(max(deadline - time.monotonic(), 0.0))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.process.close()
            child.reports.close()
        for end in self._ends:
            end.close()

    # ------------------------------------------------------------------------------------------------- the supervisor

    def _start(self, role: str, index: int, body: Callable, ports: Callable[[int, Lines], Any]) -> Child:
        reports, report = multiprocessing.Pipe(duplex=False)
        process = processes.start(body, ports(index, Lines(self._lifeline, report)), f"htsrl-{role}-{index}")
        report.close()
        return Child(role, index, process, reports)

    def _supervise(self) -> None:
        """Wait on every child and on the barrier until the run stops."""
        while not self._stopping:
            lines: dict[Any, Child] = {child.reports: child for child in self.children if not child.reports.closed}
            ended: dict[Any, Child] = {child.process.sentinel: child for child in self.children}
            waited: list[Any] = [self._barrier, self._wake, *lines, *ended]
            events = wait(waited)
            with self._changed:
                if self._barrier in events:
                    self._barrier.take()
                for event in events:
                    if event in lines:
                        self._hear(lines[event])
                for event in events:
                    if event in ended and not self._stopping and self._failure is None:
                        self._failure = self._death(ended[event])
                self._changed.notify_all()
            if self._failure is not None:
                return

    def _hear(self, child: Child) -> None:
        """Take in one report of a child."""
        try:
            report = json.loads(child.reports.recv_bytes())
        except EOFError:
            child.reports.close()
            return
        if report["kind"] == "ready":
            child.ready = True
        elif report["kind"] == "unreproducible":
            self.unreproducible.append(report["replica"])
        elif self._failure is None:
            self._failure = _failure(report, self._spec)

    def _death(self, child: Child) -> RunFailed:
        """What to say of a child that ended without a report."""
        while not child.reports.closed and child.reports.poll():
            self._hear(child)
        if self._failure is not None:
            return self._failure
        child.process.join()
        code = child.process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
        hint = " (the system kills processes like this when memory runs out)" if code == -9 else ""
        return RunFailed(f"{child} {how} without a word{hint}")

    def _all_finished(self) -> bool:
        return bool((self._control.finished > self._control.interval[0]).all())

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _failure(report: dict[str, Any], spec: EnvSpec) -> RunFailed:
    """The error to show for a child's report."""
    who = f"{report['role']} {report['index']}"
    if report["kind"] == "internal":
        return RunFailed(f"{who} failed:\n{report['traceback']}")
    action = "" if report["action"] is None else f", action {report['action']}"
    return EnvironmentFailed(
        f"{spec.env_id} failed in {report['phase']}: replica {report['replica']}, episode {report['episode']}, "
        f"step {report['step']} (episode seed {report['seed']}{action}; {who}):\n{report['traceback']}"
    )
