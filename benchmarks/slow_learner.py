"""``htsrl`` with a learner that pauses after every update: ``slow_learner.py MILLISECONDS train ...``.

The learner of a larger network, or of a slower machine: for the comparison of schedules it matters how long an update
takes, not what it does meanwhile. Results of hts and sync keep their bits.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from htsrl.cli import main
from htsrl.learner.learner import Learner


def slowed(milliseconds: float) -> None:
    """Make every learner of this process pause that long after an update, before its parameters can be used."""
    learn = Learner.learn

    def learn_slowly(self: Learner, storage: Any, progress: float) -> dict[str, float]:
        metrics = learn(self, storage, progress)
        time.sleep(milliseconds / 1000.0)
        return metrics

    Learner.learn = learn_slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    slowed(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
