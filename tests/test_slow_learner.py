"""While the learner is busy for minutes, a failure elsewhere or a second Ctrl-C still ends the run within seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from test_runtime import wait_until_gone

from htsrl.errors import EnvironmentFailed
from htsrl.settings import configure
from htsrl.training import train

BACKWARD_S = 1.0
STEPS = 256
"""Gradient steps of an update: it takes more than four minutes."""
SLOW = {
    "network": "faulty_nets:slow_to_learn", "num_envs": 4, "sync_interval": 32, "epochs": 4, "minibatches": STEPS // 4,
    "num_executors": 1, "progress": "none", "tensorboard": False,
}  # fmt: skip


def test_a_failure_ends_the_run_long_before_the_update_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("BACKWARD_SECONDS", str(BACKWARD_S))
    started = time.monotonic()
    with pytest.raises(EnvironmentFailed, match="the robot fell over"):
        # At step 37, in the second interval: while the learner learns from the first
        train(configure("faulty_envs:Raises-v0", run_dir=tmp_path / "run", **SLOW))
    assert time.monotonic() - started < STEPS * BACKWARD_S / 2


def test_a_second_interrupt_ends_the_run_at_once_and_leaves_nothing(tmp_path):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SLOW.items() if name != "tensorboard"]
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__), "BACKWARD_SECONDS": str(BACKWARD_S)}
    begun = tmp_path / "begun"
    environment["BACKWARD_BEGUN"] = str(begun)
    command = [sys.executable, "-m", "htsrl", "train", "--env=faulty_envs:Steady-v0", f"--run-dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [*command, *flags], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while not begun.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert any("stopping after this interval" in line for line in process.stderr)
        time.sleep(1.0)
        assert process.poll() is None, "the first one waits for the interval"
        interrupted = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=STEPS * BACKWARD_S / 2)
        assert process.returncode == 130, stderr
        assert time.monotonic() - interrupted < 30
    finally:
        process.kill()
    assert not wait_until_gone(children, 10)
    assert not list((tmp_path / "run").rglob("*.tmp"))
