"""Snapshots: an environment's own account of a moment, so that a long episode need not be replayed from its seed.

A replica takes one now and then, and publishes it only when it takes the next, together with that one's fingerprint.
Whoever restores it plays on from there with the actions of the episode's log and must arrive at the same fingerprint,
and at the last observation: a snapshot that forgets something is found out, not believed.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

MAX_BYTES = 1 << 24
"""Larger snapshots are not kept."""
_MAX_HEADER = 4096
_PREFIX = struct.Struct("<III")  # checksum of what follows, length of the header, length of the snapshot


@dataclass(frozen=True)
class Snapshot:
    """What an environment said of itself during an episode, and how to tell that it was right."""

    episode: int
    """k, as in the episode's log."""
    steps: int
    """Steps of the episode that led to it."""
    reward: float
    """Raw rewards of those steps, added up."""
    later: int
    """Steps of the episode that led to the snapshot after this one."""
    fingerprint: str
    """Of the snapshot after this one."""
    data: bytes

    def header(self) -> dict[str, Any]:
        """Everything but ``data``, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "data"}


def fingerprint(snapshot: bytes) -> str:
    """SHA-256 of an environment's snapshot, in hexadecimal."""
    return hashlib.sha256(snapshot).hexdigest()


class SnapshotFile:
    """An anonymous file with a place for each replica's newest snapshot: its executor writes it, the run reads it.

    Places are far apart, but memory is only taken for what is written. A run that reads while an executor writes sees
    that the checksum doesn't fit, and does without: the episode's log is enough to resume.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("htsrl-snapshots") if fd is None else fd

    def write(self, column: int, snapshot: Snapshot) -> None:
        """Put ``snapshot`` in the place of replica ``column``, over the one before."""
        header = json.dumps(snapshot.header()).encode()
        record = header + snapshot.data
        prefix = _PREFIX.pack(zlib.crc32(record), len(header), len(snapshot.data))
        os.pwrite(self.fd, prefix + record, self._place(column))

    def read(self, column: int) -> Snapshot | None:
        """The newest snapshot of replica ``column``; None where there is none, or while it is being written."""
        place = self._place(column)
        prefix = os.pread(self.fd, _PREFIX.size, place)
        if len(prefix) < _PREFIX.size:
            return None
        checksum, size, length = _PREFIX.unpack(prefix)
        if not 0 < size <= _MAX_HEADER or length > MAX_BYTES:
            return None
        record = os.pread(self.fd, size + length, place + _PREFIX.size)
        if len(record) != size + length or zlib.crc32(record) != checksum:
            return None
        return Snapshot(**json.loads(record[:size]), data=record[size:])

    def close(self) -> None:
        os.close(self.fd)

    @staticmethod
    def _place(column: int) -> int:
        return column * (_PREFIX.size + _MAX_HEADER + MAX_BYTES)

    def __reduce__(self) -> tuple:
        return _rebuild, (reduction.DupFd(self.fd),)


def _rebuild(duplicate: Any) -> SnapshotFile:
    return SnapshotFile(duplicate.detach())
