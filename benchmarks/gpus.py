"""What nvidia-smi says of the GPUs of this machine and of who uses them: nothing where there is none."""

from __future__ import annotations

import subprocess
from typing import Any

TIMEOUT_S = 30.0


def gpus() -> list[dict[str, Any]]:
    """Name, driver and memory of each."""
    return [
        {"name": name, "driver": driver, "memory_mib": mib(memory)}
        for name, driver, memory in asked("gpu=name,driver_version,memory.total")
    ]


def used_mib() -> float | None:
    """MiB in use on all GPUs together, whoever uses them; None where there is no GPU."""
    used = [mib(memory) for (memory,) in asked("gpu=memory.used")]
    return sum(used) if used else None


def used_by_process() -> dict[int, float]:
    """MiB that each process holds, over all GPUs.

    In a container the numbers of processes may be those outside of it, or not be there at all.
    """
    held: dict[int, float] = {}
    for pid, memory in asked("compute-apps=pid,used_memory"):
        held[int(pid)] = held.get(int(pid), 0.0) + mib(memory)
    return held


def mib(text: str) -> float:
    """A figure in MiB; 0 where nvidia-smi does not know it (``[N/A]``)."""
    return float(text) if text.replace(".", "").isdigit() else 0.0


def asked(query: str) -> list[list[str]]:
    """The cells of each line that ``nvidia-smi --query-...`` prints; no lines where it isn't there or fails."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
