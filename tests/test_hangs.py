"""Whatever hangs, in Python or in C, stepping, resetting or answering, is named, replaced, and changes no bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from fault_points import fault_once
from test_recovery import result_of, running
from test_runtime import wait_until_gone

from htsrl.errors import RunFailed


def outcome(run_dir, env="Steady", network="faulty_nets:linear", **changes):
    """Results of a run, and what it said of its children."""
    notes = []
    with running(run_dir, env=f"faulty_envs:{env}-v0", network=network, num_actors=1, **changes) as run:
        run.reporter.note = notes.append
        result = result_of(run)
        assert run.result.values["reproducible"]
        assert bool(run.result.values["recovered"]) == bool(notes)
    return result, notes


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """Results of a run that nothing happened to."""
    result, notes = outcome(tmp_path_factory.mktemp("steady") / "run")
    assert notes == []
    return result


@pytest.mark.parametrize(
    ("env", "network", "who"),
    [
        ("HangsInReset", "faulty_nets:linear", "executor"),
        ("HoldsTheGil", "faulty_nets:linear", "executor"),
        ("Steady", "faulty_nets:hangs_while_answering", "actor"),
    ],
)
def test_what_hangs_once_is_replaced_and_no_bit_changes(tmp_path, steady, env, network, who):
    with fault_once(tmp_path / "struck"):
        result, notes = outcome(tmp_path / "run", env, network, step_timeout=2.0)
        assert (tmp_path / "struck").exists()
    assert any(
        re.fullmatch(rf"{who} \d has made no progress for \d+ s .*; replaced, and going on", note) for note in notes
    )
    assert result == steady


def test_the_stack_shows_where_it_hangs_even_in_c(tmp_path):
    with pytest.raises(RunFailed, match=r"(?s)executor \d has made no progress .*faulty_envs\.py\", line \d+ in fault"):
        outcome(tmp_path / "run", "HoldsTheGil", step_timeout=2.0, max_restarts=0)


def test_a_process_that_can_not_write_its_stack_is_said_to_be_stopped(tmp_path):
    settings = {"env": "synthetic:counting", "num_actors": 1, "step_timeout": 1.0, "max_restarts": 0}
    with running(tmp_path / "run", **settings) as run:
        run.crew.await_ready()
        for child in run.crew.children:
            if child.role == "executor":
                signal.pidfd_send_signal(child.pidfd, signal.SIGSTOP)
        with pytest.raises(RunFailed, match="could not write its stack: it is stopped"):
            run.train(threading.Event())


def test_without_a_step_timeout_everything_may_take_its_time(tmp_path, steady):
    with fault_once(tmp_path / "struck"):
        result, notes = outcome(tmp_path / "run", "Slow", step_timeout="none")
        assert (tmp_path / "struck").exists()
    assert notes == []
    assert result == steady


def test_a_child_that_hangs_in_c_is_gone_with_its_run(tmp_path):
    """None of its Python threads can end it: one call holds the lock that all of them need."""
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__), "FAULT_ONCE": str(tmp_path / "struck")}
    command = [
        sys.executable, "-m", "htsrl", "train", "--env", "faulty_envs:HoldsTheGil-v0", "--num-envs", "4",
        "--sync-interval", "16", "--minibatches", "4", "--progress", "none", "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "struck").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
    finally:
        process.kill()
        process.wait()
    assert not wait_until_gone(children, 10)
