"""Keeps a core busy with all of a workload's work, done in turn by one thread, until its standard input is closed.

What a core costs its neighbours in caches and memory bandwidth is part of every time measured beside it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from limits import Bench
from workloads import workload

from htsrl.errors import RunFailed
from htsrl.resolve import available_cores

STEPS = 8
"""Interval of the company: as many steps as `Bench.infer` answers."""
MOST = 7
"""Cores kept busy at most: more need much memory and change little."""


@contextmanager
def company(name: str) -> Iterator[None]:
    """Every core but one busy with workload ``name``.

    Raises:
        RunFailed: it could not be started.
    """
    command = [sys.executable, __file__, name]
    others = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(min(available_cores() - 1, MOST))
    ]
    try:
        for each in others:
            assert each.stdout is not None
            if not each.stdout.readline():
                raise RunFailed(f"{' '.join(command)} failed")
        yield
    finally:
        for each in others:
            each.kill()
            each.communicate()


def main() -> None:
    """``company.py WORKLOAD``: prints a line when it is up."""
    chosen = workload(sys.argv[1])
    awake = {"step_ms": 0.0} if chosen.sleep else {}
    bench = Bench(
        chosen.config(num_envs=16, sync_interval=STEPS, **({"num_executors": 16} if chosen.sleep else {}), **awake)
    )
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    bench.fill()
    print("ready", flush=True)
    while True:
        bench.fill()
        bench.infer()
        bench.learn()


if __name__ == "__main__":
    main()
