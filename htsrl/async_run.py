"""The asynchronous baseline: trajectories go to the learner as they finish, parameters are taken as they come.

This is how IMPALA, SEED RL and their kin run. What the learner learns from depends on timing, so that such a run never
repeats itself, and the policy that acted is some updates older than the one that learns: how many is measured.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from htsrl.actors.published import publish
from htsrl.async_crew import AsyncCrew
from htsrl.checkpoint import Checkpoint
from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.report import Reporter
from htsrl.run import Run
from htsrl.storage.episodes import continued
from htsrl.storage.fields import async_control_fields, unroll_fields
from htsrl.storage.memory import Arena
from htsrl.storage.unrolls import Unroll, slots_of

NOT_REPRODUCIBLE = "schedule async is not reproducible: what is learned from what depends on timing"
CONTINUED = "going on from the checkpoint with new trajectories: an async run can't be continued bit for bit"
LARGEST_LAG = 31
"""Where the histogram of the policy lag ends; it counts larger ones there, too."""


@dataclass
class PolicyLag:
    """Updates between the parameters that acted and those that learned, over rows."""

    rows: int = 0
    total: int = 0
    largest: int = 0
    histogram: list[int] = field(default_factory=list)
    """Rows by their lag, from 0 on."""

    def add(self, lags: np.ndarray) -> None:
        """Count ``lags`` [rows]."""
        counts = np.bincount(np.minimum(lags, LARGEST_LAG), minlength=len(self.histogram))
        counts[: len(self.histogram)] += np.array(self.histogram, counts.dtype)
        self.rows += len(lags)
        self.total += int(lags.sum())
        self.largest = max(self.largest, int(lags.max(initial=0)))
        self.histogram = counts.tolist()

    @property
    def mean(self) -> float:
        return self.total / max(self.rows, 1)


class AsyncRun(Run):
    """A run without a barrier. Its interval j is what update j learns from: N columns of T steps, whosever they are."""

    crew_class = AsyncCrew
    crew: AsyncCrew

    def __init__(
        self,
        config: AnyConfig,
        spec: EnvSpec,
        run_dir: Any,
        reporter: Reporter,
        checkpoint: Checkpoint | None = None,
        delay_ms: float = 0.0,
    ) -> None:
        """As :class:`Run`; executors begin as soon as they are up."""
        self.policy_lag = PolicyLag()
        super().__init__(config, spec, run_dir, reporter, checkpoint, delay_ms)
        self.reproducible = False
        if checkpoint is not None:
            self.policy_lag = PolicyLag(**checkpoint.state["policy_lag"])

    def allocate(self) -> Arena:
        """A ring of unrolls and the control block; beside it, the batch that the learner learns from."""
        size, noise_size = len(self.learner.parameters), self.learner.model.head.noise_size
        slots = self.config.runtime.async_slots
        fields = unroll_fields(self.spec, self.T, self.N, noise_size, slots, self.state_size)
        control = async_control_fields(len(self.layout.groups), size)
        arena = Arena.create({"control": control, "unrolls": fields})
        self.control, self.slots = arena.views("control"), slots_of(arena.views("unrolls"))
        self.batch = SimpleNamespace(
            **{each.name: np.zeros(each.shape[1:], each.dtype) for each in fields if each.name != "noise"}
        )
        self.storages = [self.batch, self.batch]  # whatever the interval, it was learned from here
        return arena

    def set_counters(self) -> None:
        """Publish the parameters and release every slot."""
        publish(self.control, self.learner.newest.cpu().numpy(), self.learner.version)
        # No replica has filled more unrolls than all together: so the noise of a resumed run is new.
        first = self.progress.interval * self.N
        for counter in (self.control.posted, self.control.answered, self.control.stepped):
            counter[:] = first * self.T
        self.control.released[:] = first + len(self.slots)
        for number in range(first, first + len(self.slots)):
            self.draw_noise(number, range(self.N))
        if self.state_size:
            self.slots[(first - 1) % len(self.slots)].state[-1] = self.recurrent_state  # from where the first goes on

    def train(self, stop: threading.Event) -> None:
        """Update on whatever arrives until the budget is spent or ``stop`` is set."""
        self.crew.await_ready()
        self.reporter.start(self.facts())
        self.reporter.note(NOT_REPRODUCIBLE)
        if self.progress.interval:
            self.reporter.note(CONTINUED)
        self.clock = time.perf_counter() - self.progress.seconds
        self.begun = time.perf_counter()
        j = self.progress.interval

        while self.progress.steps < self.config.total_steps and not stop.is_set():
            # Wait for unrolls of N replicas, the first that arrive; free their slots
            waiting = time.perf_counter()
            self.gather(self.crew.take(self.N))
            record = self.count(j, waiting)
            self.begun = time.perf_counter()

            # Learn from them, and publish at once
            self.consume(j, record)
            publish(self.control, self.learner.newest.cpu().numpy(), self.learner.version)
            self.evaluate_if_due()
            self.save_if_due()
            self.hear_crew()
            j += 1
        self.finish(stop)

    def gather(self, unrolls: list[Unroll]) -> None:
        """Copy N columns side by side into the batch, in the order of their arrival."""
        column = 0
        for unroll in unrolls:
            slot = self.slots[unroll.number % len(self.slots)]
            ours = slice(column, column + len(unroll.columns))
            theirs = slice(unroll.columns.start, unroll.columns.stop)
            for name, array in vars(self.batch).items():
                array[:, ours] = getattr(slot, name)[:, theirs]
            column = ours.stop
            if theirs.stop == self.layout.groups[unroll.group].stop:  # nothing of it is left over
                self.free(unroll)

    def free(self, unroll: Unroll) -> None:
        """Give the slot of an unroll that has been copied back to its group, for another one."""
        group, slot = self.layout.groups[unroll.group], self.slots[unroll.number % len(self.slots)]
        self.draw_noise(unroll.number + len(self.slots), group)
        logs = self.episode_logs.logs
        if self.state_size:
            columns = slice(group.start, group.stop)
            self.recurrent_state[columns] = slot.state[-1, columns]
        with self.crew.changes:
            for n in group:
                logs[n] = continued(logs[n], slot, n, self.T)
            self.crew.release(unroll.group)

    def draw_noise(self, number: int, replicas: range) -> None:
        """Draw the action noise of unroll ``number`` of ``replicas``, each from its own generator."""
        slot = self.slots[number % len(self.slots)]
        for n in replicas:
            slot.noise[:, n] = self.noise(n, number)

    def consume(self, j: int, record: dict[str, Any]) -> None:
        """Learn from the batch, and record how old the policies were that acted."""
        lags = (self.learner.version - self.batch.behaviour_version)[self.batch.valid]
        of_update = PolicyLag()
        for count in (of_update, self.policy_lag):
            count.add(lags)
        record |= {
            "policy_lag_max": of_update.largest,
            "policy_lag_histogram": of_update.histogram,
            "unrolls_waiting": self.crew.queue.columns,
        }
        super().consume(j, record)

    def state(self) -> dict[str, Any]:
        """As of any run, and the policy lag so far."""
        return super().state() | {"policy_lag": asdict(self.policy_lag)}

    def summary(self) -> dict[str, Any]:
        """As of any run, and the policy lag over all rows."""
        lag = self.policy_lag
        return super().summary() | {"policy_lag": {"mean": lag.mean, "max": lag.largest, "histogram": lag.histogram}}
