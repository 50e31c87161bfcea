"""Snapshots of environments: a resumed run is the same run, and has less to replay."""

from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from recording import opened

from htsrl import envs
from htsrl.actors import snapshots
from htsrl.actors.executor import Replica
from htsrl.actors.snapshots import Snapshots
from htsrl.checkpoint import list_checkpoints, load_checkpoint, write_checkpoint
from htsrl.config import GymnasiumOptions
from htsrl.errors import ConfigError
from htsrl.run import Run
from htsrl.seal import is_sealed, seal
from htsrl.settings import Layer
from htsrl.storage.episodes import EpisodeLog
from htsrl.storage.snapshots import MAX_BYTES, Snapshot, SnapshotFile, fingerprint
from htsrl.training import resume

OPTIONS = GymnasiumOptions()
NOTHING = np.empty(0, np.int64)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of its own, for the key."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


# ------------------------------------------------------------------------------------------- the file they pass through


def some_snapshot(**changes):
    values = {"episode": 3, "steps": 200, "reward": 1.5, "later": 400, "fingerprint": "ab", "data": b"here\n\x00"}
    return Snapshot(**values | changes)


def test_what_is_written_is_read_in_its_place():
    file = SnapshotFile()
    file.write(5, some_snapshot(reward=0.1 + 0.2))
    assert file.read(5) == some_snapshot(reward=0.1 + 0.2)
    assert file.read(4) is None
    assert file.read(6) is None
    file.write(5, some_snapshot(data=b""))
    assert file.read(5) == some_snapshot(data=b"")
    file.close()


def test_a_snapshot_that_is_just_being_written_is_left_out():
    file = SnapshotFile()
    file.write(0, some_snapshot(data=bytes(10_000)))
    half = os.pread(file.fd, 6000, 0)
    file.write(0, some_snapshot(steps=300, data=bytes(range(100)) * 100))
    whole = os.pread(file.fd, 12_000, 0)
    os.pwrite(file.fd, half, 0)
    assert file.read(0) is None
    os.pwrite(file.fd, whole, 0)
    assert file.read(0).steps == 300
    os.pwrite(file.fd, b"\xff" * 12, 0)
    assert file.read(0) is None
    file.close()


# -------------------------------------------------------------------------------------------------- when they are taken


class Lines:
    """Keeps what a replica reports."""

    def __init__(self):
        self.reports = self
        self.heard = []

    def send_bytes(self, data):
        report = json.loads(data)
        if report["kind"] != "progress":
            self.heard.append(report)

    def told(self, text):
        return any(text in report.get("text", "") for report in self.heard)


class Here:
    """An environment that says how often it was asked."""

    def __init__(self):
        self.asked = 0

    def snapshot(self):
        self.asked += 1
        return str(self.asked).encode()

    restore = reset = step = render = close = snapshot


def at(env, episode, steps, reward=0.0, column=1, reset_pending=False):
    """A replica that stands somewhere."""
    return SimpleNamespace(
        env=env, column=column, episode=episode, steps=steps, reward=reward, reset_pending=reset_pending
    )


def test_a_snapshot_is_published_with_the_fingerprint_of_the_next(monkeypatch):
    monkeypatch.setattr(snapshots, "SHARE", 1.0)
    file, env = SnapshotFile(), Here()
    taker = Snapshots(file, Lines())
    for steps in range(0, 384, 16):
        taker.take(at(env, 7, steps, steps / 2))
    assert env.asked == 2  # at 128 and 256
    assert file.read(1) == Snapshot(7, 128, 64.0, 256, fingerprint(b"2"), b"1")
    # Another episode begins anew: nothing of two episodes is put together
    taker.take(at(env, 8, 400))
    assert file.read(1).episode == 7
    taker.take(at(env, 8, 600, reset_pending=True))  # nothing is left to go on with
    assert file.read(1).episode == 7
    taker.take(at(env, 8, 600))
    assert file.read(1) == Snapshot(8, 400, 0.0, 600, fingerprint(b"4"), b"3")


def test_expensive_snapshots_are_taken_rarely(monkeypatch):
    monkeypatch.setattr(snapshots, "SHARE", 1e-9)
    env = Here()
    taker = Snapshots(SnapshotFile(), Lines())
    for steps in range(0, 12_800, 128):
        taker.take(at(env, 0, steps))
    assert env.asked == 1


@pytest.mark.parametrize("result", ["text", b" " * (MAX_BYTES + 1), None])
def test_an_environment_with_useless_snapshots_is_reported_and_not_asked_again(result):
    env, lines = Here(), Lines()
    env.snapshot = lambda: result if result is not None else 1 / 0
    taker = Snapshots(SnapshotFile(), lines)
    for steps in (0, 128, 300, 600):
        taker.take(at(env, 0, steps))
    assert len(lines.heard) == 1
    assert lines.told("snapshot failed")


def test_environments_without_the_protocol_are_left_alone():
    env, file = SimpleNamespace(snapshot=lambda: b""), SnapshotFile()
    taker = Snapshots(file, Lines())
    for steps in (128, 300, 600):
        taker.take(at(env, 0, steps))
    assert file.read(1) is None


# ---------------------------------------------------------------------------------------------------- how they are used


def replica_of(env, file=None):
    """A replica outside of any run, and what it reports."""
    spec = envs.describe(env, OPTIONS)
    lines = Lines()
    given = {"squash_actions": False, "snapshots": file or SnapshotFile(), "lines": lines}
    ports = SimpleNamespace(seed=1, spec=spec, options=OPTIONS, **given)
    return Replica(0, ports), lines


def played(env, steps=900):
    """The log of an episode of ``steps`` steps in which snapshots were taken, and the observations of 50 more."""
    file = SnapshotFile()
    replica, lines = replica_of(env)
    replica.start(EpisodeLog(0, (NOTHING,)), lines)
    taker = Snapshots(file, lines)
    actions = np.random.Generator(np.random.Philox(4)).integers(0, 2, steps + 50)
    for start in range(0, steps, 32):
        taker.take(replica)
        obs = replica.play(actions[start : min(start + 32, steps)], None)
    log = EpisodeLog(0, (actions[:steps],), last_obs=np.array(obs))
    log = replace(log, snapshot=file.read(0))
    reward = replica.reward
    return (
        log,
        actions[steps:],
        reward,
        [replica.play(actions[k : k + 1], None) for k in range(steps, steps + 50)],
    )


def came_back(env, log, more, reward, expected):
    """Steps that ``env`` made to come to where ``log`` stands, once seen that it really is there; and its reports."""
    replica, lines = replica_of(env)
    made = []
    step = replica.env.step
    replica.env.step = lambda action: made.append(action) or step(action)
    replica.start(log, lines)
    steps = len(made)
    assert replica.obs.tobytes() == log.last_obs.tobytes()
    assert (replica.episode, replica.steps) == (log.episode, len(log.actions))
    assert replica.reward == reward
    for k, obs in enumerate(expected):
        np.testing.assert_array_equal(replica.play(more[k : k + 1], None), obs)
    return steps, lines


@pytest.fixture
def often(monkeypatch):
    """Snapshots however long they take, so that steps can be counted."""
    monkeypatch.setattr(snapshots, "SHARE", 1.0)


def test_only_the_steps_since_a_snapshot_are_made_again(often):
    log, *rest = played("snapshot_envs:Right-v0")
    assert (log.snapshot.steps, log.snapshot.later) == (768, 896)  # 128 apart, the first 132 steps before the end
    assert log.holds(log.snapshot)
    steps, lines = came_back("snapshot_envs:Right-v0", log, *rest)
    assert steps == 132
    assert not lines.heard
    steps, lines = came_back("snapshot_envs:Right-v0", replace(log, snapshot=None), *rest)
    assert steps == 900
    # Without the protocol there is none
    log, *rest = played("snapshot_envs:Plain-v0")
    assert log.snapshot is None
    assert came_back("snapshot_envs:Plain-v0", log, *rest)[0] == 900


def test_a_restored_replica_publishes_its_snapshot_again(often):
    log, *_ = played("snapshot_envs:Right-v0")
    file = SnapshotFile()
    replica, lines = replica_of("snapshot_envs:Right-v0", file)
    replica.start(log, lines)
    assert file.read(0) == log.snapshot


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ("Forgetful", "another state"),
        ("Secretive", "another observation"),
        ("Refusing", "not today"),
        ("Plain", "restore"),
    ],
)
def test_a_snapshot_that_leads_elsewhere_is_not_believed(often, env, why):
    # From before step 600, where a hidden number changes: it shows when that is forgotten
    log, *rest = played("snapshot_envs:Right-v0", steps=590)
    if env == "Secretive":
        log, *rest = played("snapshot_envs:Secretive-v0", steps=590)
    assert log.snapshot.steps == 384
    steps, lines = came_back(f"snapshot_envs:{env}-v0", log, *rest)
    assert steps >= 590
    assert lines.told(why)
    assert all(report["kind"] == "note" for report in lines.heard)  # it is not accused of not repeating itself


@pytest.mark.parametrize("damage", [b"", b"[1, 2]", b"[1, 2, 3]", b"\xff" * 20])
def test_a_damaged_snapshot_is_not_believed(often, damage):
    log, *rest = played("snapshot_envs:Right-v0")
    log = replace(log, snapshot=replace(log.snapshot, data=damage))
    steps, lines = came_back("snapshot_envs:Right-v0", log, *rest)
    assert steps >= 900
    assert lines.told("no good")


def test_a_log_holds_snapshots_of_its_own_past_only():
    log = EpisodeLog(3, (np.zeros(300, np.int64), np.zeros(100, np.int64)))
    assert log.holds(some_snapshot(episode=3, steps=200, later=400))
    assert not log.holds(some_snapshot(episode=3, steps=200, later=401))
    assert not log.holds(some_snapshot(episode=2, steps=200, later=400))


def test_gymnasium_environments_offer_it_by_having_both_methods():
    def offers(name):
        return isinstance(envs.make(f"snapshot_envs:{name}-v0", OPTIONS), envs.Restorable)

    assert offers("Right")
    assert not offers("Plain")
    assert not offers("Wrapped")  # what the wrapper remembers would be missing
    assert not isinstance(envs.make("CartPole-v1", OPTIONS), envs.Restorable)
    with pytest.raises(ConfigError, match=r"snapshot\(\) must return bytes, got str"):
        envs.describe("snapshot_envs:Wordy-v0", OPTIONS)


# ------------------------------------------------------------------------------------------------------------- the seal


def test_a_seal_is_this_users_and_of_this_file(home, tmp_path, monkeypatch):
    mine = seal("sum")
    assert is_sealed("sum", mine)
    assert not is_sealed("other", mine)
    assert not is_sealed("sum", "")
    key = home / "htsrl" / "seal.key"
    assert key.stat().st_mode & 0o077 == 0
    assert list(key.parent.iterdir()) == [key]
    assert seal("sum") == mine
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert not is_sealed("sum", mine)
    assert not key.with_name("another").exists()  # looking makes no key
    assert seal("sum") != mine


def test_without_a_home_nothing_is_sealed(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert seal("sum") == ""
    assert not is_sealed("sum", "")


# -------------------------------------------------------------------------------------------------------------- in runs

N, T = 2, 64
RUN = {
    "num_envs": N, "sync_interval": T, "total_steps": N * T * 16, "minibatches": 1, "epochs": 1,
    "progress": "plain", "tensorboard": False,
}  # fmt: skip


@contextmanager
def counted(path):
    """Children inherit the environment of the fork server: give this run one of its own."""
    from multiprocessing.forkserver import _forkserver

    _forkserver._stop()
    os.environ["COUNT_STEPS"] = str(path)
    path.write_bytes(b"")
    try:
        yield
    finally:
        del os.environ["COUNT_STEPS"]
        _forkserver._stop()


class StoppingRun(Run):
    """A run that is interrupted at the barrier after interval 11, when every replica has made 12 T steps."""

    def train(self, stop):
        self.stop = stop
        super().train(stop)

    def count(self, j, waiting):
        if j == 11:
            self.stop.set()
        return super().count(j, waiting)


def run(run_dir, env, kind=Run, **changes):
    """Train in this process; the values of the run's result."""
    with opened(kind, run_dir, env=f"snapshot_envs:{env}-v0", **RUN | changes) as it:
        it.train(threading.Event())
        return it.result.values


def bits(values):
    return [values[name] for name in ("steps", "parameters_sha256", "trajectory_sha256", "recovered", "reproducible")]


def newest(run_dir):
    return list_checkpoints(run_dir / "checkpoints")[-1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bits of an uninterrupted run: the same for all environments here."""
    return bits(run(tmp_path_factory.mktemp("whole") / "run", "Plain"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of an interrupted run that has snapshots, and the home in which its key is."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        assert run(folder / "run", "Right", StoppingRun)["steps"] == N * T * 12
    return folder


def test_a_resumed_run_is_the_run_and_replays_less(tmp_path, whole, stopped, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(stopped / "state"))
    checkpoint = load_checkpoint(newest(stopped / "run"))
    assert checkpoint.sealed
    assert set(checkpoint.group("snapshots")) == set(checkpoint.state["snapshots"]) == {"0", "1"}
    shutil.copytree(stopped / "run", tmp_path / "run")
    with counted(tmp_path / "steps"):
        assert bits(resume(tmp_path / "run").values) == whole
    made = (tmp_path / "steps").stat().st_size - 1 - N * T * 4  # one in the description, and the rest of the run
    assert N * 128 <= made < N * T * 12 * 2 // 3
    assert "no good" not in capsys.readouterr().out


def test_the_snapshots_of_a_stranger_are_not_used(tmp_path, whole, stopped, capsys):
    shutil.copytree(stopped / "run", tmp_path / "run")
    with counted(tmp_path / "steps"):
        assert bits(resume(tmp_path / "run").values) == whole
    assert (tmp_path / "steps").stat().st_size - 1 == N * T * 16
    assert "this user's runs didn't make them" in "".join(capsys.readouterr()).replace("\n", " ")


@pytest.mark.parametrize(
    ("tensor", "about", "message"),
    [
        (np.zeros(9, np.int64), {}, "int64"),
        (np.zeros((3, 3), np.uint8), {}, r"\(3, 3\)"),
        (None, {"episode": 1}, "another episode"),
        (None, {"later": 10_000}, "of step"),
        (None, {"steps": 640}, "of step"),
        (None, {"steps": -1}, "steps"),
        (None, {"reward": "much"}, "reward"),
        (None, {"fingerprint": "x" * 64}, "fingerprint"),
        (None, {"data": 1}, "data"),
        (None, None, "not those of its replicas"),
    ],
)
def test_snapshots_that_cant_be_are_refused_before_anything_happens(tmp_path, stopped, tensor, about, message):
    shutil.copytree(stopped / "run", tmp_path / "run")
    checkpoint = load_checkpoint(newest(tmp_path / "run"))
    of_1 = checkpoint.state["snapshots"]["1"]
    headers = {"0": checkpoint.state["snapshots"]["0"]} | ({} if about is None else {"1": of_1 | about})
    tensors = checkpoint.tensors | ({} if tensor is None else {"snapshots/1": tensor})
    state = checkpoint.state | {"snapshots": headers}
    write_checkpoint(newest(tmp_path / "run"), replace(checkpoint, tensors=tensors, state=state))
    for older in list_checkpoints(tmp_path / "run" / "checkpoints")[:-1]:
        older.unlink()  # on which it would fall back
    with pytest.raises(ConfigError, match=message):
        resume(tmp_path / "run")


def test_damaged_snapshots_in_a_run(tmp_path, whole, stopped, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(stopped / "state"))
    shutil.copytree(stopped / "run", tmp_path / "run")
    checkpoint = load_checkpoint(newest(tmp_path / "run"))
    damaged = checkpoint.tensors | {"snapshots/1": checkpoint.tensors["snapshots/1"][:-1]}
    write_checkpoint(newest(tmp_path / "run"), replace(checkpoint, tensors=damaged))
    assert bits(resume(tmp_path / "run", Layer({"num_executors": 2}, str)).values) == whole
    assert "a snapshot was no good" in "".join(capsys.readouterr()).replace("\n", " ")


def test_a_snapshot_that_kills_the_executor_costs_no_restart(tmp_path, whole, capsys):
    run(tmp_path / "run", "Deadly", StoppingRun)
    assert load_checkpoint(newest(tmp_path / "run")).state["snapshots"]
    assert bits(resume(tmp_path / "run", Layer({"max_restarts": 0}, str)).values) == whole
    assert "replays episodes instead" in "".join(capsys.readouterr()).replace("\n", " ")


def test_snapshots_that_fail_stop_nothing(tmp_path, whole, capsys):
    assert bits(run(tmp_path / "run", "Failing")) == whole
    printed = "".join(capsys.readouterr()).replace("\n", " ")
    assert printed.count("an environment's snapshot failed") == 1
