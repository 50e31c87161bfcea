"""Digests of what a run did: the same bytes give the same digest, whatever the layout of the processes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

TRAJECTORY_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "valid")


def trajectory_digest(previous: bytes, storage: Any) -> bytes:
    """The run's digest after this interval: SHA-256 of the digest before it and of every field's bytes.

    Covers, in (interval, replica, step) order, rows 0 to T-1 of observations, actions, rewards and end flags. A chain
    of digests, so that its state is 32 bytes which a checkpoint can hold.
    """
    digest = hashlib.sha256(previous)
    T, N = storage.reward.shape
    for n in range(N):
        for name in TRAJECTORY_FIELDS:
            digest.update(np.ascontiguousarray(getattr(storage, name)[:T, n]).data)
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
