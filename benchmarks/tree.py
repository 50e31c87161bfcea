"""CPU time and memory of a whole process tree, read from outside while it works."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Memory:
    """Memory of a process tree in MiB."""

    pss: float
    """Every page counted once, shared ones shared out: what the tree really takes."""
    peak_rss: float
    """Sum over the processes of the most that each ever held; shared pages count once per process."""
    processes: int


class Tree:
    """A process and all its descendants. A descendant is known from when it was first seen, so none is lost
    when its parent ends."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._known: dict[int, psutil.Process] = {pid: self._root}

    def processes(self) -> list[psutil.Process]:
        """Those that live."""
        for process in list(self._known.values()):
            with contextlib.suppress(psutil.Error):
                for child in process.children(recursive=True):
                    self._known.setdefault(child.pid, child)
        return [process for process in self._known.values() if process.is_running()]

    def cpu_seconds(self) -> float:
        """User and system time of the tree so far, with that of descendants which ended and were waited for."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def memory(self) -> Memory:
        """Memory now; reading it costs the tree's processes a few milliseconds each."""
        pss = peak = 0.0
        processes = self.processes()
        for process in processes:
            pss += kib(process.pid, "smaps_rollup", "Pss:") / 1024
            peak += kib(process.pid, "status", "VmHWM:") / 1024
        return Memory(pss, peak, len(processes))

    def end(self, process: subprocess.Popen, patience_s: float = 15.0) -> None:
        """End the tree: ask twice, so that what can clean up does so at once, then kill what is left."""
        for _ in range(2):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
                time.sleep(0.3)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        for each in self.processes():
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.wait()


def kib(pid: int, file: str, key: str) -> float:
    """The figure behind ``key`` in a file of a process; 0 where it has just ended."""
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(key):
                return float(line.split()[1])
    except OSError:
        pass
    return 0.0
