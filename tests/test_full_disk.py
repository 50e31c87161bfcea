"""A disk that is full for a while: no half file, no lost record, and the run that goes on is the run."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest
from recording import opened
from test_resume import SMALL, bits, no_changes

from htsrl import envs
from htsrl.checkpoint import list_checkpoints, load_checkpoint
from htsrl.errors import ConfigError, RunFailed
from htsrl.logfiles import JsonLines, TensorBoard, rewind
from htsrl.report import Reporter
from htsrl.run import Run
from htsrl.rundir import DIGESTS, EVALUATIONS, METRICS, update_result
from htsrl.settings import configure
from htsrl.training import fork, resume, train

ENV = "CartPole-v1"


@contextmanager
def limited(size):
    """No file gets longer than ``size`` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Quota:
    """No file gets longer than the longest log is: for every user, on every machine."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.limit = ExitStack()

    def leave(self, size):
        longest = max(path.stat().st_size for path in self.run_dir.glob("*.jsonl"))
        self.limit.enter_context(limited(longest + size))

    def free(self):
        self.limit.close()


class Disk:
    """A small disk of the run's own, in which another file takes the room."""

    def __init__(self, run_dir):
        self.ballast = run_dir.parent / "ballast"

    def leave(self, size):
        with self.ballast.open("ab", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * (1 << 12)) == 1 << 12:
                pass
        if size >= 1 << 12:  # room comes in pages
            os.truncate(self.ballast, self.ballast.stat().st_size - size)

    def free(self):
        self.ballast.unlink(missing_ok=True)


@pytest.fixture(params=[Quota, Disk], ids=["quota", "disk"])
def room(request, tmp_path):
    """The folder of a run, and the room around it."""
    place = tmp_path / "place"
    place.mkdir()
    mounted = False
    if request.param is Disk:
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place]
        with suppress(FileNotFoundError):
            mounted = subprocess.run(mount, capture_output=True).returncode == 0
        if not mounted:
            pytest.skip("mounting needs the administrator's rights")
    room = request.param(place / "run")
    yield place / "run", room
    room.free()
    if mounted:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an undisturbed run of SMALL left behind."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(configure(ENV, run_dir=run_dir, **SMALL))
    return bits(run_dir)


def test_a_record_that_can_not_be_written_ends_the_run_and_is_not_lost(room, whole):
    run_dir, room = room

    class Filled(Run):
        def count(self, j, waiting):
            if j == 4:
                room.leave(20)
            return super().count(j, waiting)

    words = rf"metrics\.jsonl can't be written: .*; make room, then `htsrl resume {run_dir}`"
    with opened(Filled, run_dir, env=ENV, **SMALL, checkpoint_every=64) as run, pytest.raises(RunFailed, match=words):
        run.train(threading.Event())
    room.free()
    records = [json.loads(line) for line in (run_dir / METRICS).read_text().splitlines(keepends=True)]
    assert [record["interval"] for record in records] == list(range(len(records)))
    assert 4 <= len(records) < 8
    saved = [load_checkpoint(path).state["interval"] for path in list_checkpoints(run_dir / "checkpoints")]
    assert saved
    assert max(saved) <= len(records)
    assert not list(run_dir.rglob("*.tmp"))
    resume(run_dir, no_changes())
    assert bits(run_dir) == whole


def test_a_run_goes_on_without_a_checkpoint_and_writes_the_next(room, whole, capsys):
    run_dir, room = room
    stop = threading.Event()

    class Filled(Run):
        def count(self, j, waiting):
            if j == 2:
                room.leave(64 << 10)  # enough for records, and a checkpoint has 100 KiB
            elif j == 4:
                room.free()
            elif j == 5:
                stop.set()
            return super().count(j, waiting)

        def save_if_due(self):
            failing.append(self.progress.interval in (3, 4))
            before = list_checkpoints(run_dir / "checkpoints")
            super().save_if_due()
            assert (list_checkpoints(run_dir / "checkpoints") == before) == failing[-1]

    failing = []
    with opened(Filled, run_dir, env=ENV, **SMALL, checkpoint_every=1, tensorboard=False) as run:
        run.train(stop)
        assert run.result.interrupted
    assert failing.count(True) == 2
    assert capsys.readouterr().err.count("htsrl: note: no checkpoint this time, the run goes on: ") == 2
    assert not list(run_dir.rglob("*.tmp"))
    resume(run_dir, no_changes())
    assert bits(run_dir) == whole


def test_a_full_disk_at_the_last_checkpoint_is_said_and_resumed_from(tmp_path, whole):
    room = Quota(tmp_path / "run")

    class Filled(Run):
        def finish(self, stop):
            room.leave(0)
            super().finish(stop)

    words = r"last checkpoint can't be written .* goes on from the one before it"
    try:
        with (
            opened(Filled, tmp_path / "run", env=ENV, **SMALL, checkpoint_every=64) as run,
            pytest.raises(RunFailed, match=words),
        ):
            run.train(threading.Event())
    finally:
        room.free()
    assert not (tmp_path / "run" / "result.json").exists()
    resume(tmp_path / "run", no_changes())
    assert bits(tmp_path / "run") == whole


def test_a_result_that_can_not_be_written_is_written_later(tmp_path, whole, monkeypatch):
    finish = Reporter.finish

    def full(self, result):
        with limited(100):
            finish(self, result)

    monkeypatch.setattr(Reporter, "finish", full)
    with pytest.raises(RunFailed, match=r"result\.json can't be written: file too large; make room, then `htsrl"):
        train(configure(ENV, run_dir=tmp_path / "run", **SMALL))
    monkeypatch.undo()
    assert not list((tmp_path / "run").glob("*result*"))
    update_result(tmp_path / "run", {"steps": 64, "interrupted": True})  # or an old one is there, of a stop before
    assert resume(tmp_path / "run", no_changes()) is None
    assert bits(tmp_path / "run") == whole
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["interrupted"] is False
    assert result["checkpoint"] == str(list_checkpoints(tmp_path / "run" / "checkpoints")[-1])


def test_a_configuration_that_can_not_be_written_leaves_the_folder_unused(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    config = configure(ENV, run_dir=tmp_path / "run", **SMALL | {"total_steps": 64})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"config\.toml can't be written: no space left on device"):
        train(config)
    assert list((tmp_path / "run").iterdir()) == []
    monkeypatch.undo()
    train(config)

    synced, sync = [], os.fsync

    def full_after_the_weights(fd):
        synced.append(fd)
        return sync(fd) if len(synced) <= 2 else full(fd)  # the weights' file and their folder

    monkeypatch.setattr(os, "fsync", full_after_the_weights)
    with pytest.raises(RunFailed, match="no space left on device"):
        fork(tmp_path / "run", no_changes(run_dir=tmp_path / "fork"))
    assert len(synced) == 3
    assert list((tmp_path / "fork").iterdir()) == []


def test_tensorboard_s_events_are_given_up_alone(tmp_path, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = configure(ENV, run_dir=tmp_path, progress="none", total_steps=640)
    reporter = Reporter(config, envs.describe(config.env, config.environment), tmp_path)
    records = [{"interval": j, "steps": 64 * (j + 1)} | {f"loss/{k}": 0.5 for k in range(20)} for j in range(6)]
    for record in records[:3]:
        reporter.interval(record)
    (events,) = tmp_path.glob("events*")
    before, append = events.read_bytes(), TensorBoard.append

    def full(self, record):
        with limited(len(before) + 100):
            append(self, record)

    monkeypatch.setattr(TensorBoard, "append", full)
    for record in records[3:]:
        reporter.interval(record)
    reporter.close()
    assert events.read_bytes() == before
    assert [each.step for each in EventAccumulator(str(tmp_path)).Reload().Scalars("loss/3")] == [64, 128, 192]
    assert len((tmp_path / METRICS).read_text().splitlines()) == 6
    assert capsys.readouterr().err.splitlines() == [
        f"htsrl: note: no more TensorBoard events in {tmp_path}, the run goes on: file too large"
    ]


def test_log_files_are_cut_in_their_place(tmp_path):
    """Even where a machine that went down left a damaged line, and where no file could be written again."""
    lines = JsonLines(tmp_path / METRICS)
    for interval in range(5):
        lines.append({"interval": interval, "steps": 1})
    lines.close()
    whole = (tmp_path / METRICS).read_bytes()
    (tmp_path / METRICS).write_bytes(whole.replace(b'{"interval": 4, "steps": 1}', b"\0" * 8))
    (tmp_path / EVALUATIONS).write_text('{"steps": 10}\n{"steps": 20}\n{"steps": 30}\n')
    inode = (tmp_path / METRICS).stat().st_ino
    with limited(0):
        rewind(tmp_path, 5, 100, {20, 30})
    assert (tmp_path / METRICS).read_bytes() == whole[: whole.index(b'{"interval": 4,')]
    assert (tmp_path / METRICS).stat().st_ino == inode
    assert (tmp_path / EVALUATIONS).read_text() == '{"steps": 10}\n'
    rewind(tmp_path, 2, 5, frozenset())
    assert (tmp_path / METRICS).read_text() == '{"interval": 0, "steps": 1}\n{"interval": 1, "steps": 1}\n'
    assert (tmp_path / EVALUATIONS).read_text() == ""
    assert not (tmp_path / DIGESTS).exists()


def test_a_link_is_not_followed_to_be_cut(tmp_path):
    """In a folder from somebody else, it may lead to another run's records."""
    run_dir, outside = tmp_path / "run", tmp_path / "outside"
    run_dir.mkdir()
    records = "".join(f'{{"interval": {j}, "steps": {j}}}\n' for j in range(4))
    outside.write_text(records)
    (run_dir / METRICS).write_text(records)
    (run_dir / DIGESTS).symlink_to(outside)
    with pytest.raises(ConfigError, match=r"digests\.jsonl can't be written to"):
        rewind(run_dir, 2, 2, frozenset())
    assert outside.read_text() == (run_dir / METRICS).read_text() == records
