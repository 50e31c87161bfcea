"""Whatever hangs, in Python or in C, stepping, resetting or answering, is named, replaced, and changes no bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from fault_points import fault_once
from test_recovery import result_of, running

from htsrl.errors import RunFailed


def outcome(run_dir, env="Steady", network="faulty_nets:linear", **changes):
    with running(run_dir, env=f"faulty_envs:{env}-v0", network=network, num_actors=1, **changes) as run:
        result = result_of(run)
        return result, run.result.values["recovered"], run.result.values["reproducible"]


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """Results of a run that nothing happened to."""
    return outcome(tmp_path_factory.mktemp("steady") / "run")[0]


@pytest.mark.parametrize(
    ("env", "network"),
    [
        ("HangsInReset", "faulty_nets:linear"),
        ("HoldsTheGil", "faulty_nets:linear"),
        ("Steady", "faulty_nets:hangs_while_answering"),
    ],
)
def test_what_hangs_once_is_replaced_and_no_bit_changes(tmp_path, steady, env, network):
    with fault_once(tmp_path / "struck"):
        result, recovered, reproducible = outcome(tmp_path / "run", env, network, step_timeout=2.0)
        assert (tmp_path / "struck").exists()
    assert recovered >= 1
    assert reproducible
    assert result == steady


@pytest.mark.parametrize(
    ("env", "network", "words"),
    [
        (
            "HoldsTheGil",
            "faulty_nets:linear",
            r"executor \d has made no progress .*faulty_envs\.py\", line \d+ in fault",
        ),
        (
            "Steady",
            "faulty_nets:hangs_while_answering",
            r"actor \d has made no .*faulty_nets\.py\", line \d+ in forward",
        ),
    ],
)
def test_the_stack_shows_where_it_hangs_even_in_c(tmp_path, env, network, words):
    with pytest.raises(RunFailed, match=f"(?s){words}"):
        outcome(tmp_path / "run", env, network, step_timeout=2.0, max_restarts=0)


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
        result, recovered, _ = outcome(tmp_path / "run", "Slow", step_timeout="none")
        assert (tmp_path / "struck").exists()
    assert recovered == 0
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
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
