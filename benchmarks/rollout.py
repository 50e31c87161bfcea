"""Collecting alone: ``rollout.py WORKLOAD RUN_DIR SETTINGS``, a run whose learner learns nothing. Runs until ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from workloads import workload

from htsrl.run import Run
from htsrl.training import train


def pass_on(self: Run, j: int, record: dict[str, float]) -> None:
    """Instead of learning, count the storage as learned from, and record it: the parameters stay as they are."""
    self.learner.version += 1
    self.reporter.interval(record)


if __name__ == "__main__":
    name, run_dir, settings = sys.argv[1:]
    Run.consume = pass_on  # type: ignore[method-assign]
    quiet = {"progress": "none", "tensorboard": False, "run_dir": Path(run_dir), "total_steps": 10**12}
    train(workload(name).config(**json.loads(settings), **quiet))
