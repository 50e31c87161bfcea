"""What one barrier costs, in closed form: the longest of n sums of Gamma-distributed step times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from discrete_events import Setup, Times

EULER = 0.5772156649015329


def expected_interval(n: int, alpha: float, beta: float, shape: float = 1.0) -> float:
    """E[max over n replicas of the time for alpha steps], each step Gamma(``shape``) with mean 1/``beta`` seconds.

    A sum of alpha steps is Gamma(alpha·shape). Its largest of n has the mean F + γ/(n f(F)), where F is the sum's
    quantile at 1 - 1/n, f its density there and γ Euler's constant: the first term of extreme-value theory, used for
    the run time of Liu et al. 2020, claim 1, whose steps are exponential: ``shape`` 1. Within 1% from n = 16 on; with
    fewer it needs regular sums: n = 4 exponential steps 6% low, n = 2 15%, but 1% for sums of 64. One replica waits for
    nobody: exactly alpha/beta.

    Raises:
        ValueError: n below 1, or another argument not greater than zero.
    """
    if n < 1 or not min(alpha, beta, shape) > 0:
        raise ValueError(
            f"n must be at least 1, alpha, beta and shape greater than 0; got {n}, {alpha}, {beta}, {shape}"
        )
    if n == 1:
        return alpha / beta
    total, rate = alpha * shape, beta * shape
    x = upper_quantile(total, 1.0 / n)
    density = math.exp((total - 1.0) * math.log(x) - x - math.lgamma(total))
    return (x + EULER / (n * density)) / rate


def exact_interval(n: int, alpha: float, beta: float, shape: float = 1.0, points: int = 20_000) -> float:
    """The same by numerical integration of 1 - P[sum <= x]^n over x: what the closed form is judged by."""
    x = torch.linspace(0.0, upper_quantile(alpha * shape, 1e-12 / n), points, dtype=torch.float64)
    below = torch.special.gammainc(torch.tensor(alpha * shape, dtype=torch.float64), x)
    return float(torch.trapezoid(1.0 - below**n, x)) / (beta * shape)


def upper_quantile(shape: float, tail: float) -> float:
    """The x that a Gamma(``shape``) variable of rate 1 exceeds with probability ``tail``, by bisection."""
    low, high = 0.0, shape + 1.0
    while _exceeds(shape, high) > tail:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _exceeds(shape, middle) > tail else (low, middle)
    return (low + high) / 2.0


def _exceeds(shape: float, x: float) -> float:
    """P[Gamma(``shape``) > ``x``], the regularised upper incomplete gamma function."""
    return float(
        torch.special.gammaincc(torch.tensor(shape, dtype=torch.float64), torch.tensor(x, dtype=torch.float64))
    )


@dataclass(frozen=True)
class Bounds:
    """What an interval takes at least, in seconds, by each of its limits: the closed form of a whole run."""

    rollout: float
    """The slowest executor's steps and its waiting for answers; under 'sync' also the learning that follows."""
    cores: float
    """All work, shared out evenly over the cores."""
    inference: float
    """The actors' full batches."""
    learning: float
    """The learner's update, and what the run does beside it."""
    between: float
    """What is done between two intervals comes on top."""

    @property
    def interval_s(self) -> float:
        return max(self.rollout, self.cores, self.inference, self.learning) + self.between


def bounds(setup: Setup, times: Times) -> Bounds:
    """The model of Liu et al. 2020, claim 1, with executors of any number of replicas: E[max over executors] + alpha·c.

    c, for how long an executor waits for an answer in each step, is one actor's turn where it has a single group; with
    more, it steps one while another is answered. Ranks beyond the first only add their gradient exchange.
    """
    N, E, alpha = setup.replicas, setup.executors, setup.alpha
    step, asleep, answer = times.step, times.asleep, times.inference
    mean = step.mean_s + asleep.mean_s + (times.oversleep_s if asleep.mean_s else 0.0)
    variance = sum(law.mean_s**2 / law.shape for law in (step, asleep))
    groups = math.ceil(N / setup.group)
    update, record, noise, between = (
        work.seconds(N, alpha) for work in (times.learning, times.record, times.noise, times.between)
    )

    def slowest(steps: float) -> float:
        return expected_interval(E, steps, 1.0 / mean, mean**2 / variance) if variance else steps * mean

    if setup.schedule == "sync":
        stepping = max(slowest(N / E), N * step.mean_s / setup.cores)
        lockstep = stepping + groups / E * times.turn_s + 2 * times.hop_s + answer.turn_s(N, E)
        serial = update * max(times.learning.cores / setup.cores, 1.0) + record + times.exchange_s
        return Bounds(alpha * lockstep + serial, 0.0, 0.0, 0.0, between)
    waiting = 2 * times.hop_s + answer.turn_s(setup.group, 1) if groups <= E else 0.0
    best_row_s = min(cost / size for size, cost in zip(answer.buckets, answer.bucket_s))
    stepping = N * (step.mean_s + best_row_s) + groups * times.turn_s
    return Bounds(
        rollout=slowest(alpha * N / E) + alpha * (groups / E * times.turn_s + waiting),
        cores=(alpha * stepping + update * times.learning.cores + record + noise) / setup.cores,
        inference=alpha * N * best_row_s / setup.actors,
        learning=update + record + noise + times.exchange_s,
        between=between,
    )
