"""Tests compute with one thread, like the learner of a small network: two would fight with the runs' own processes."""

from multiprocessing import forkserver

import pytest
import torch
from fault_points import launch_quick_server

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def quick_children():
    """For modules that start many processes; executors that must not know torch are no matter there."""
    launch_quick_server()
    yield
    forkserver._forkserver._stop()
