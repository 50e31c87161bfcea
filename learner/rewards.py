"""Streaming normalisation of rewards."""

from __future__ import annotations

import numpy as np

from htsrl.learner.checks import check
from htsrl.learner.moments import Moments

LIMIT = 10.0
"""Normalised rewards are clipped to ± this (Hafner et al. 2017, in their code)."""


def normalized(reward: np.ndarray, valid: np.ndarray, discount: float, seen: Moments) -> np.ndarray:
    """``reward`` [T, N] float32 over the root mean square of all ``seen``, these included, clipped; then times 1-γ.

    Rewards are not centred: one per step must stay one. So what they are divided by isn't their deviation, as in Hafner
    et al.'s code, but their size, which is not 0 where all are the same. The factor 1-γ, a constant, brings discounted
    returns to order 1, from where a value function has not far to go; horizons 1/(1-γ) above 1,000 count as that. Rows
    where ``valid`` [T, N] is 0 are not counted.
    """
    sizes: dict[str, int] = {}
    check(sizes, "T N", np.dtype(np.float32), reward, valid)
    with np.errstate(invalid="ignore", over="ignore"):  # the check of the loss tells about NaN and infinity
        seen.add(reward[valid != 0.0][:, None])
        size = np.maximum(seen.root_mean_square(), 1e-8)
        return (np.clip(reward / size, -LIMIT, LIMIT) * max(1.0 - discount, 1e-3)).astype(np.float32)
