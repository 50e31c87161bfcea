"""A resumed run is the run: the same bits, records and evaluations as if it had never stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording import known_to, opened

from htsrl import envs
from htsrl.checkpoint import list_checkpoints, load_checkpoint
from htsrl.errors import ConfigError
from htsrl.run import Run
from htsrl.settings import Layer, configure
from htsrl.training import fork, resume, train

SMALL = {
    "num_envs": 4,
    "sync_interval": 16,
    "total_steps": 4 * 16 * 8,
    "minibatches": 4,
    "epochs": 2,
    "progress": "none",
    "keep_checkpoints": 100,
}
# An evaluator costs every run a process that loads torch: only where evaluations matter.
EVALUATED = {"eval_every": 100, "eval_episodes": 2}  # fmt: skip


def no_changes(**values):
    return Layer(values, lambda name: f"--{name}")


class StoppingRun(Run):
    """A run that is interrupted at the barrier after a given interval."""

    stop_after = 0
    stop: threading.Event

    def count(self, j, waiting):
        if j == self.stop_after:
            self.stop.set()
        return super().count(j, waiting)

    def train(self, stop):
        self.stop = stop
        super().train(stop)


def interrupted(run_dir, after, **settings):
    """Start a run and interrupt it after interval ``after``."""
    with opened(StoppingRun, run_dir, **settings_for(**settings)) as run:
        run.stop_after = after
        run.train(threading.Event())
        assert run.result.interrupted


def settings_for(algo="ppo", **settings):
    """SMALL, as far as the algorithm knows it, with ``settings`` on top."""
    return known_to(algo, SMALL) | {"algo": algo} | settings


def bits(run_dir):
    """Everything of a finished run that must not depend on stops; clock times left out."""
    result = json.loads((run_dir / "result.json").read_text())
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in metrics:
        for name in [name for name in record if name.startswith(("time/", "memory/")) or "second" in name]:
            del record[name]
    evaluations = (run_dir / "evaluations.jsonl").read_text()
    names = ("steps", "intervals", "episodes", "episode_return_mean", "parameters_sha256", "trajectory_sha256")
    return [result[name] for name in names], metrics, evaluations


def tensorboard_steps(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars("loss/value")]


@pytest.mark.parametrize(
    ("env", "algo", "extra"),
    [
        ("CartPole-v1", "ppo", EVALUATED),
        ("CartPole-v1", "ppo", {"schedule": "sync"}),
        ("CartPole-v1", "a2c", {}),
        ("CartPole-v1", "impala", {}),
        ("Pendulum-v1", "ppo", {"max_episode_steps": 16}),
        ("synthetic:counting", "ppo", {}),
    ],
)
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, env, algo, extra):
    chosen = settings_for(env=env, algo=algo, **extra)
    train(configure(run_dir=tmp_path / "whole", **chosen))
    for after in (0, 3) if extra is EVALUATED else (3,):
        run_dir = tmp_path / f"stopped-{after}"
        interrupted(run_dir, after, **chosen)
        # In another layout, which must not matter
        resume(run_dir, no_changes(num_executors=2, envs_per_group=1))
        assert bits(run_dir) == bits(tmp_path / "whole")
        assert tensorboard_steps(run_dir) == tensorboard_steps(tmp_path / "whole")


def test_killed_runs_resume_to_the_same_bits(tmp_path):
    evaluated = SMALL | EVALUATED
    train(configure(env="CartPole-v1", run_dir=tmp_path / "whole", **evaluated))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in evaluated.items()]
    run_dir = tmp_path / "killed"
    command = [sys.executable, "-m", "htsrl"]
    process = subprocess.Popen(
        [*command, "train", "--env=CartPole-v1", f"--run-dir={run_dir}", "--checkpoint-every=64", *flags]
    )
    kills = 0
    for wanted in (1, 3, 5):
        deadline = time.monotonic() + 60
        while len(list_checkpoints(run_dir / "checkpoints")) < wanted and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        process = subprocess.Popen([*command, "resume", str(run_dir)])
    assert process.wait(60) == 0
    assert kills
    assert bits(run_dir) == bits(tmp_path / "whole")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an uninterrupted run of SMALL on CartPole left behind."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(configure(env="CartPole-v1", run_dir=run_dir, **SMALL))
    return bits(run_dir)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    stops=st.lists(st.integers(0, 6), min_size=1, max_size=2, unique=True).map(sorted),
    executors=st.integers(1, 4),
    group=st.integers(1, 4),
)
def test_any_stops_and_layouts_give_the_same_run(tmp_path_factory, whole_counting, stops, executors, group):
    run_dir = tmp_path_factory.mktemp("stops") / "run"
    interrupted(run_dir, stops[0], env="synthetic:counting")
    for stop in stops[1:]:
        resume_until(run_dir, stop)
    group = min(group, -(-SMALL["num_envs"] // executors))
    resume(run_dir, no_changes(num_executors=executors, envs_per_group=group))
    assert bits(run_dir) == whole_counting


@pytest.fixture(scope="module")
def whole_counting(tmp_path_factory):
    """What an uninterrupted run of SMALL on the counting environment left behind."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(configure(env="synthetic:counting", run_dir=run_dir, **SMALL))
    return bits(run_dir)


def resume_until(run_dir, after):
    """Resume a run, and interrupt it again after interval ``after``."""
    import htsrl.training as training

    class Stopping(StoppingRun):
        stop_after = after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "Run", Stopping)
        assert resume(run_dir, no_changes()).interrupted


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path, whole):
    interrupted(tmp_path / "run", 2, env="CartPole-v1")
    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        path.unlink()
    resume(tmp_path / "run", no_changes())
    assert bits(tmp_path / "run") == whole


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, damage, capsys, whole):
    interrupted(tmp_path / "run", 5, env="CartPole-v1", checkpoint_every=64)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    data = bytearray(newest.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    newest.write_bytes(data[: {"truncate": len(data) // 2, "flip": len(data), "empty": 0}[damage]])
    capsys.readouterr()
    resume(tmp_path / "run", no_changes(progress="plain"))
    printed = "".join(capsys.readouterr())
    assert newest.name in printed.replace("\n", "")
    assert bits(tmp_path / "run") == whole


def test_a_file_left_between_write_and_rename_is_not_a_checkpoint(tmp_path, whole):
    interrupted(tmp_path / "run", 3, env="CartPole-v1")
    folder = tmp_path / "run" / "checkpoints"
    (folder / ".steps-000000999999.safetensors.123.tmp").write_bytes(b"half")
    resume(tmp_path / "run", no_changes())
    assert bits(tmp_path / "run") == whole


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    train(configure(env="CartPole-v1", run_dir=tmp_path / "run", **SMALL))
    before = {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "run").rglob("*") if path.is_file()
    }
    assert resume(tmp_path / "run", no_changes()) is None
    after = {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "run").rglob("*") if path.is_file()
    }
    assert before == after


def test_an_environment_that_shows_the_clock_is_found_out(tmp_path, capsys):
    interrupted(tmp_path / "run", 3, env="faulty_envs:Clock-v0")
    capsys.readouterr()
    result = resume(tmp_path / "run", no_changes(progress="plain"))
    assert result.values["reproducible"] is False
    assert "".join(capsys.readouterr()).replace("\n", " ").count("does not repeat itself") == 1
    # A well-behaved one is not accused
    interrupted(tmp_path / "steady", 3, env="faulty_envs:Steady-v0")
    assert resume(tmp_path / "steady", no_changes()).values["reproducible"] is True


# ------------------------------------------------------------------------------------------------------------ refusals


def test_changes_that_change_results_are_refused_by_name(tmp_path):
    interrupted(tmp_path / "run", 1, env="CartPole-v1")
    with pytest.raises(ConfigError, match=r"--learning_rate.*--fork"):
        resume(tmp_path / "run", no_changes(learning_rate=1e-2))
    with pytest.raises(ConfigError, match=r"--num_envs"):
        resume(tmp_path / "run", no_changes(num_envs=8))
    with pytest.raises(ConfigError, match=r"known"):
        resume(tmp_path / "run", no_changes(nonsense=1))


def test_a_changed_environment_version_is_refused(tmp_path, monkeypatch):
    interrupted(tmp_path / "run", 1, env="CartPole-v1")
    real = envs.describe
    from dataclasses import replace

    monkeypatch.setattr(envs, "describe", lambda *a: replace(real(*a), versions={"gymnasium": "0.1"}))
    with pytest.raises(ConfigError, match=r"gymnasium .* then, 0\.1 now"):
        resume(tmp_path / "run", no_changes())


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        resume(tmp_path / "nothing", no_changes())
    with pytest.raises(ConfigError, match=r"no config\.toml"):
        resume(tmp_path, no_changes())


def test_two_processes_never_train_in_one_folder(tmp_path):
    from htsrl.rundir import alone_in

    with alone_in(tmp_path), pytest.raises(ConfigError, match="another process"), alone_in(tmp_path):
        pass


def test_fork_starts_a_new_run_from_the_weights(tmp_path):
    interrupted(tmp_path / "run", 3, env="CartPole-v1")
    weights = load_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[-1]).group("parameters")
    result = fork(
        tmp_path / "run",
        no_changes(run_dir=tmp_path / "new", learning_rate=1e-9, lr_schedule="constant", total_steps=64),
    )
    assert result.run_dir == tmp_path / "new"
    after = load_checkpoint(list_checkpoints(tmp_path / "new" / "checkpoints")[-1]).group("parameters")
    for name, array in weights.items():
        assert abs(after[name] - array).max() < 1e-6
    with pytest.raises(ConfigError, match="don't fit"):
        fork(tmp_path / "run", no_changes(run_dir=tmp_path / "other", hidden_sizes=(8,)))
