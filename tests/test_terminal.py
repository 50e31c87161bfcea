"""Terminals and pipes that go away: the run hears of it, goes on or ends with a checkpoint, and shows no traceback."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import termios
import time

import pytest
from leftovers import ENDLESS, WatchedRun, command

LINGER = 1.0


@pytest.fixture(autouse=True)
def nothing_ignored():
    """Whoever runs the tests under nohup has SIGHUP ignored, and its children inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Terminal:
    """A terminal of its own for one run, and the window that shows it."""

    def __init__(self, tmp_path, *flags, ignore_hangup=False):
        self.window, inside = pty.openpty()

        def own_terminal():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if ignore_hangup:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)

        self.run = WatchedRun(
            tmp_path, command(tmp_path / "run", *ENDLESS, "--progress", "live", *flags),
            stdin=inside, stdout=inside, stderr=inside, text=False, preexec_fn=own_terminal,
        )  # fmt: skip
        os.close(inside)

    def show_intervals(self, count):
        """Read what is shown until ``count`` intervals have been recorded."""
        shown = b""
        deadline = time.monotonic() + 90
        while len(self.run.records()) < count or b"steps/s" not in shown:
            assert self.run.process.poll() is None, shown
            assert time.monotonic() < deadline
            if select.select([self.window], [], [], 0.05)[0]:
                shown += os.read(self.window, 1 << 16)

    def close(self):
        os.close(self.window)


def test_a_closed_terminal_ends_the_run_with_a_checkpoint(tmp_path):
    terminal = Terminal(tmp_path)
    run = terminal.run
    try:
        terminal.show_intervals(3)
        terminal.close()  # the system sends a SIGHUP; many shells send another
        run.process.send_signal(signal.SIGHUP)
        assert run.process.wait(30) == 130
        assert run.checkpoints()
        assert [record["interval"] for record in run.records()] == list(range(len(run.records())))
        assert not run.left()
    finally:
        run.end()


def test_with_nohup_the_run_outlives_its_terminal(tmp_path):
    terminal = Terminal(tmp_path, ignore_hangup=True)
    run = terminal.run
    try:
        terminal.show_intervals(3)
        terminal.close()
        time.sleep(LINGER)  # it draws several times a second
        run.wait_for_intervals(len(run.records()) + 20)
        run.process.terminate()
        assert run.process.wait(30) == 130
        assert run.checkpoints()
        assert not run.left()
    finally:
        run.end()


@pytest.mark.parametrize("progress", ["plain", "live"])
def test_a_reader_that_leaves_does_not_end_the_run(tmp_path, progress):
    """``htsrl train | head -1``."""
    line = command(tmp_path / "run", "--total-steps", "2000", "--progress", progress)
    script = '"$@" | head -1; echo "status ${PIPESTATUS[0]}"'
    run = WatchedRun(tmp_path, ["bash", "-c", script, "bash", *line])
    try:
        out, err = run.process.communicate(timeout=120)
        first, status = out.splitlines()
        assert "CartPole-v1" in first
        assert status == "status 0"
        assert err.splitlines() == [
            f"htsrl: note: nobody reads this output any more; the run goes on, see {run.run_dir / 'metrics.jsonl'}"
        ]
        assert (run.run_dir / "result.json").exists()
        assert not run.left()
    finally:
        run.end()


def test_closed_streams_are_not_mistaken_for_files_of_the_run(tmp_path):
    """Without standard streams, the run's first files would get their numbers, and messages would go into them."""
    run = WatchedRun(tmp_path, ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *command(tmp_path / "run", *ENDLESS)])
    try:
        run.wait_for_intervals(3)
        run.process.terminate()
        assert run.process.wait(30) == 130
        for path in run.run_dir.rglob("*"):
            assert path.is_dir() or b"stopping" not in path.read_bytes(), path
        assert [record["interval"] for record in run.records()] == list(range(len(run.records())))
        assert not run.left()
    finally:
        run.end()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_dead_terminal_does_not_keep_the_handler_from_its_work(monkeypatch, number):
    from htsrl.training import interrupts

    def gone(file, text):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", gone)
    with interrupts() as stop:
        signal.raise_signal(number)
        assert stop.is_set()
        signal.raise_signal(signal.SIGHUP)  # never more than a request
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
