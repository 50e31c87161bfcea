"""Which layout suits a number of replicas: the closed form sorts out what can't be good, the simulation decides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from barrier import bounds
from discrete_events import Inference, Outcome, Setup, Times, Work, simulate

from htsrl.limits import MOST_PROCESSES

GROUPS = 2
"""Of each executor with more than one replica: it steps one while the other is answered."""
ACTORS_BUSY = 0.75
"""Actors that have more to do than this let executors wait."""
WORTH_SIMULATING = 1.25
"""Numbers of ranks are simulated whose closed form is at most this many times the shortest."""
PARTS = ("environment", "inference", "learning", "record")
"""What can be faster: steps, actors' batches, updates with their gradient exchange, digests and action noise."""


@dataclass(frozen=True)
class Site:
    """What there is to run on."""

    hosts: int
    cores_per_host: float
    most_ranks: int

    @property
    def cores(self) -> float:
        """Of all hosts; infinite where they are unlimited."""
        return self.hosts * self.cores_per_host


@dataclass(frozen=True)
class Candidate:
    """A layout: that of each rank, and the threads of its learner."""

    setup: Setup
    threads: int

    @property
    def size(self) -> tuple[int, ...]:
        """What makes it large, most important first: rows per update, then ranks, then processes."""
        setup = self.setup
        return setup.alpha, setup.ranks, setup.ranks * (setup.executors + setup.actors), self.threads


@dataclass(frozen=True)
class Choice:
    """A simulated candidate."""

    candidate: Candidate
    outcome: Outcome
    steps_per_second: float
    """Of all replicas. Ranks may differ by one replica, and the fullest sets the pace."""


TimesOf = Callable[[Candidate], Times]
"""How long everything takes with a candidate's learner threads and ranks."""


def candidates(
    replicas: int, alpha: int, site: Site, threads: list[int], sleeping: bool = False
) -> Iterator[list[Candidate]]:
    """For each number of ranks, a power of two on each host: layouts worth a thought. A rank stays on one host.

    An executor needs a core, unless its steps are ``sleeping``.
    """
    ranks = site.hosts
    while ranks <= min(site.most_ranks, replicas):
        N, cores = math.ceil(replicas / ranks), site.cores / ranks
        if cores < 1:
            return
        most = int(min(N, MOST_PROCESSES, math.inf if sleeping else cores))
        yield [
            Candidate(Setup(N, alpha, executors, actors, group_of(N, executors), ranks, cores), count)
            for executors in sorted({max(most // divisor, 1) for divisor in (1, 2, 4)})
            for actors in (2**power for power in range(executors.bit_length()))
            for count in threads
            if actors <= cores and count <= cores
        ]
        ranks *= 2


def group_of(replicas: int, executors: int) -> int:
    """Replicas of a group."""
    own = math.ceil(replicas / executors)
    return math.ceil(own / GROUPS)


def promising(several: list[Candidate], times_of: TimesOf) -> tuple[float, Candidate]:
    """The smallest candidate within 2% of the best by the closed form, and its interval in seconds by that.

    Actors must have room, which the closed form does not ask for.
    """

    def interval_s(each: Candidate) -> float:
        found = bounds(each.setup, times_of(each))
        return max(found.interval_s, found.inference / ACTORS_BUSY + found.between)

    intervals = [(interval_s(each), each) for each in several]
    longest = 1.02 * min(seconds for seconds, _ in intervals)
    return min(((seconds, each) for seconds, each in intervals if seconds <= longest), key=lambda pair: pair[1].size)


def plan(
    replicas: int, alphas: list[int], site: Site, threads: list[int], times_of: TimesOf, turns: int, sleeping: bool
) -> dict[int, list[Choice]]:
    """For each alpha, the promising candidates of the promising numbers of ranks, simulated."""
    found: dict[int, list[Choice]] = {}
    for alpha in alphas:
        best = [promising(each, times_of) for each in candidates(replicas, alpha, site, threads, sleeping)]
        longest = WORTH_SIMULATING * min(seconds for seconds, _ in best)
        found[alpha] = [
            simulated(each, replicas, times_of(each), turns) for seconds, each in best if seconds <= longest
        ]
    return found


def simulated(candidate: Candidate, replicas: int, times: Times, turns: int) -> Choice:
    """``candidate`` with its simulation."""
    outcome = simulate(candidate.setup, times, turns=turns)
    return Choice(candidate, outcome, replicas * candidate.setup.alpha / outcome.interval_s)


def recommended(found: dict[int, list[Choice]], within: float) -> Choice:
    """The smallest candidate, alpha first, whose speed is within a share of ``within`` of the best of all."""
    choices = [each for several in found.values() for each in several]
    enough = (1.0 - within) * max(each.steps_per_second for each in choices)
    return min((each for each in choices if each.steps_per_second >= enough), key=lambda each: each.candidate.size)


def limit(replicas: int, site: Site, times: Times) -> float:
    """Steps per second without any waiting: by the replicas' own pace, or by the cores for all work there is."""
    inference = times.inference
    row_s = min(cost / rows for rows, cost in zip(inference.buckets, inference.bucket_s))
    learning_s = times.learning.cores * times.learning.row_s + times.record.row_s + times.noise.row_s
    pace = replicas / (times.step.mean_s + times.asleep.mean_s)
    return min(pace, site.cores / (times.step.mean_s + row_s + learning_s))


def gains(best: Choice, times: Times, turns: int) -> dict[str, float]:
    """How many times as fast the whole would be, were one of PARTS or the barrier twice as fast: what binds gains most.

    A faster barrier is half of the executors' waiting for slower ones, as far as the learner then lets them. Faster
    steps would also shorten that waiting, which is left to the barrier.
    """
    outcome, setup = best.outcome, best.candidate.setup
    interval_s = outcome.interval_s
    quicker = {part: simulate(setup, faster(times, part, 2.0), turns=turns) for part in PARTS}
    seconds = {part: each.interval_s for part, each in quicker.items()}
    faster_waiting_s = outcome.barrier * interval_s - quicker["environment"].barrier * seconds["environment"]
    seconds["environment"] = min(seconds["environment"] + max(faster_waiting_s, 0.0), interval_s)
    seconds["barrier"] = interval_s * max(1.0 - outcome.barrier / 2, outcome.learner_busy)
    return {part: interval_s / each for part, each in seconds.items()}


def faster(times: Times, part: str, factor: float) -> Times:
    """``times`` with one of PARTS ``factor`` times as fast."""

    def less(work: Work) -> Work:
        each = {name: getattr(work, name) / factor for name in ("fixed_s", "replica_s", "row_s")}
        return dataclasses.replace(work, **each)

    inference = times.inference
    changes: dict[str, dict[str, Any]] = {
        "environment": {"step": times.step.scaled(1 / factor), "asleep": times.asleep.scaled(1 / factor)},
        "inference": {
            "inference": Inference(
                inference.buckets,
                tuple(cost / factor for cost in inference.bucket_s),
                inference.more_s / factor,
                inference.tell_s / factor,
            )
        },
        "learning": {"learning": less(times.learning), "exchange_s": times.exchange_s / factor},
        "record": {"record": less(times.record), "noise": less(times.noise)},
    }
    return dataclasses.replace(times, **changes[part])
