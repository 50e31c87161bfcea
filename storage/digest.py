"""Digests of what a run did: the same bytes give the same digest, whatever the layout of the processes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from htsrl.storage.observations import is_stacked

TRAJECTORY_FIELDS = ("action", "reward", "terminated", "truncated", "valid")
"""What is digested beside observations."""


def trajectory_digest(previous: bytes, storage: Any) -> bytes:
    """The run's digest after this interval: SHA-256 of the digest before it and of every field's bytes.

    Covers, in (interval, replica, step) order, rows 0 to T-1 of observations, actions, rewards and end flags. A chain
    of digests, so that its state is 32 bytes which a checkpoint can hold.

    Stacked observations are digested as they are stored: each frame once, and which of them a row's is made of. Where
    two observations differ, so do these, at a quarter of the bytes.
    """
    digest = hashlib.sha256(previous)
    seen = ("frames", "past") if is_stacked(storage) else ("obs",)
    arrays = [getattr(storage, name)[:-1] for name in seen] + [getattr(storage, name) for name in TRAJECTORY_FIELDS]
    for n in range(storage.reward.shape[1]):
        for array in arrays:
            digest.update(np.ascontiguousarray(array[:, n]).data)
    return digest.digest()


def parameters_digest(parameters: Iterable[tuple[str, np.ndarray]]) -> str:
    """SHA-256, in hexadecimal, of the bytes of every parameter, in name order."""
    digest = hashlib.sha256()
    for _, array in sorted(parameters, key=lambda item: item[0]):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def losses_digest(metrics: Mapping[str, float]) -> str:
    """SHA-256, in hexadecimal, of the names and float64 bits of one interval's losses, in name order.

    Losses are those of ``metrics`` whose names begin with ``loss/``; clock times and counters are not covered.
    """
    digest = hashlib.sha256()
    for name in sorted(name for name in metrics if name.startswith("loss/")):
        digest.update(name.encode() + b"\0" + struct.pack("<d", metrics[name]))
    return digest.hexdigest()
