"""Nothing is left behind: no process, no temporary file, no handle, however a run ends and wherever it runs."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from leftovers import ENDLESS, WatchedRun, command
from test_recovery import running
from test_runtime import is_zombie

from htsrl.errors import RunFailed
from htsrl.settings import configure
from htsrl.training import train


@pytest.fixture
def start(tmp_path):
    """Starts a watched run, and ends it in any case."""
    started = []

    def start(*flags, **options):
        arguments = options.pop("arguments", None) or command(tmp_path / "run", *flags)
        started.append(WatchedRun(tmp_path, arguments, **options))
        return started[-1]

    yield start
    for run in started:
        run.end()


def test_a_second_interrupt_ends_at_once_and_leaves_nothing(start):
    run = start(*ENDLESS, "--eval-every", "500")
    run.wait_for_intervals(3)
    for executor in run.named("executor"):
        executor.suspend()  # so that the first interrupt can't end the interval
    run.interrupt()
    os.killpg(run.process.pid, signal.SIGINT)
    _, err = run.process.communicate(timeout=30)
    assert run.process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not run.left()


def test_children_that_can_do_nothing_are_gone_when_the_run_is_killed(start):
    """They are stopped, like one that hangs in a call of its environment and holds the interpreter's lock."""
    run = start(*ENDLESS, "--eval-every", "500")
    run.wait_for_intervals(3)
    children = run.named("executor", "actor", "evaluator")
    assert len(children) == 4
    for child in children:
        child.suspend()
    run.process.kill()
    assert not run.left()


def test_children_that_still_start_are_gone_when_the_run_is_killed(start):
    run = start(*ENDLESS)
    deadline = time.monotonic() + 60
    while not run.named("actor"):  # it has its name before it imports torch
        assert time.monotonic() < deadline
        time.sleep(0.005)
    run.process.kill()
    assert not run.records()
    assert not run.left()


@pytest.mark.parametrize("knows", [True, False], ids=["signal", "thread"])
@pytest.mark.parametrize("late", [True, False])
def test_a_process_ends_with_what_it_is_tied_to(knows, late):
    """On a system that can't send signals for a pipe, too, and where the other has ended already."""
    script = f"""
import fcntl, os, sys, time
from htsrl import processes
def refuse(*arguments):
    raise OSError(22, "Invalid argument")
if not {knows}:
    processes.fcntl.fcntl = refuse
os.read(0, 1) if {late} else None
processes._end_with(0)
print("tied", flush=True)
time.sleep(1000)
"""
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", script], stdin=reading, stdout=subprocess.PIPE)
    os.close(reading)
    if not late:
        assert process.stdout.readline() == b"tied\n"
        assert process.poll() is None
    os.close(writing)
    assert process.wait(30) in (1, -signal.SIGKILL)


def test_a_run_needs_no_shared_memory_folder(start, tmp_path):
    """With next to no room in /dev/shm and far more shared memory than that; then it ends by itself."""
    hidden = "mount -t tmpfs -o size=4k tmpfs /dev/shm"
    private = ["unshare", "-m", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*private, hidden], capture_output=True).returncode:
        pytest.skip("a private mount needs unshare and the right to mount")
    # The storages: 2 x 4,096 steps x 4 replicas x 70 bytes
    line = command(tmp_path / "run", "--sync-interval", "4096", "--total-steps", "20000", "--eval-every", "16384")
    run = start(arguments=[*private, f'{hidden} && exec "$@"', "sh", *line])
    run.wait_for_intervals(1)
    assert os.listdir(f"/proc/{run.process.pid}/root/dev/shm") == []
    (memory,) = {entry for entry in maps(run.process.pid) if "memfd:htsrl " in entry}
    first, last = (int(place, 16) for place in memory.split()[0].split("-"))
    assert last - first > 2 << 20
    out, err = run.process.communicate(timeout=120)
    assert run.process.returncode == 0, (out, err)
    assert not run.left()


def test_a_folder_for_temporary_files_may_have_a_long_name(tmp_path):
    """Longer than the name of a socket may be."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    line = command(tmp_path / "run", "--total-steps", "640")
    done = subprocess.run(line, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_replaced_children_leave_nothing_in_the_run(tmp_path):
    with running(tmp_path / "run", env="CartPole-v1", total_steps=10**9) as run:
        stop, seen = threading.Event(), []

        def await_recovered(count):
            while not (run.crew.recovered == count and all(child.ready for child in run.crew.children)):
                run.crew.check()
                run.crew.changes.wait(10)

        def strike():
            for k, role in enumerate(("executor", "actor", "executor")):
                with run.crew.changes:  # nobody is being replaced meanwhile
                    await_recovered(k)
                    children = psutil.Process().children(recursive=True)
                    # Files come and go while it runs
                    lasting = [name for name in handles() if name == "/memfd" or not name.startswith("/")]
                    seen.append((len(children), sum(map(is_zombie, children)), lasting))
                    victim = next(child for child in run.crew.children if child.role == role)
                    signal.pidfd_send_signal(victim.pidfd, signal.SIGKILL)  # without waiting: it will be closed
            with run.crew.changes:
                await_recovered(3)
            stop.set()

        thread = threading.Thread(target=strike)
        thread.start()
        run.train(stop)
        thread.join()
        assert run.result.values["recovered"] == 3
    assert seen == [seen[0]] * 3


def handles() -> list[str]:
    """What this process holds open, sorted: paths of files, and kinds of all else."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    return sorted(found)


def maps(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def test_a_library_holds_nothing_after_a_run(tmp_path):
    """Beside the fork server, which the first run leaves for the next ones."""

    def run(k, env, **settings):
        config = configure(
            env, num_envs=4, sync_interval=16, total_steps=400, minibatches=4, epochs=1, progress="none",
            run_dir=tmp_path / str(k), **settings,
        )  # fmt: skip
        train(config)

    def held():
        gc.collect()
        shared = [entry for entry in maps("self") if "memfd:htsrl" in entry]
        return handles(), len(os.listdir("/proc/self/task")), len(shared)

    def held_after_a_while():
        """A thread that has been joined is in the system's list for a moment longer."""
        deadline = time.monotonic() + 10
        while (now := held()) != before and time.monotonic() < deadline:
            time.sleep(0.05)
        return now

    run(0, "CartPole-v1")
    time.sleep(0.5)
    before = held()
    assert before[2] == 0, "the shared memory of a run that has ended"
    run(1, "CartPole-v1", eval_every=200)
    assert held_after_a_while() == before
    with pytest.raises(RunFailed, match="the robot fell over"):
        run(2, "faulty_envs:Raises-v0", max_restarts=0)
    assert held_after_a_while() == before
