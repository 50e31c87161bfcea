"""The system as a discrete-event simulation: executors, actors, learner ranks and the barrier, without the work.

An interval is played event by event. What happens is what the process bodies do: an executor steps one group at a time
in the order in which answers arrive and posts it to its actor; an actor takes all groups that wait, answers them in
padded batches and posts them back; the learner works on the interval before; the barrier waits for both. Only how long
things take is drawn from distributions.

**Cores** are shared equally and at once by all that can run (see `machine`). A real scheduler gives slices of time:
waiting for one's slice, and the cold caches after it, are missing.

**Ranks** have cores of their own and the same distributions. They meet in the gradient exchange alone: no rank's update
ends before the slowest rank's. Each (rank, interval) is therefore played by itself and the ranks' clocks are joined
afterwards; where there are more than the wanted number of turns allows, plays are drawn again for others.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from machine import Machine, Process

from htsrl.storage.layout import Layout

# ---------------------------------------------------------------------------------------------------------- how long


class Law(Protocol):
    """A distribution of times in seconds."""

    @property
    def mean_s(self) -> float: ...

    @property
    def shape(self) -> float:
        """mean² / variance: the shape of the Gamma distribution with these two moments; infinite for a constant."""
        ...

    def draw(self, rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        """float64 [*size] independent times."""
        ...

    def scaled(self, factor: float) -> Law:
        """All times ``factor`` times as long."""
        ...


@dataclass(frozen=True)
class Gamma:
    """Gamma distribution; a ``shape`` of infinity is a constant."""

    mean_s: float
    shape: float = 1.0

    def draw(self, rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        if not self.mean_s or math.isinf(self.shape):
            return np.full(size, self.mean_s)
        return rng.standard_gamma(self.shape, size) * (self.mean_s / self.shape)

    def scaled(self, factor: float) -> Gamma:
        return Gamma(factor * self.mean_s, self.shape)


def constant(seconds: float) -> Gamma:
    """Always the same time."""
    return Gamma(seconds, math.inf)


@dataclass(frozen=True)
class Measured:
    """Measured times: the means of equal slices of the sorted sample, so that their mean is the sample's."""

    slices_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.slices_s))

    @property
    def shape(self) -> float:
        variance = float(np.var(self.slices_s))
        return self.mean_s**2 / variance if variance else math.inf

    def draw(self, rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        return np.array(self.slices_s)[rng.integers(len(self.slices_s), size=size)]

    def scaled(self, factor: float) -> Measured:
        return Measured(tuple(factor * each for each in self.slices_s))


@dataclass(frozen=True)
class Inference:
    """What an actor's turn costs: rows are padded to a bucket; more than the largest holds take several batches."""

    buckets: tuple[int, ...]
    bucket_s: tuple[float, ...]
    """A turn of one batch of that size, without telling anybody."""
    more_s: float
    """Another batch of the largest size in the same turn."""
    tell_s: float = 0.0
    """Telling one executor."""

    def turn_s(self, rows: int, executors: int) -> float:
        """Core-seconds to answer ``rows`` rows of ``executors`` executors."""
        full, rest = divmod(rows - 1, self.buckets[-1])
        last = self.bucket_s[bisect_right(self.buckets, rest)]
        return last + full * self.more_s + executors * self.tell_s


@dataclass(frozen=True)
class Work:
    """Work of the run on a whole interval."""

    fixed_s: float = 0.0
    replica_s: float = 0.0
    row_s: float = 0.0
    cores: float = 1.0
    """How many it keeps busy meanwhile."""

    def seconds(self, replicas: int, alpha: int) -> float:
        return self.fixed_s + replicas * (self.replica_s + alpha * self.row_s)


@dataclass(frozen=True)
class Times:
    """How long everything takes, each alone on a core."""

    step: Law
    """A replica's step on a core."""
    asleep: Law = field(default_factory=lambda: constant(0.0))
    """The part of a step that needs no core."""
    oversleep_s: float = 0.0
    """How much longer than asked it sleeps."""
    turn_s: float = 0.0
    """An executor's messages for one group."""
    arrive_s: float = 0.0
    """An executor's work at the barrier, for each of its replicas."""
    hop_s: float = 0.0
    """From a message's writing until a sleeping reader runs."""
    inference: Inference = field(default_factory=lambda: Inference((sys.maxsize,), (0.0,), 0.0))
    learning: Work = Work()
    record: Work = Work()
    """Beside the update, after it: digest and records."""
    noise: Work = Work()
    """The next interval's action noise; always beside the rollout."""
    between: Work = Work()
    """Between two intervals, while everybody waits."""
    exchange_s: float = 0.0
    """All gradient exchanges of one update, between ranks; 0 for a single rank."""


@dataclass(frozen=True)
class Setup:
    """How the system is laid out. Replicas, executors, actors, cores: of each rank."""

    replicas: int
    alpha: int
    executors: int
    actors: int = 1
    group: int = 1
    """Replicas that one message speaks of."""
    ranks: int = 1
    cores: float = math.inf
    schedule: Literal["hts", "sync"] = "hts"

    @property
    def rows(self) -> int:
        """Rows of a rank's storage."""
        return self.replicas * self.alpha


@dataclass(frozen=True)
class Outcome:
    """Means over the simulated intervals."""

    steps_per_second: float
    """Of all ranks together."""
    interval_s: float
    stepping: float
    """Shares of an executor's time: stepping (and sleeping in steps, and waiting for a core meanwhile)"""
    inference: float
    """... waiting for answers"""
    barrier: float
    """... having finished, waiting for slower executors"""
    learning: float
    """... all having finished, waiting for the learner, other ranks, or what is done between intervals."""
    learner_busy: float
    """Share of the time in which the learner works."""
    cores_busy: float
    """Cores at work, of each rank."""
    batch_rows: float
    """Rows that an actor finds waiting."""


# ------------------------------------------------------------------------------------------------------------ one play


@dataclass(frozen=True)
class Play:
    """One interval of one rank, from its begin."""

    rollout_s: float
    """Until the last executor arrives at the barrier."""
    learner_s: float
    """Until the learner is done; 0 where it does not work beside the rollout."""
    stepping_s: float
    """Mean over executors."""
    arrived_s: float
    """Mean over executors."""
    core_s: float
    turns: int
    """Actors' turns."""
    steps: tuple[int, ...]
    """[G] steps that each group made."""


def play(setup: Setup, times: Times, rng: np.random.Generator, beside: Sequence[tuple[float, float]] = ()) -> Play:
    """Play one interval of one rank: `actors.executor` and `actors.actor` without what they compute.

    Args:
        setup: the layout.
        times: how long everything takes.
        rng: draws the step times.
        beside: the learner's work, one after the other: cores that it keeps busy, and for how many seconds.

    Raises:
        ValueError: the layout has more executors than replicas, or lock-step with more than one actor.
    """
    if not 1 <= setup.executors <= setup.replicas:
        raise ValueError(f"executors must be between 1 and {setup.replicas}, got {setup.executors}")
    if setup.schedule == "sync" and setup.actors != 1:
        raise ValueError(f"schedule sync needs one actor, got {setup.actors}")
    layout = Layout(setup.replicas, setup.executors, setup.actors, setup.group)
    E, A, G = setup.executors, setup.actors, len(layout.groups)
    rows = [len(group) for group in layout.groups]
    executor_of, actor_of = layout.executor_of.tolist(), layout.actor_of.tolist()
    on_core, asleep = draw_turns(layout, setup.alpha, times, rng)
    lockstep = setup.schedule == "sync"
    machine = Machine(setup.cores, times.hop_s)
    waiting: list[list[int]] = [[] for _ in range(A)]
    answered: list[deque[int]] = [deque() for _ in range(E)]
    steps = [0] * G
    stepping, arrived = [0.0] * E, [0.0] * E
    turns, learner_s = 0, 0.0

    def executor(e: int) -> Process:
        # Request the first actions
        own = layout.executor_groups[e]
        for g in own:
            waiting[actor_of[g]].append(g)
            machine.wake(actor_of[g])

        # Step groups in the order in which their answers arrive
        left, mailbox = len(own), answered[e]
        while left:
            while not mailbox:
                yield None
            g = mailbox.popleft()
            began = machine.now
            yield 1.0, next(on_core[g])
            if asleep:
                yield 0.0, next(asleep[g])
            stepping[e] += machine.now - began
            steps[g] += 1
            if steps[g] < setup.alpha:
                waiting[actor_of[g]].append(g)
                machine.wake(actor_of[g])
            else:
                left -= 1

        # Report at the barrier
        yield 1.0, times.arrive_s * len(layout.executor_columns[e])
        arrived[e] = machine.now

    def actor(a: int) -> Process:
        nonlocal turns
        while True:
            # Take the groups that wait (all of them, if the schedule is lock-step)
            while not waiting[a] or (lockstep and len(waiting[a]) < G):
                yield None
            groups, waiting[a] = waiting[a], []
            turns += 1

            # Infer and sample; tell their executors
            told = {executor_of[g] for g in groups}
            yield 1.0, times.inference.turn_s(sum([rows[g] for g in groups]), len(told))
            for g in groups:
                answered[executor_of[g]].append(g)
            for e in told:
                machine.wake(A + e)

    def learner() -> Process:
        nonlocal learner_s
        for work in beside:
            yield work
            learner_s = machine.now

    for a in range(A):
        machine.add(actor(a))
    for e in range(E):
        machine.add(executor(e))
    machine.add(learner())
    machine.run()
    return Play(max(arrived), learner_s, sum(stepping) / E, sum(arrived) / E, machine.core_s, turns, tuple(steps))


PerGroup = list[Iterator[float]]
"""[G] iterators of seconds, one for each step."""


def draw_turns(layout: Layout, alpha: int, times: Times, rng: np.random.Generator) -> tuple[PerGroup, PerGroup]:
    """How long executors' turns keep a core busy and sleep; nothing for the latter where no step sleeps.

    A group's replicas are stepped one after the other.
    """
    starts, size = [group.start for group in layout.groups], (alpha, layout.num_envs)

    def by_group(replicas: np.ndarray, more_s: float) -> PerGroup:
        return [iter(group) for group in (np.add.reduceat(replicas, starts, axis=1) + more_s).T.tolist()]

    on_core = by_group(times.step.draw(rng, size), times.turn_s)
    if not times.asleep.mean_s:
        return on_core, []
    return on_core, by_group(times.asleep.draw(rng, size) + times.oversleep_s, 0.0)


# ------------------------------------------------------------------------------------------------------- all of a run


def simulate(setup: Setup, times: Times, seed: int = 0, turns: int = 200_000, intervals: int = 32) -> Outcome:
    """Simulate ``intervals`` intervals of all ranks, after the first, whose learner has nothing to do.

    Plays ``turns`` executors' turns or two intervals of a rank, whichever is more, and at most what is needed; about
    4 microseconds a turn.

    Raises:
        ValueError: as `play` does.
    """
    rng = np.random.default_rng(seed)
    update, record, noise, between = (
        (work.cores, work.seconds(setup.replicas, setup.alpha))
        for work in (times.learning, times.record, times.noise, times.between)
    )
    # Learning overlaps with the next interval, or follows; then it is slowed down only by having too few cores
    beside, after = ([update, record, noise], []) if setup.schedule == "hts" else ([noise], [update, record])
    after_s = sum(seconds * max(cores / setup.cores, 1.0) for cores, seconds in after)
    # The barrier is heard by a supervisor, then by the run, which tells every executor to begin
    between_s = between[1] + setup.executors * times.inference.tell_s + 3 * times.hop_s

    # Play intervals; where that takes too long, draw from those that were played
    wanted, per_play = intervals * setup.ranks, setup.alpha * math.ceil(setup.replicas / setup.group)
    count = min(max(turns // per_play, 2), wanted)
    plays = [play(setup, times, rng, [work for work in beside if work[1]]) for _ in range(count)]
    order = np.arange(wanted) if count == wanted else rng.integers(count, size=wanted)

    def each(name: str) -> np.ndarray:
        """float64 [intervals, ranks]"""
        return np.array([getattr(one, name) for one in plays], np.float64)[order].reshape(intervals, setup.ranks)

    # Join the ranks' clocks: an update ends for all when it ends for the slowest
    begin = np.zeros(setup.ranks)
    for rolled, done in zip(each("rollout_s"), each("learner_s")):
        if setup.schedule == "hts":
            end = np.maximum(begin + rolled, (begin + done).max() + times.exchange_s)
        else:
            end = np.full(setup.ranks, (begin + np.maximum(rolled, done)).max() + after_s + times.exchange_s)
        begin = end + between_s
    interval_s = float(begin.mean()) / intervals

    stepping_s, arrived_s, rollout_s, learner_s, core_s, batches = (
        float(each(name).mean()) for name in ("stepping_s", "arrived_s", "rollout_s", "learner_s", "core_s", "turns")
    )
    after_core_s = sum(seconds * cores for cores, seconds in after)
    return Outcome(
        steps_per_second=setup.ranks * setup.rows / interval_s,
        interval_s=interval_s,
        stepping=stepping_s / interval_s,
        inference=(arrived_s - stepping_s) / interval_s,
        barrier=(rollout_s - arrived_s) / interval_s,
        learning=1.0 - rollout_s / interval_s,
        learner_busy=(learner_s + after_s) / interval_s,
        cores_busy=(core_s + after_core_s + between_s) / interval_s,
        batch_rows=setup.rows / batches,
    )
