"""The adaptive KL penalty (Schulman et al. 2017, section 4), with the quadratic term of Heess et al. and Hafner et al.

It holds the policy near the one that acted by what the loss says of their divergence, instead of by clipping a ratio.
"""

from __future__ import annotations

import torch

from htsrl.learner import losses
from htsrl.learner.checks import check

# Outside of this band around the target the coefficient changes, by this factor.
BAND = (0.7, 1.3)
FACTOR = 1.5
RANGE = 1e3
"""The coefficient stays within its initial value divided and multiplied by this: 17 updates from either end."""


def kl_penalty(
    kl: torch.Tensor, weight: torch.Tensor, coefficient: float, cutoff: float, cutoff_coef: float
) -> torch.Tensor:
    """β mean KL + c max(0, mean KL - cutoff)² for the divergences ``kl`` [M] of rows with ``weight`` [M].

    The quadratic term is of the mean, not a mean of squares: single states may change a lot where most do not. Where a
    minibatch is computed in pieces it is each piece's, times its share of the weight, so that pieces add up.
    """
    sizes: dict[str, int] = {}
    check(sizes, "M", torch.float32, kl, weight)
    total = losses.weighted_mean(kl, weight)
    share = weight.sum()
    excess = (total / share.clamp(min=1e-12) - cutoff).clamp(min=0.0)
    return coefficient * total + cutoff_coef * share * excess.square()


def adapted(coefficient: float, kl: float, target: float, initial: float) -> float:
    """β after an update that moved the policy by ``kl``: larger where that is above the target's band, smaller below.

    It never leaves [initial / RANGE, initial · RANGE]. Without the lower bound a run whose policy moves little for long
    enough ends with 0, which no factor brings back (the flaw of the code published with Hafner et al. 2017).
    """
    if kl > BAND[1] * target:
        coefficient *= FACTOR
    elif kl < BAND[0] * target:
        coefficient /= FACTOR
    return min(max(coefficient, initial / RANGE), initial * RANGE)
