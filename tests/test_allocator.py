"""What the learner tells the C library's allocator, looked at from a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOOK = """
import ctypes, sys
from pathlib import Path
from htsrl.learner.allocator import HEAP, LARGEST_BLOCK, keep_freed_memory

if sys.argv[1] == "keep":
    for _ in range(3):  # as often as a process makes learners
        keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [libc.malloc(ctypes.c_size_t(LARGEST_BLOCK - 4096)) for _ in range(4)]
inside, flags, size = False, [], 0
for line in Path("/proc/self/smaps").read_text().splitlines():
    if "-" in line.split()[0]:
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        inside = all(first <= block < last for block in blocks)
        size = last - first
    elif inside and line.startswith("VmFlags"):
        print("hg" in line.split(), HEAP <= size < 2 * HEAP)
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
def test_large_blocks_come_from_one_heap_of_huge_pages():
    def look(how: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", LOOK, how], capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout.split()

    assert look("keep") == ["True", "True"]
    assert look("leave") != ["True", "True"]
