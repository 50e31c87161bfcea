"""Shared memory: what one process writes another reads, arrays never overlap, and nothing appears in /dev/shm."""

import os

import numpy as np

from htsrl import processes
from htsrl.storage.fields import Field
from htsrl.storage.memory import Arena, total_bytes


def fields(*shapes):
    return [Field(f"f{i}", shape, np.dtype(dtype), "run", ()) for i, (shape, dtype) in enumerate(shapes)]


def test_arrays_are_zero_aligned_and_disjoint():
    arena = Arena.create({"a": fields(((3, 5), "u1"), ((2,), "f8")), "b": fields(((7,), "i4"), ((0,), "f4"))})
    arrays = [*vars(arena.views("a")).values(), *vars(arena.views("b")).values()]
    for i, array in enumerate(arrays):
        assert not array.any()
        assert array.ctypes.data % 64 == 0
        array[...] = i + 1
    assert [set(array.ravel().tolist()) for array in arrays] == [{1}, {2}, {3}, set()]
    assert total_bytes(arena.fields) == 64 * 3


def test_the_two_storages_do_not_overlap():
    arena = Arena.create({"even": fields(((9,), "f4")), "odd": fields(((9,), "f4"))})
    arena.views("even").f0[:] = 1
    assert not arena.views("odd").f0.any()


def _write(arena):
    arena.views("a").f0[...] = 42


def test_a_child_writes_into_the_same_memory():
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    arena = Arena.create({"a": fields(((4,), "i8"))})
    child = processes.start(_write, arena, "writer")
    child.join()
    assert arena.views("a").f0.tolist() == [42] * 4
    if before:
        assert {n for n in os.listdir("/dev/shm") if "htsrl" in n} <= before
    arena.close()
