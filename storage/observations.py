"""Observations in a rollout: whole, or, where an observation is the last S frames, each frame once.

Stacked observations overlap: row t repeats S - 1 frames of row t - 1. Instead of ``obs`` a rollout then has

- ``frames`` [S - 1 + T + 1, N, H, W, C]. The newest frame of row t is at S - 1 + t; the S - 1 frames in front of row
  0's are what its observation holds of the interval before.
- ``past`` [T + 1, N]: how many frames before row t's own belong to its episode; those in front of row 0 count. Where
  these are fewer than S - 1, the oldest stands in for those that are missing: so an episode begins with S times the
  same frame.

Both together say every bit of every observation, and nothing else. Whatever writes or reads observations goes through
this module, or through `htsrl.storage.stacks`, which is quick and needs torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

# ------------------------------------------------------------------------------------------------------------- writing


class Places(Protocol):
    """One row of observations, to be written: ``places[n] = obs`` of replica n."""

    def __setitem__(self, n: int, obs: np.ndarray, /) -> None: ...


class NewestFrame:
    """Places that keep the newest frame of an observation."""

    def __init__(self, row: np.ndarray) -> None:
        self._row = pixels(row, row.shape[-1])[..., 0]  # [N, H, W]
        self._pixel = self._row.dtype

    def __setitem__(self, n: int, obs: np.ndarray, /) -> None:
        self._row[n] = obs.view(self._pixel)[..., -1]


def open_row(storage: Any, t: int, n: int, obs: np.ndarray) -> None:
    """Let replica ``n`` go on from ``obs`` [*obs] in row ``t``.

    Row 0 gets all its frames. Of a later one, which a predecessor reached, those before are where they were.
    """
    if not is_stacked(storage):
        storage.obs[t, n] = obs
    elif t > 0:
        NewestFrame(storage.frames[stack_of(storage) - 1 + t])[n] = obs
    else:
        front = storage.frames[: stack_of(storage), n]
        channels = front.shape[-1]
        pixels(front, channels)[..., 0] = np.moveaxis(pixels(obs, channels), -1, 0)
        storage.past[0, n] = len(front) - 1


def next_row(storage: Any, t: int, columns: slice) -> Places:
    """Where the observations go to which row ``t`` of ``columns`` leads.

    Where one of them is an episode's first, :func:`begin_row` is to be told so after this.
    """
    if not is_stacked(storage):
        return storage.obs[t + 1]
    past = storage.past
    np.add(past[t, columns], 1, out=past[t + 1, columns])
    return NewestFrame(storage.frames[stack_of(storage) + t])


def begin_row(storage: Any, t: int, n: int) -> None:
    """Row ``t`` of replica ``n`` is an episode's first: its observation holds nothing of the rows before."""
    if is_stacked(storage):
        storage.past[t, n] = 0


# ------------------------------------------------------------------------------------------------------------- reading


def observation(storage: Any, t: int, n: int) -> np.ndarray:
    """A copy of the observation of replica ``n`` in row ``t``: [*obs]."""
    return observations(storage, np.array([t * storage.reward.shape[1] + n]))[0]


def observations(storage: Any, rows: np.ndarray) -> np.ndarray:
    """Copies [M, *obs] of the observations of ``rows`` [M] int64, t * N + n of each."""
    if not is_stacked(storage):
        return storage.obs.reshape(-1, *storage.obs.shape[2:])[rows]
    *image, channels = storage.frames.shape[2:]
    frames = pixels(storage.frames, channels).reshape(-1, *image)[frame_places(storage.past, stack_of(storage), rows)]
    return np.ascontiguousarray(np.moveaxis(frames, 1, -1)).view(storage.frames.dtype)


def frame_places(past: np.ndarray, stack: int, rows: np.ndarray) -> np.ndarray:
    """Where the frames of the observations of ``rows`` [M] int64 are: [M, S] int64, oldest first.

    ``past`` is that of a rollout, [T+1, N], or of a ring of rollouts, [slots, T+1, N]. Rows of observations and places
    of frames both count their own array, which has S - 1 rows more in each rollout, with its first axes as one.
    """
    steps, columns = past.shape[-2:]
    slot = rows // (steps * columns)
    own = rows + (slot + 1) * ((stack - 1) * columns)
    back = np.minimum(np.arange(stack)[::-1], past.reshape(-1)[rows, np.newaxis])
    return own[:, np.newaxis] - back * columns


def pixels(images: np.ndarray, channels: int) -> np.ndarray:
    """``images`` [..., k * channels] uint8 as whole numbers of ``channels`` bytes [..., k]: a view, moved at once."""
    return images.view(f"<u{channels}")


def is_stacked(storage: Any) -> bool:
    """Whether ``storage`` holds frames."""
    return hasattr(storage, "frames")


def stack_of(storage: Any) -> int:
    """S of a rollout that holds frames."""
    return len(storage.frames) - len(storage.reward)
