"""Schedule 'async': every replica has a ring of unrolls; those that are full wait for the learner in one queue.

Unroll u of a replica stands in slot u % slots, in the replica's column. Its group owns it from when the run releases it
until the group's ``stepped`` says that it is full, and the run from then on, until it releases unroll u + slots. So a
group that is ``slots`` unrolls ahead of the learner waits: that bounds the queue.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from htsrl.storage.layout import Layout


@dataclass(frozen=True)
class Unroll:
    """A full unroll, or a part of its columns."""

    group: int
    number: int
    """u: counts the group's unrolls."""
    columns: range


def slots_of(ring: Any) -> list[Any]:
    """The views of ``ring`` [slots, T or T+1, N, ...] by slot, each like those of a rollout storage."""
    return [
        SimpleNamespace(**{name: array[slot] for name, array in vars(ring).items()}) for slot in range(len(ring.reward))
    ]


class UnrollQueue:
    """Full unrolls in the order of their arrival. The reader of the executors' messages fills it, the learner takes.

    A message says which group to look at; what is full is read off the group's counter.
    """

    def __init__(self, layout: Layout, stepped: np.ndarray, T: int) -> None:
        self._layout, self._stepped, self._T = layout, stepped, T
        self._full: list[int] = (stepped // T).tolist()
        self._waiting: deque[Unroll] = deque()
        self.columns = 0
        """How many columns of T steps wait."""

    def look(self, g: int) -> None:
        """Append what group ``g`` has filled."""
        full = int(self._stepped[g]) // self._T
        for number in range(self._full[g], full):
            self._waiting.append(Unroll(g, number, self._layout.groups[g]))
            self.columns += len(self._layout.groups[g])
        self._full[g] = full

    def take(self, columns: int) -> list[Unroll]:
        """The first ``columns`` columns, which must be there; an unroll of which a part is left over stays first."""
        assert columns <= self.columns
        self.columns -= columns
        taken = []
        while columns:
            first = self._waiting.popleft()
            part, rest = first.columns[:columns], first.columns[columns:]
            taken.append(Unroll(first.group, first.number, part))
            if rest:
                self._waiting.appendleft(Unroll(first.group, first.number, rest))
            columns -= len(part)
        return taken
