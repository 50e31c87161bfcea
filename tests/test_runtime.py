"""The running system: rows stand where they belong, the lag is one, and no bit depends on the layout or the timing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise

import numpy as np
import psutil
import pytest
from recording import known_to, record

from htsrl.envs.synthetic import Counting
from htsrl.errors import EnvironmentFailed, RunFailed
from htsrl.rng import episode_seed
from htsrl.training import train

SMALL = {"num_envs": 8, "sync_interval": 16, "total_steps": 8 * 16 * 4, "minibatches": 4, "epochs": 2}


def digests(recording):
    return recording.result.values["trajectory_sha256"], recording.result.values["parameters_sha256"]


def assert_same_bits(a, b):
    """Every field of every interval, every behaviour parameter and every logged loss."""
    assert len(a.intervals) == len(b.intervals)
    for j, (one, other) in enumerate(zip(a.intervals, b.intervals)):
        for name in one:
            same = one[name].tobytes() == other[name].tobytes()
            assert same, f"{name} of interval {j} differs"
    for one, other in zip(a.parameters, b.parameters):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(a.metrics, b.metrics):
        losses = [name for name in one if name.startswith("loss/")]
        assert losses
        assert [one[name] for name in losses] == [other[name] for name in losses]
    assert digests(a) == digests(b)


# ---------------------------------------------------------------------------------------------------------- same bits


@pytest.mark.parametrize(
    ("env", "algo"),
    [("CartPole-v1", "ppo"), ("CartPole-v1", "a2c"), ("CartPole-v1", "impala"), ("Pendulum-v1", "ppo")],
)
def test_layouts_give_the_same_bits_and_another_seed_does_not(tmp_path, env, algo):
    settings = known_to(algo, SMALL)
    runs = {
        (executors, actors, group): record(
            tmp_path / f"{executors}x{actors}x{group}",
            env,
            algo,
            num_executors=executors,
            num_actors=actors,
            envs_per_group=group,
            **settings,
        )
        for executors, actors, group in ((1, 1, 4), (2, 1, 2), (2, 2, 1), (4, 3, 1))
    }
    first, *others = runs.values()
    for other in others:
        assert_same_bits(first, other)
    other_seed = record(tmp_path / "seed", env, algo, seed=1, **settings)
    assert digests(other_seed)[0] != digests(first)[0]
    assert digests(other_seed)[1] != digests(first)[1]


def test_sync_gives_the_same_bits_for_any_executors(tmp_path):
    one = record(tmp_path / "1", "CartPole-v1", schedule="sync", num_executors=1, **SMALL)
    four = record(tmp_path / "4", "CartPole-v1", schedule="sync", num_executors=4, **SMALL)
    assert_same_bits(one, four)
    assert digests(one) != digests(record(tmp_path / "hts", "CartPole-v1", **SMALL))


def test_random_step_times_do_not_change_a_bit(tmp_path):
    # The duration of the sleeping environment's steps is drawn from the operating system's scheduler and its own law;
    # trajectories are a function of seed and actions alone.
    slow = record(tmp_path / "slow", "synthetic:sleep", step_ms=2.0, num_executors=8, **SMALL)
    fast = record(tmp_path / "fast", "synthetic:sleep", step_ms=0.0, num_executors=2, **SMALL)
    assert_same_bits(slow, fast)


# ------------------------------------------------------------------------------------------------------ the right rows


def test_rows_of_the_counting_environment_are_aligned(tmp_path):
    """Every row is compared with what the counting environment must have said there: no row may move."""
    layout = {"num_executors": 3, "num_actors": 2, "envs_per_group": 1}
    recording = record(tmp_path / "run", "synthetic:counting", **layout, **SMALL)
    names = ("obs", "action", "reward", "terminated", "truncated", "valid")
    ends = {"terminated": 0, "truncated": 0}
    for n in range(SMALL["num_envs"]):
        obs, actions, rewards, terminated, truncated, valid = (recording.stacked(name)[:, n] for name in names)
        k, step, last_action, over = 0, 0, -1, False
        for t in range(len(rewards)):
            episode = Counting.Episode.of(episode_seed(0, n, k))
            np.testing.assert_array_equal(obs[t], episode.observation(step, last_action))
            if over:
                # Not a transition: the last observation of a truncated episode, nothing else
                assert not valid[t]
                assert (rewards[t], terminated[t], truncated[t]) == (0, False, False)
                k, step, last_action, over = k + 1, 0, -1, False
                continue
            step, last_action = step + 1, int(actions[t])
            assert valid[t]
            assert rewards[t] == episode.reward(step, last_action)
            ended = step == episode.length
            assert terminated[t] == (ended and not episode.truncates)
            assert truncated[t] == (ended and episode.truncates)
            ends["terminated"] += int(terminated[t])
            ends["truncated"] += int(truncated[t])
            over = bool(truncated[t])
            if terminated[t]:
                k, step, last_action = k + 1, 0, -1
    assert min(ends.values()) > 0
    # An interval begins with the observation at which the one before ended
    for before, after in pairwise(recording.intervals):
        np.testing.assert_array_equal(before["obs"][-1], after["obs"][0])
    assert recording.result.values["steps"] == int(recording.stacked("valid").sum())


def test_the_policy_lag_is_one_and_actors_use_exactly_the_behaviour_parameters(tmp_path):
    import torch

    from htsrl import envs
    from htsrl.models import build_model
    from htsrl.models.flat import FlatParameters
    from htsrl.settings import configure

    recording = record(tmp_path / "run", "CartPole-v1", **SMALL)
    assert [int(i["behaviour_version"][0]) for i in recording.intervals] == list(range(len(recording.intervals)))
    assert [record["policy_lag"] for record in recording.metrics] == [1] * len(recording.intervals)
    # θ_1 = θ_0; after that every interval has new parameters
    assert np.array_equal(recording.parameters[0], recording.parameters[1])
    assert not np.array_equal(recording.parameters[1], recording.parameters[2])
    # What stands in the storage is what θ_j says, row by row
    config = configure(env="CartPole-v1")
    model = build_model(envs.describe(config.env, config.environment), config.network, config.seed)
    flat = FlatParameters(model, gradients=False)
    for parameters, interval in zip(recording.parameters, recording.intervals):
        flat.assign(torch.from_numpy(parameters))
        with torch.inference_mode():
            logits, value = model(torch.from_numpy(interval["obs"][:-1].reshape(-1, 4)))
            action = model.head.sample(logits, torch.from_numpy(interval["noise"].reshape(-1, 2)))
        torch.testing.assert_close(value, torch.from_numpy(interval["value"].ravel()))
        assert torch.equal(action, torch.from_numpy(interval["action"].ravel()))


def test_a_buffer_reusing_environment_is_copied_in_time(tmp_path):
    recording = record(tmp_path / "run", "faulty_envs:ReusesBuffers-v0", max_episode_steps=5, **SMALL)
    obs, truncated = recording.stacked("obs"), recording.stacked("truncated")
    rows = np.argwhere(truncated[:-1])
    assert len(rows)
    for t, n in rows:
        # The last observation of the truncated episode, not the first of the next
        assert obs[t + 1, n, 3] == obs[t, n, 3] + 1 == 5


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("Raises-v0", ["step", "replica", "episode 0", "Traceback", "the robot fell over"]),
        ("RaisesInReset-v0", ["reset", "replica", "the robot didn't get up"]),
        ("NanObservation-v0", ["NaN", "replica"]),
        ("InfReward-v0", ["reward of inf", "replica"]),
        ("WrongShape-v0", ["shape", "replica"]),
        ("Exits-v0", ["executor", "exit status"]),
    ],
)
def test_a_faulty_environment_stops_the_run_with_its_reason(tmp_path, env, words):
    started = time.monotonic()
    with pytest.raises(RunFailed) as failure:
        record(tmp_path / "run", f"faulty_envs:{env}", **SMALL)
    assert time.monotonic() - started < 100
    message = str(failure.value)
    assert [word for word in words if word not in message] == []
    assert isinstance(failure.value, EnvironmentFailed) == (env != "Exits-v0")
    assert not our_children()


def our_children():
    """Executors, actors and evaluators of this test process that don't end: the children of its fork server."""
    from multiprocessing.forkserver import _forkserver

    return wait_until_gone(psutil.Process(_forkserver._forkserver_pid).children(recursive=True), 10)


def run_in_background(tmp_path, *flags):
    command = [
        sys.executable, "-m", "htsrl", "train", "--env", "CartPole-v1", "--num-envs", "8", "--sync-interval", "16",
        "--minibatches", "4", "--total-steps", "100000000", "--run-dir", str(tmp_path / "run"), *flags,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def wait_until_gone(processes, seconds):
    """Those of ``processes`` that are still there after so long, but for zombies."""
    deadline = time.monotonic() + seconds
    while alive := [process for process in processes if process.is_running() and not is_zombie(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return alive


def is_zombie(process):
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize(
    ("number", "schedule"), [(signal.SIGINT, "hts"), (signal.SIGTERM, "hts"), (signal.SIGINT, "async")]
)
def test_one_interrupt_ends_the_run_with_a_checkpoint(tmp_path, number, schedule):
    process = run_in_background(tmp_path, "--schedule", schedule)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)  # like a terminal: the whole group hears of it
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert list((tmp_path / "run" / "checkpoints").glob("*.safetensors"))
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))
    assert not wait_until_gone(children, 10)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["interval"] for r in records] == list(range(len(records)))


def test_killing_the_run_takes_its_children_along(tmp_path):
    process = run_in_background(tmp_path)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.communicate()
    assert not wait_until_gone(children, 10)


# ----------------------------------------------------------------------------------------------------------- processes


def test_executors_never_load_torch(tmp_path):
    """Its own environment looks around inside the executor's process."""
    recording = record(tmp_path / "run", "looking_envs:ReportsTorch-v0", **SMALL)
    assert recording.stacked("obs").max() == 0, "torch is loaded in an executor"


def test_train_leaves_a_complete_run_folder(tmp_path):
    from htsrl.settings import configure

    config = configure(
        env="CartPole-v1", run_dir=tmp_path / "run", progress="none", eval_every=256, eval_episodes=3, **SMALL
    )
    result = train(config)
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["parameters_sha256"] == result.values["parameters_sha256"]
    assert written["steps"] >= SMALL["total_steps"]
    assert {"config.toml", "metrics.jsonl", "evaluations.jsonl", "checkpoints"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert len(evaluations) == 2
    for evaluation, due in zip(evaluations, (256, 512)):
        # At the first barrier at or after each multiple
        assert due - 2 * 8 <= evaluation["steps"] <= due + 8 * 16
    assert not our_children()
