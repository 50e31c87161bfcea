"""Episode logs: an episode is its seed plus its actions, so a log of these puts a replica where it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from htsrl.storage.observations import observation
from htsrl.storage.snapshots import Snapshot


@dataclass(frozen=True)
class EpisodeLog:
    """Where one replica stands before a row."""

    episode: int
    """k: the current episode starts from ``episode_seed(seed, n, k)``."""
    pieces: tuple[np.ndarray, ...]
    """Its actions so far, as stored, in pieces [L_i, *A], the longer ones first: see :func:`appended`."""
    reset_pending: bool = False
    """The episode was truncated: the next row resets."""
    last_obs: np.ndarray | None = None
    """[*obs] the observation it stands at, to check a replay against; None where none is known."""
    snapshot: Snapshot | None = None
    """An earlier moment of the episode, to go on from instead of replaying all actions."""

    @property
    def actions(self) -> np.ndarray:
        """[L, *A] its actions so far."""
        return np.concatenate(self.pieces)

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether ``snapshot`` and the one that checks it are of this episode, and of no later moment."""
        return snapshot.episode == self.episode and snapshot.later <= sum(len(piece) for piece in self.pieces)


class EpisodeLogs:
    """The logs of all N replicas as of the start of ``interval``; advanced at each barrier."""

    def __init__(self, logs: list[EpisodeLog], interval: int) -> None:
        self.logs = logs
        self.interval = interval

    def forget_snapshots(self, columns: range) -> None:
        """Drop the snapshots of ``columns``."""
        for n in columns:
            self.logs[n] = replace(self.logs[n], snapshot=None)

    def advance(self, storage: Any) -> None:
        """Go on to the start of the next interval; ``storage`` holds this one's T rows."""
        T = len(storage.reward)
        self.logs = [self.as_of(storage, n, T) for n in range(len(self.logs))]
        self.interval += 1

    def as_of(self, storage: Any, n: int, row: int) -> EpisodeLog:
        """Where replica ``n`` stands before row ``row`` of this interval, whose earlier rows ``storage`` holds."""
        return continued(self.logs[n], storage, n, row)


def continued(log: EpisodeLog, storage: Any, n: int, row: int) -> EpisodeLog:
    """Where replica ``n`` stands before row ``row`` of ``storage``, if it stood at ``log`` before the first."""
    if row == 0:
        return log
    beginnings = np.flatnonzero(begins_after(storage, np.s_[:row, n]))
    pieces: tuple[np.ndarray, ...]
    if len(beginnings):
        pieces = (storage.action[int(beginnings[-1]) + 1 : row, n].copy(),)
    else:
        pieces = appended(log.pieces, storage.action[:row, n].copy())
    return EpisodeLog(
        episode=log.episode + len(beginnings),
        pieces=pieces,
        reset_pending=bool(storage.truncated[row - 1, n]),
        last_obs=observation(storage, row, n),
    )


def begins_after(storage: Any, rows: Any) -> np.ndarray:
    """Whether the row after each of ``rows``, any index of ``storage``'s, is the first of an episode.

    An episode begins after the row that terminated the one before, or after the row that is not a transition. A life
    that is lost ends none.
    """
    return (storage.episode_length[rows] > 0) & ~storage.truncated[rows] | ~storage.valid[rows]


def appended(pieces: tuple[np.ndarray, ...], new: np.ndarray) -> tuple[np.ndarray, ...]:
    """``pieces`` and ``new`` [L, *A], joined so that each is longer than the next.

    An endless episode of L actions is then never copied at every barrier, nor does it come to a piece for each: there
    are at most log2(L) pieces, and each action is copied at most that often.
    """
    while pieces and len(pieces[-1]) <= len(new):
        new = np.concatenate([pieces[-1], new])
        pieces = pieces[:-1]
    return (*pieces, new)
