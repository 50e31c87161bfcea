"""Mailboxes: pipes of 32-bit integers. A message is a group's number; the bytes it speaks of lie in shared memory.

A round trip costs a few microseconds; a read takes all messages that wait; whoever waits is asleep in the kernel.
"""

from __future__ import annotations

import os
import select
from array import array
from multiprocessing import reduction
from typing import Any

import numpy as np

# Numbers that are no group: what the run tells executors and actors.
STOP = 0xFFFF_FFFF
LOOK = 0xFFFF_FFFE  # "look at the counters": an interval has begun, or an answer may be waiting

# Writes up to PIPE_BUF bytes are atomic; an empty pipe holds 64 KiB. A group has at most one request and one answer
# under way (two after a recovery), so a pipe never fills.
_ATOMIC = 4096
_CAPACITY = 65_536


class _End:
    """One end of a pipe, which can be sent to a child process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def fileno(self) -> int:
        return self.fd

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), reduction.DupFd(self.fd))


class Inbox(_End):
    """The reading end."""

    def take(self) -> list[int]:
        """All waiting numbers, one or more; blocks while there are none.

        Raises:
            EOFError: every writer is gone.
        """
        data = os.read(self.fd, _CAPACITY)
        if not data:
            raise EOFError("mailbox closed: every writer is gone")
        return memoryview(data).cast("I").tolist()

    def drop(self) -> None:
        """Throw away what waits for a reader that has ended."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if poll.poll(0):
            os.read(self.fd, _CAPACITY)


class Outbox(_End):
    """The writing end; any number of processes may hold one."""

    def post(self, *numbers: int) -> None:
        """Post a few numbers."""
        self._write(array("I", numbers).tobytes())

    def post_array(self, numbers: np.ndarray) -> None:
        """Post a uint32 array."""
        self._write(numbers.tobytes())

    def _write(self, data: bytes) -> None:
        for start in range(0, len(data), _ATOMIC):
            os.write(self.fd, data[start : start + _ATOMIC])


def mailbox() -> tuple[Inbox, Outbox]:
    """A new mailbox."""
    read, write = os.pipe()
    return Inbox(read), Outbox(write)


def _rebuild(end: type[_End], duplicate: Any) -> _End:
    return end(duplicate.detach())
