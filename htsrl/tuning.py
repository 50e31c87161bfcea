"""``--layout auto``: which layout to try next, by what intervals took in those that were tried.

From the rule's layout on, the search climbs: one setting is doubled or halved, and who is faster becomes the one from
which it goes on; not before the other was measured again, since other programs and what is learned change the speed,
too. So nothing is tried that is likely to take more than twice as long, and an interval that was measured
is one that the run needed anyway. What tuning loses are the changes themselves, in which nobody works, and what slower
layouts take longer: no layout is tried if that could come to more than a share of the time that the run still takes.

All of it is arithmetic: no process is started here, and no clock read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from htsrl.storage.layout import Layout

SHARE = 0.05
"""Of the time from the first change to the end of the run: the most that tuning may lose."""
MARGIN = 0.03
"""By as much must a layout be faster to take the place of another: intervals differ by that without a reason."""
SLOWEST = 2.0
"""How many times as long an interval may take in a layout that is tried, for all that is known before."""
SECONDS, LEAST, MOST = 1.0, 3, 31
"""A layout is measured for so many seconds, in at least and at most so many intervals; their median counts."""
FIRST_WARM_UP, WARM_UP = 3, 1
"""Intervals that don't count: the run's first have nothing to learn from, then memory and caches to fill."""
TOO_SHORT = "the run is too short to try others"


@dataclass(frozen=True)
class Space:
    """The layouts that may be tried."""

    num_envs: int
    most_executors: int
    most_actors: int
    fixed: frozenset[str] = frozenset()
    """Settings that stay as they are: num_executors, num_actors, envs_per_group."""

    def neighbours(self, layout: Layout) -> list[Layout]:
        """The layouts next to ``layout``: twice or half as many executors, groups of each, or actors."""
        E, A, per_group = layout.numbers
        groups = len(layout.executor_groups[0])
        moves: dict[str, list[tuple[int, int, int]]] = {
            "num_executors": [(min(2 * E, self.most_executors), groups, A), (E // 2, groups, A)],
            "envs_per_group": [(E, 2 * groups, A), (E, groups // 2, A)],
            "num_actors": [(E, groups, min(2 * A, self.most_actors)), (E, groups, A // 2)],
        }
        free = [move for name, both in moves.items() if name not in self.fixed for move in both if all(move)]
        found = []
        for executors, parts, actors in free:
            if "envs_per_group" not in self.fixed:
                # As many groups as actors at least: else one has nothing to do
                per_group = max(min(math.ceil(self.num_envs / executors / parts), self.num_envs // actors), 1)
            found.append(Layout(self.num_envs, executors, actors, per_group))
        return found


def beats(seconds: float, others: float) -> bool:
    """Whether a layout whose intervals take ``seconds`` may take the place of one where they take ``others``."""
    return seconds * (1 + MARGIN) < others


def next_layout(space: Space, best: Layout, tried: Collection[Layout]) -> Layout | None:
    """The first neighbour of the best layout that was not tried yet; None where all were."""
    return next((layout for layout in space.neighbours(best) if layout not in tried), None)


def is_measured(seconds: Sequence[float]) -> bool:
    """Whether these intervals of the first layout are enough."""
    count = len(seconds)
    return count >= LEAST and count % 2 == 1 and (count >= MOST or sum(seconds) >= SECONDS)


def is_decided(seconds: Sequence[float], to_beat: float, wanted: int) -> bool:
    """Whether ``wanted`` intervals were measured, or so many were too slow already that their median will be."""
    slow = sum(not beats(each, to_beat) for each in seconds)
    return len(seconds) >= wanted or slow > wanted // 2


def most_lost(start_s: float, interval_s: float, wanted: int) -> float:
    """The seconds that trying a layout may cost: to change to it, back and to it again, and to find that it is slow."""
    return 3 * start_s + (WARM_UP + wanted // 2 + 1) * (SLOWEST - 1.0) * interval_s


class Tuner:
    """Is told what each interval took, and says in which layout the next one should run."""

    def __init__(self, space: Space, first: Layout, settled: bool = False) -> None:
        """Begin with ``first``; ``settled``: and stay there."""
        self.space = space
        self.layout = first
        """For the next interval."""
        self.settled = settled
        """Nothing will be tried any more."""
        self.times: dict[Layout, float] = {}
        """Median seconds of an interval, the least of each layout that was tried."""
        self.lost_s = 0.0
        """Seconds of changes, and what intervals took longer than in the best layout at that time."""
        self.best = first
        """The fastest, as far as is certain."""
        self._first = first
        self._challenger: Layout | None = None
        self._reason = TOO_SHORT
        self._seconds: list[float] = []
        self._warming_up = FIRST_WARM_UP
        self._wanted = 0

    def completed(self, seconds: float, intervals_left: int, start_s: Callable[[Layout], float]) -> Layout:
        """An interval in ``layout`` took ``seconds``; returns the layout for the next one.

        Args:
            seconds: from its beginning until the next could begin.
            intervals_left: that the run will still make.
            start_s: how long it may take to change to a layout.
        """
        if self.settled:
            return self.layout
        if self.layout != self.best:
            self.lost_s += max(seconds - self.times[self.best], 0.0)
        if self._warming_up:
            self._warming_up -= 1
            return self.layout
        self._seconds.append(seconds)
        if not self.times:
            if not is_measured(self._seconds):
                return self.layout
            self._wanted = len(self._seconds)
        to_beat = math.inf if self.layout == self.best else self.times[self.best]
        if not is_decided(self._seconds, to_beat, self._wanted):
            return self.layout
        self.times[self.layout] = min(median(self._seconds), self.times.get(self.layout, math.inf))
        self._seconds, self._warming_up = [], WARM_UP

        # One that is faster must still be so when the best has been measured again
        if self.layout != self.best and beats(self.times[self.layout], self.times[self.best]):
            self._challenger, self.layout = self.layout, self.best
            return self.layout
        if self._challenger is not None and beats(self.times[self._challenger], self.times[self.best]):
            self.best = self._challenger
        self._challenger = None

        candidate, interval_s = next_layout(self.space, self.best, self.times), self.times[self.best]
        if candidate is None:
            return self.settle("there is no other")
        cost = self.lost_s + most_lost(start_s(candidate), interval_s, self._wanted)
        if cost > SHARE * intervals_left * interval_s:
            return self.settle(TOO_SHORT)
        self.layout = candidate
        return candidate

    def changed(self, seconds: float) -> None:
        """It took so long to change to ``layout``."""
        self.lost_s += seconds

    def settle(self, reason: str) -> Layout:
        """Try nothing any more, for ``reason``; returns the best layout so far, for all that comes."""
        self.settled, self._reason = True, reason
        self.layout = self.best
        return self.layout

    def outcome(self) -> dict[str, Any]:
        """What came out, for the run's result."""
        best, times = self.best, self.times
        return {
            **settings_of(best),
            "settled": self.settled,
            "tried": len(times),
            "speedup": times[self._first] / times[best] if times else None,
            "lost_seconds": self.lost_s,
        }

    def sentence(self) -> str:
        """What came out, for a person."""
        best, first, others = self.best, self._first, len(self.times) - 1
        if others <= 0:
            return f"layout: {words(best)}: {self._reason}"
        tried = f"{others} other{'s' if others > 1 else ''} tried, {self.lost_s:.1f} s lost"
        if best == first:
            return f"layout: {words(best)}, as at the start: none was faster ({tried})"
        faster = self.times[first] / self.times[best] - 1.0
        return f"layout: {words(best)}: measured {faster:.0%} faster than {words(first)} ({tried})"


def settings_of(layout: Layout) -> dict[str, int]:
    """``layout`` as settings."""
    return dict(zip(("num_executors", "num_actors", "envs_per_group"), layout.numbers))


def words(layout: Layout) -> str:
    """A layout for a person: '2 executors with 4 groups, 1 actor'."""

    def count(number: int, word: str) -> str:
        return f"{number} {word}{'s' if number > 1 else ''}"

    groups = count(len(layout.groups), "group")
    return f"{count(layout.num_executors, 'executor')} with {groups}, {count(layout.num_actors, 'actor')}"
