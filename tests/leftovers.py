"""Runs of the command line that are watched from outside: how they go, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SMALL = [
    "--env", "CartPole-v1", "--num-envs", "4", "--sync-interval", "16", "--minibatches", "4", "--epochs", "1",
    "--num-executors", "2", "--progress", "plain",
]  # fmt: skip
ENDLESS = ["--total-steps", "1000000000000"]


def command(run_dir: Path, *flags: str) -> list[str]:
    """``htsrl train`` on a small task."""
    return [sys.executable, "-m", "htsrl", "train", *SMALL, "--run-dir", str(run_dir), *flags]


class WatchedRun:
    """A process whose descendants are known by their own folder for temporary files, whoever their parent is."""

    def __init__(self, tmp_path: Path, arguments: list[str], **options: Any) -> None:
        self.run_dir = tmp_path / "run"
        self.scratch = tmp_path / "tmp"
        self.scratch.mkdir()
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = os.environ | {"TMPDIR": str(self.scratch)}
        self.process = subprocess.Popen(arguments, env=environment, start_new_session=True, **output | options)

    def records(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        with suppress(FileNotFoundError):
            text = (self.run_dir / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return []

    def wait_for_intervals(self, count: int) -> None:
        """Until that many have been recorded."""
        deadline = time.monotonic() + 90
        while len(self.records()) < count:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the run is too slow"
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Ctrl-C, and wait until the run has heard of it: a second one before that would be one with the first."""
        os.killpg(self.process.pid, signal.SIGINT)
        assert any("stopping after this interval" in line for line in self.process.stderr)

    def processes(self) -> list[psutil.Process]:
        """Those that live, the run's own included."""
        alive = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(self.scratch):
                    alive.append(process)
        return alive

    def named(self, *names: str) -> list[psutil.Process]:
        """Those whose names begin with one of ``names``."""
        return [process for process in self.processes() if process.name().startswith(names)]

    def left(self, seconds: float = 10.0) -> list[str]:
        """What is still there ``seconds`` after the end of the run's own process."""
        deadline = time.monotonic() + seconds
        while (processes := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        # torch's optimizers import its compiler, which makes a folder for all programs of a user
        files = [path.name for path in self.scratch.iterdir() if not path.name.startswith("torchinductor_")]
        unfinished = [path.name for path in self.run_dir.rglob(".*")]
        return [*(f"{process.name()} {process.status()}" for process in processes), *files, *unfinished]

    def checkpoints(self) -> list[Path]:
        return sorted((self.run_dir / "checkpoints").glob("*.safetensors"))

    def end(self) -> None:
        """Whatever the test came to."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.process.wait()
