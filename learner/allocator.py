"""How the process that learns gets its memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

# glibc's numbers for mallopt, and Linux's for madvise
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_DEFAULT_TOP_PAD = 128 << 10
_MADV_HUGEPAGE = 14

LARGEST_BLOCK = 32 << 20
"""glibc's limit for blocks of its heap; larger ones always come from the kernel, and go back to it."""
HEAP = 512 << 20
"""What the heap is made to span at once: more than an update needs. It takes memory only where something is written."""


def keep_freed_memory() -> None:
    """Blocks of up to 32 MiB come from one heap that does not shrink, in huge pages; elsewhere nothing is done.

    A block that went back to the kernel costs a page fault per 4 KiB when it is wanted again, 7 % of a CNN's update;
    heaps of threads of their own give back even more. Small pages cost another 4 to 7 %, in bfloat16 10 to 20 %: a
    minibatch's tensors are more of them than the processor can keep the addresses of.
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt, madvise = libc.mallopt, libc.madvise
    except (AttributeError, OSError):
        return  # not glibc
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, LARGEST_BLOCK)
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)

    # Huge pages are for addresses that are there already, so the heap grows first
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    mallopt(_M_TOP_PAD, HEAP)
    grown = libc.malloc(ctypes.c_size_t(LARGEST_BLOCK // 2))
    libc.free(ctypes.c_void_p(grown))
    mallopt(_M_TOP_PAD, _DEFAULT_TOP_PAD)
    start, end = heap(), libc.sbrk(ctypes.c_ssize_t(0))
    if start is not None and end is not None:
        size = end // mmap.PAGESIZE * mmap.PAGESIZE - start
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)


def heap() -> int | None:
    """Where the heap of this process begins; None where the system doesn't say."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split("-")[0], 16) for line in lines if line.endswith("[heap]")), None)
