"""Episode logs: an episode is its seed plus its actions, so a log of these puts a replica where it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class EpisodeLog:
    """Where one replica stands at a barrier."""

    episode: int
    """k: the current episode starts from ``episode_seed(seed, n, k)``."""
    actions: np.ndarray
    """[L, *A] its actions so far, as stored."""
    reset_pending: bool = False
    """The episode was truncated: the next row resets."""
    last_obs: np.ndarray | None = None
    """[*obs] the observation it stands at, to check a replay against; None where none is known."""


class EpisodeLogs:
    """The logs of all N replicas, advanced at each barrier from the storage that was just filled."""

    def __init__(self, logs: list[EpisodeLog]) -> None:
        self._pieces = [[log.actions] for log in logs]

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

    def actions(self, n: int) -> np.ndarray:
        """[L, *A] the actions of replica n's current episode, up to the last barrier."""
        self._pieces[n] = [np.concatenate(self._pieces[n])]
        return self._pieces[n][0]

    def restart(self, n: int) -> None:
        """Replica n has begun a new episode."""
        self._pieces[n] = [self._pieces[n][0][:0]]
