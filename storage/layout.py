"""Who serves which column: replicas in groups, groups on executors and actors. No bit of a run depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Layout:
    """N columns split into contiguous groups; groups never span executors; each group has one actor."""

    num_envs: int
    num_executors: int
    num_actors: int
    envs_per_group: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Everything but N, as the control block holds it: executors, actors, replicas per group."""
        return self.num_executors, self.num_actors, self.envs_per_group

    @cached_property
    def executor_columns(self) -> list[range]:
        """The columns of each executor, as even as possible."""
        return _split(range(self.num_envs), self.num_executors)

    @cached_property
    def groups(self) -> list[range]:
        """The columns of each group."""
        return [group for groups in self._groups_by_executor for group in groups]

    @cached_property
    def executor_groups(self) -> list[list[int]]:
        """The group numbers of each executor."""
        numbers = iter(range(len(self.groups)))
        return [[next(numbers) for _ in groups] for groups in self._groups_by_executor]

    @cached_property
    def executor_of(self) -> np.ndarray:
        """[G] executor of each group."""
        return np.array([e for e, groups in enumerate(self._groups_by_executor) for _ in groups])

    @cached_property
    def actor_of(self) -> np.ndarray:
        """[G] actor of each group: round-robin, so that each actor serves every executor."""
        return np.arange(len(self.groups)) % self.num_actors

    @cached_property
    def _groups_by_executor(self) -> list[list[range]]:
        return [_split(columns, -(-len(columns) // self.envs_per_group)) for columns in self.executor_columns]


def _split(columns: range, parts: int) -> list[range]:
    """Split into contiguous, nearly equal, non-empty parts."""
    base, extra = divmod(len(columns), parts)
    pieces = []
    start = columns.start
    for part in range(parts):
        stop = start + base + (part < extra)
        pieces.append(range(start, stop))
        start = stop
    return pieces
