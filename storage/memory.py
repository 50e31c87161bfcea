"""Anonymous shared memory: one memfd holds every shared array, and disappears with the last process that maps it."""

from __future__ import annotations

import math
import mmap
import os
from multiprocessing import reduction
from types import SimpleNamespace
from typing import Any

import numpy as np

from htsrl.storage.fields import Field

# Arrays start on cache-line boundaries, so that two writers never share a line at an array's edge.
_ALIGNMENT = 64


class Arena:
    """Named arrays in one anonymous file. Sent to a child process, it maps the same memory there.

    ``Arena.create`` allocates zeroed memory; pages are only taken when written. Nothing appears in /dev/shm, so a
    container's limit on it does not matter, and nothing is left behind however the processes die.
    """

    def __init__(self, fd: int, fields: dict[str, list[Field]]) -> None:
        self.fd = fd
        self.fields = fields
        self._memory = mmap.mmap(fd, max(total_bytes(fields), 1))

    @classmethod
    def create(cls, fields: dict[str, list[Field]]) -> Arena:
        """Allocate all ``fields``, grouped by the name under which :meth:`views` returns them."""
        fd = os.memfd_create("htsrl")
        os.ftruncate(fd, max(total_bytes(fields), 1))
        return cls(fd, fields)

    def views(self, group: str) -> Any:
        """The arrays of one group as attributes of a namespace: ``arena.views("control").interval``."""
        offset = 0
        for name, fields in self.fields.items():
            if name == group:
                break
            offset += sum(_aligned(f) for f in fields)
        else:
            raise KeyError(group)
        views = SimpleNamespace()
        for field in self.fields[group]:
            count = int(np.prod(field.shape, dtype=np.int64))
            array = np.frombuffer(self._memory, field.dtype, count, offset).reshape(field.shape)
            setattr(views, field.name, array)
            offset += _aligned(field)
        return views

    def close(self) -> None:
        """Close the descriptor; the memory itself lives as long as a view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __reduce__(self) -> tuple:
        return _rebuild, (reduction.DupFd(self.fd), self.fields)


def _rebuild(duplicate: Any, fields: dict[str, list[Field]]) -> Arena:
    return Arena(duplicate.detach(), fields)


def total_bytes(fields: dict[str, list[Field]]) -> int:
    """Size of an arena with these fields."""
    return sum(_aligned(f) for group in fields.values() for f in group)


def _aligned(field: Field) -> int:
    size = math.prod(field.shape) * field.dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT
