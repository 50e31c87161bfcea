"""Episode logs: an episode is its seed plus its actions, so a log of these puts a replica where it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class EpisodeLog:
    """Where one replica stands before a row."""

    episode: int
    """k: the current episode starts from ``episode_seed(seed, n, k)``."""
    actions: np.ndarray
    """[L, *A] its actions so far, as stored."""
    reset_pending: bool = False
    """The episode was truncated: the next row resets."""
    last_obs: np.ndarray | None = None
    """[*obs] the observation it stands at, to check a replay against; None where none is known."""


class EpisodeLogs:
    """The logs of all N replicas as of the start of ``interval``; advanced at each barrier."""

    def __init__(self, logs: list[EpisodeLog], interval: int) -> None:
        self.logs = logs
        self.interval = interval

    def advance(self, storage: Any) -> None:
        """Go on to the start of the next interval; ``storage`` holds this one's T rows."""
        T = len(storage.reward)
        self.logs = [self.as_of(storage, n, T) for n in range(len(self.logs))]
        self.interval += 1

    def as_of(self, storage: Any, n: int, row: int) -> EpisodeLog:
        """Where replica ``n`` stands before row ``row`` of this interval, whose earlier rows ``storage`` holds."""
        log = self.logs[n]
        if row == 0:
            return log
        # An episode begins after the row that terminated the one before, or after the row that is not a transition.
        ended = (storage.episode_length[:row, n] > 0) & ~storage.truncated[:row, n]
        beginnings = np.flatnonzero(ended | ~storage.valid[:row, n])
        if len(beginnings):
            actions = storage.action[int(beginnings[-1]) + 1 : row, n].copy()
        else:
            actions = np.concatenate([log.actions, storage.action[:row, n]])
        return EpisodeLog(
            episode=log.episode + len(beginnings),
            actions=actions,
            reset_pending=bool(storage.truncated[row - 1, n]),
            last_obs=storage.obs[row, n].copy(),
        )
