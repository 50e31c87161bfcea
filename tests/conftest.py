"""Tests compute with one thread, like the learner of a small network: two would fight with the runs' own processes."""

from multiprocessing import forkserver

import hypothesis
import pytest
import torch
from fault_points import launch_quick_server

torch.set_num_threads(1)
# Where other programs use the cores and the disk, an example may take any time
hypothesis.settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared machine")


@pytest.fixture(scope="module")
def quick_children():
    """For modules that start many processes; executors that must not know torch are no matter there."""
    launch_quick_server()
    yield
    forkserver._forkserver._stop()
