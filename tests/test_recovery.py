"""Processes that die, hang or are stopped in the middle of a run: it goes on, and ends with the same bits."""

from __future__ import annotations

import random
import re
import signal
import threading
from contextlib import contextmanager, suppress

import pytest
from fault_points import Fault, meanwhile, scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording import opened

from htsrl.errors import RunFailed
from htsrl.rng import episode_seed
from htsrl.run import Run

pytestmark = pytest.mark.usefixtures("quick_children")

SMALL = {
    "num_envs": 6, "sync_interval": 16, "total_steps": 6 * 16 * 6, "minibatches": 4, "epochs": 1,
    "num_executors": 2, "num_actors": 2, "envs_per_group": 1, "progress": "none", "tensorboard": False,
}  # fmt: skip


def running(run_dir, **changes):
    """A run of SMALL in which every process pauses now and then."""
    return opened(Run, run_dir, delay_ms=2.0, **SMALL | changes)


def result_of(run):
    run.train(threading.Event())
    values = run.result.values
    return {name: values[name] for name in ("trajectory_sha256", "parameters_sha256", "steps", "episode_return_mean")}


def left_in_peace(run_dir, **changes):
    """Results of a run that nothing happens to."""
    with running(run_dir, **changes) as run:
        return result_of(run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Results of runs that nothing happened to, by environment."""
    known = {}

    def get(env, **changes):
        key = (env, *sorted(changes.items()))
        if key not in known:
            known[key] = left_in_peace(tmp_path_factory.mktemp("undisturbed") / "run", env=env, **changes)
        return known[key]

    return get


@contextmanager
def disturbed(run, moments, number):
    """Send ``number`` to a child whenever the run has posted one of ``moments`` rows; gives those that got it."""
    choose, done, sent = random.Random(len(moments)), threading.Event(), []

    def strike():
        for moment in sorted(moments):
            while run.control.posted.sum() < moment:
                if done.wait(0.0005):
                    return
            while True:
                child = choose.choice(list(run.crew.children))
                with suppress(OSError):  # it was being replaced
                    signal.pidfd_send_signal(child.pidfd, number)
                    sent.append(str(child))
                    break
                if done.wait(0.0005):
                    return

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield sent
    finally:
        done.set()
        thread.join()


def rows(share):
    """Rows that a run of SMALL has posted after ``share`` of its length."""
    return int(share * SMALL["total_steps"])


def assert_kills_change_no_bit(run_dir, expected, **changes):
    """A run whose children are killed every now and then ends with the ``expected`` results."""
    moments = [rows(share) for share in (0.1, 0.3, 0.5, 0.7, 0.9)]
    with running(run_dir, **changes) as run, disturbed(run, moments, signal.SIGKILL) as sent:
        result = result_of(run)
    assert len(sent) >= 3
    assert run.result.values["recovered"] >= 1
    assert run.result.values["reproducible"]
    assert result == expected


@pytest.mark.parametrize("env", ["synthetic:counting", "CartPole-v1", "masked_envs:Rooms-v0"])
def test_killed_children_are_replaced_and_no_bit_changes(tmp_path, undisturbed, env):
    assert_kills_change_no_bit(tmp_path / "run", undisturbed(env), env=env)


def test_a_stopped_process_counts_as_hung(tmp_path, undisturbed):
    with (
        running(tmp_path / "run", env="CartPole-v1", step_timeout=3.0) as run,
        disturbed(run, [rows(0.3)], signal.SIGSTOP) as sent,
    ):
        result = result_of(run)
    assert len(sent) == 1
    assert run.result.values["recovered"] == 1
    assert result == undisturbed("CartPole-v1")


@pytest.mark.parametrize("fault", ["Raises", "RaisesInReset", "Exits", "Hangs", "NanObservation", "InfReward"])
def test_a_fault_that_strikes_once_is_recovered_from(tmp_path, undisturbed, fault):
    if fault == "NanObservation":
        pytest.skip("the row is in the storage before it is seen: replaying meets another observation")
    once = tmp_path / "struck"
    changes = {"step_timeout": 2.0} if fault == "Hangs" else {}
    with (
        scripted(tmp_path, FAULT_ONCE=str(once)),
        running(tmp_path / "run", env=f"faulty_envs:{fault}-v0", **changes) as run,
    ):
        result = result_of(run)
        assert once.exists()
        assert run.result.values["recovered"] == 1
        assert run.result.values["reproducible"]
    assert result == undisturbed("faulty_envs:Steady-v0")


def test_one_that_is_stopped_once_it_has_said_why_it_fails_is_replaced(tmp_path, undisturbed):
    faults = [Fault("executor", "after environment", index=e, number=signal.SIGSTOP) for e in (0, 1)]
    (tmp_path / "strikes").mkdir()
    with (
        scripted(tmp_path / "strikes", *faults, FAULT_ONCE=str(tmp_path / "struck")),
        running(tmp_path / "run", env="faulty_envs:Raises-v0") as run,
    ):
        result = result_of(run)  # or waits for ever
    assert run.result.values["recovered"] == 1
    assert result == undisturbed("faulty_envs:Steady-v0")


def test_an_environment_that_does_not_repeat_itself_is_noticed(tmp_path, capsys):
    with running(tmp_path / "run", env="faulty_envs:Clock-v0", progress="plain") as run:
        executor = next(child for child in run.crew.children if child.role == "executor")

        def strike(run):
            signal.pidfd_send_signal(executor.pidfd, signal.SIGKILL)  # without waiting: the supervisor closes it

        with meanwhile(run, rows(0.5), strike):
            run.train(threading.Event())
        assert run.result.values["recovered"] == 1
        assert run.result.values["reproducible"] is False
        assert run.result.values["steps"] >= SMALL["total_steps"]
    assert "".join(capsys.readouterr()).replace("\n", " ").count("does not repeat itself") == 1


def test_the_same_failure_at_the_same_step_ends_the_run(tmp_path):
    with running(tmp_path / "run", env="faulty_envs:Raises-v0") as run:
        with pytest.raises(RunFailed) as failure:
            run.train(threading.Event())
        assert 1 <= run.crew.recovered <= 6  # each replica may be forgiven once
    where = r"replica (\d), episode (\d), step 36 \(episode seed (\d+), action [01]; executor [01]\)"
    end = r'faulty_envs\.py".*RuntimeError: the robot fell over\nThis was failure 2 at the same place'
    found = re.search(rf"(?s)faulty_envs:Raises-v0 failed in step: {where}:\nTraceback.*{end}", str(failure.value))
    assert found, failure.value
    replica, episode, seed = map(int, found.groups())
    assert seed == episode_seed(run.config.seed, replica, episode)


def test_a_crash_in_native_code_shows_where(tmp_path):
    with running(tmp_path / "run", env="faulty_envs:Crashes-v0", max_restarts=1) as run:
        with pytest.raises(RunFailed) as failure:
            run.train(threading.Event())
        assert run.crew.recovered == 1
    text = str(failure.value)
    assert re.search(r'(?s)executor [01] was killed by signal 11:\n.*faulty_envs\.py", line \d+ in fault', text), text
    assert text.endswith("No more restarts: 1 have been made (--max-restarts 1)")


def test_whoever_never_comes_up_is_not_started_for_ever(tmp_path):
    dies = Fault("actor", "before ready", 1, times=10)
    (tmp_path / "strikes").mkdir()
    with scripted(tmp_path / "strikes", dies), running(tmp_path / "run", env="CartPole-v1") as run:
        with pytest.raises(RunFailed, match=r"(?s)actor 0 was killed by signal 9.*failure 4 at the same place"):
            run.train(threading.Event())
        assert run.crew.recovered == 3


def test_without_restarts_the_first_failure_ends_the_run(tmp_path):
    with (
        running(tmp_path / "run", env="CartPole-v1", max_restarts=0) as run,
        disturbed(run, [rows(0.2)], signal.SIGKILL),
        pytest.raises(RunFailed, match="killed by signal 9"),
    ):
        run.train(threading.Event())


def test_the_stack_of_a_hung_environment_is_shown(tmp_path):
    with (
        running(tmp_path / "run", env="faulty_envs:Hangs-v0", step_timeout=1.5, max_restarts=0) as run,
        pytest.raises(RunFailed, match=r"(?s)no progress.*faulty_envs\.py.*in fault"),
    ):
        run.train(threading.Event())


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(moments=st.lists(st.floats(0.01, 0.95), min_size=1, max_size=5))
def test_any_schedule_of_kills_gives_the_same_bits(tmp_path_factory, undisturbed, moments):
    with (
        running(tmp_path_factory.mktemp("kills") / "run", env="synthetic:counting") as run,
        disturbed(run, [rows(moment) for moment in moments], signal.SIGKILL),
    ):
        result = result_of(run)
    assert result == undisturbed("synthetic:counting")
