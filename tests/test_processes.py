"""The birth of processes: a fork server or a child that is killed or stopped meanwhile holds nobody up."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import forkserver

import psutil
import pytest
from fault_points import meanwhile, trail_of, watched

from htsrl import processes
from htsrl.digests import first_difference
from htsrl.settings import configure

CONFIG = configure("CartPole-v1", num_envs=4, sync_interval=8, total_steps=4 * 8 * 4, epochs=1, num_executors=2)


@pytest.fixture
def server():
    """The fork server's process; there is none afterwards."""
    processes.launch("htsrl.envs.gymnasium_env")
    yield psutil.Process(forkserver._forkserver._forkserver_pid)
    forkserver._forkserver._stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_without_its_fork_server_a_run_goes_on(monkeypatch, server, number):
    def strike(run):
        monkeypatch.setattr(processes, "ANSWER_TIMEOUT_S", 2.0)
        server.send_signal(number)
        with run.crew.changes:
            next(child for child in run.crew.children if child.role == "executor").kill()

    with watched(CONFIG) as run:
        undisturbed, _ = trail_of(run)
    with watched(CONFIG) as run, meanwhile(run, 40, strike):
        trail, recovered = trail_of(run)
    assert recovered == 1
    assert first_difference(undisturbed, trail) is None
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def leave_a_mark(given):
    folder, _ = given
    (folder / str(os.getpid())).touch()


@pytest.mark.parametrize("victim", ["child", "server"])
def test_a_start_that_is_cut_short_is_repeated_and_nothing_runs_twice(tmp_path, monkeypatch, server, victim):
    connect, struck = forkserver.connect_to_new_process, []

    def cut_short(descriptors):
        status, data = connect(descriptors)
        if not struck:
            while not server.children():
                time.sleep(0.001)
            struck.extend(server.children())
            if victim == "child":
                struck[0].kill()  # before it has read what it is given
                struck[0].wait()
            else:
                forkserver.read_signed(status)  # the child is there, but will never be known
                server.kill()
                while server.status() != psutil.STATUS_ZOMBIE:  # waiting for it would take its end from multiprocessing
                    time.sleep(0.001)
        return status, data

    monkeypatch.setattr(forkserver, "connect_to_new_process", cut_short)
    process = processes.start(leave_a_mark, (tmp_path, bytes(200_000)), "mark")
    process.join()
    psutil.wait_procs(struck, timeout=20)
    assert [path.name for path in tmp_path.iterdir()] == [str(process.pid)]
    assert struck[0].pid != process.pid


@pytest.mark.parametrize("size", [1_000, 2_000_000])
def test_a_child_that_is_stopped_at_once_holds_nobody_up(tmp_path, monkeypatch, server, size):
    connect, stopped = forkserver.connect_to_new_process, []

    def stop(descriptors):
        ends = connect(descriptors)
        while not server.children():
            time.sleep(0.001)
        stopped.extend(server.children())
        stopped[0].suspend()  # before it has read what it is given
        return ends

    monkeypatch.setattr(forkserver, "connect_to_new_process", stop)
    process = processes.start(leave_a_mark, (tmp_path, bytes(size)), "mark")  # or never comes back
    assert stopped[0].pid == process.pid
    assert not list(tmp_path.iterdir())
    stopped[0].resume()
    process.join()
    assert [path.name for path in tmp_path.iterdir()] == [str(process.pid)]


def test_a_fork_server_that_has_answered_before_is_not_waited_for_long(monkeypatch, server):
    monkeypatch.setattr(processes, "ANSWER_TIMEOUT_S", 0.5)
    processes.start(time.sleep, 0, "first").join()
    server.suspend()
    began = time.monotonic()
    process = processes.start(time.sleep, 0, "second")  # by a new one, which may take its time for imports
    process.join()
    assert process.exitcode == 0
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    assert time.monotonic() - began < processes.IMPORT_TIMEOUT_S / 2
