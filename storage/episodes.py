"""Episode logs: an episode is its seed plus its actions, so a log of these puts a replica where it was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class EpisodeLog:
    """Where one replica stands at a barrier."""

    episode: int = 0
    """k: the current episode starts from ``episode_seed(seed, n, k)``."""
    actions: np.ndarray | None = None
    """[L, *A] its actions so far, as stored; None or empty at its start."""
    reset_pending: bool = False
    """The episode was truncated: the next row resets."""
    last_obs: np.ndarray | None = None
    """The observation it stands at, to check a replay against."""


@dataclass
class EpisodeLogs:
    """The logs of all N replicas, advanced at each barrier from the storage that was just filled."""

    current: list[EpisodeLog]
    _pieces: list[list[np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pieces = [[log.actions] if log.actions is not None else [] for log in self.current]

    def advance(self, storage: Any) -> None:
        """Take over an interval's actions: those since the current episode began."""
        # An episode begins after the row that terminated the one before, or after the row that is not a transition.
        begins = (storage.episode_length > 0) & ~storage.truncated | ~storage.valid
        for n, pieces in enumerate(self._pieces):
            boundaries = np.flatnonzero(begins[:, n])
            start = 0
            if len(boundaries):
                pieces.clear()
                start = int(boundaries[-1]) + 1
            pieces.append(storage.action[start:, n].copy())

    def snapshot(self, storage: Any, stands: dict[str, np.ndarray]) -> list[EpisodeLog]:
        """The logs as of the last barrier.

        Args:
            storage: the storage that was filled before that barrier, already advanced over.
            stands: the control block's ``episode`` and ``reset_pending`` [N] as of that barrier.
        """
        last = storage.obs[-1]
        logs = []
        for n, pieces in enumerate(self._pieces):
            joined = np.concatenate(pieces) if pieces else storage.action[:0, n].copy()
            self._pieces[n] = [joined]
            pending = bool(stands["reset_pending"][n])
            logs.append(EpisodeLog(int(stands["episode"][n]), joined, pending, last[n].copy()))
        return logs
