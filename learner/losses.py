"""Losses: pure torch functions over the M rows of a minibatch.

Every mean is Σ weight[m] x[m] with ``weight`` [M]: 1/(number of real rows), and 0 for rows that only fill a minibatch
up to its fixed size. So a minibatch may also be taken in pieces: losses and gradients of the pieces add up to its own.
"""

from __future__ import annotations

import torch

from htsrl.learner.checks import check

# exp(±20) is far outside every clip range and far inside float32.
LOG_RATIO_LIMIT = 20.0


def weighted_mean(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Σ weight x, for [M] each."""
    return (x * weight).sum()


def policy_gradient(log_prob: torch.Tensor, advantage: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """-mean of A log π(a|s): its negative gradient is the policy gradient (Mnih et al. 2016, section 4.2)."""
    sizes: dict[str, int] = {}
    check(sizes, "M", torch.float32, log_prob, advantage, weight)
    # Factors without a gradient are multiplied first, here and below: one operation less to differentiate.
    return (log_prob * (-advantage * weight)).sum()


def importance_weighted(ratio: torch.Tensor, advantage: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """-mean of r A. Its negative gradient is the mean of r A ∇log π: the policy gradient from another policy's rows."""
    sizes: dict[str, int] = {}
    check(sizes, "M", torch.float32, ratio, advantage, weight)
    return (ratio * (-advantage * weight)).sum()


def log_ratio(log_prob: torch.Tensor, behaviour_log_prob: torch.Tensor) -> torch.Tensor:
    """log of π(a|s) / π_behaviour(a|s) [M], kept where exp is finite."""
    sizes: dict[str, int] = {}
    check(sizes, "M", torch.float32, log_prob, behaviour_log_prob)
    return (log_prob - behaviour_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def surrogate(ratio: torch.Tensor, advantage: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """-mean of r A (Schulman et al. 2017, equation 6): nothing in it keeps the ratio r near 1."""
    sizes: dict[str, int] = {}
    check(sizes, "M", torch.float32, ratio, advantage, weight)
    return (ratio * (-advantage * weight)).sum()


def clipped_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, weight: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """-mean of min(r A, clip(r, 1-ε, 1+ε) A) (Schulman et al. 2017, equation 7)."""
    sizes: dict[str, int] = {}
    check(sizes, "M", torch.float32, ratio, advantage, weight)
    cost = -advantage * weight
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(ratio * cost, clipped * cost).sum()


def value_loss(
    value: torch.Tensor,
    target: torch.Tensor,
    behaviour_value: torch.Tensor,
    weight: torch.Tensor,
    clip_value: float | None = None,
) -> torch.Tensor:
    """½ mean of (V - target)².

    With ``clip_value``, ½ mean of the larger of that and the error of V kept within behaviour_value ± clip_value, as in
    the code published with PPO.
    """
    sizes: dict[str, int] = {}
    check(sizes, "M", torch.float32, value, target, behaviour_value, weight)
    error = (value - target).square()
    if clip_value is not None:
        moved = (value - behaviour_value).clamp(-clip_value, clip_value)
        error = torch.maximum(error, (behaviour_value + moved - target).square())
    return (error * (0.5 * weight)).sum()


def approximate_kl(log_ratio: torch.Tensor, ratio: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """mean of (r - 1) - log r: an unbiased, never negative estimate of KL(behaviour ‖ current) (Schulman 2020)."""
    sizes: dict[str, int] = {}
    check(sizes, "M", torch.float32, log_ratio, ratio, weight)
    return weighted_mean(ratio - 1.0 - log_ratio, weight)


def clip_fraction(ratio: torch.Tensor, weight: torch.Tensor, clip_range: float | None) -> torch.Tensor:
    """Share of rows whose ratio lies outside 1 ± ε; 0 without ε."""
    sizes: dict[str, int] = {}
    check(sizes, "M", torch.float32, ratio, weight)
    if clip_range is None:
        return torch.zeros_like(weight).sum()
    return weighted_mean(((ratio - 1.0).abs() > clip_range).float(), weight)


def whiten(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [K, M] with weighted mean 0 and standard deviation 1 in each row; filler rows (weight 0) become 0.

    A row without spread (one sample, or all equal but for rounding) comes out near 0 instead of as noise blown up.
    """
    sizes: dict[str, int] = {}
    check(sizes, "K M", torch.float32, x, weight)
    mean = (x * weight).sum(-1, keepdim=True)
    centred = torch.where(weight > 0.0, x - mean, 0.0)
    deviation = (centred.square() * weight).sum(-1, keepdim=True).sqrt()
    # Below 1e-5 of the mean a spread is float32 rounding.
    return centred / torch.maximum(deviation, 1e-5 * mean.abs() + 1e-8)
