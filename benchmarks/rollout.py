"""Collecting alone: ``rollout.py WORKLOAD RUN_DIR SETTINGS``, a run whose learner learns nothing. Runs until ended."""

from __future__ import annotations

import json
import sys
import threading
from contextlib import closing
from pathlib import Path

from workloads import workload

from htsrl import determinism, envs
from htsrl.report import Reporter
from htsrl.resolve import resolve
from htsrl.run import Run
from htsrl.rundir import create_run_dir


class Rollout(Run):
    """Executors, actors and barrier as in any run; the parameters stay as they are."""

    def consume(self, j: int, record: dict[str, float]) -> None:
        """Count the storage as learned from, and record it."""
        self.learner.version += 1
        self.reporter.interval(record)


def main(name: str, run_dir: Path, settings: dict[str, str]) -> None:
    quiet = {"progress": "none", "tensorboard": False, "run_dir": run_dir, "total_steps": 10**12}
    config = workload(name).config(**settings, **quiet)
    spec = envs.describe(config.env, config.environment)
    config = resolve(config, spec)
    determinism.enable()
    folder = create_run_dir(config)
    with closing(Reporter(config, spec, folder)) as reporter, Rollout(config, spec, folder, reporter) as run:
        run.train(threading.Event())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
