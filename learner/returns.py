"""Returns and advantages: pure numpy functions over [T, N], on the host, where a row costs less than a kernel's start.

Row t: ``value[t]`` is of obs[t], which led to ``reward[t]`` and obs[t+1]; ``value[T]`` bootstraps. How an episode ended
arrives as three factors and never as "done" (``end_factors`` makes them):

- ``discount[t]`` = γ(1 - terminated[t]): what obs[t+1] is worth now; nothing after a terminal state.
- ``trace[t]`` is 0 where the episode ended in row t, in whatever way: no later row reaches back over it. After a
  truncation row t+1 holds the episode's last observation, so ``value[t+1]`` is the right bootstrap.
- ``valid[t]`` is 0 where row t is no transition. Such rows get advantage 0, whatever they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from htsrl.learner.checks import check

f32 = np.dtype(np.float32)


def end_factors(gamma: float, terminated: np.ndarray, truncated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(discount, trace)`` [T, N] from the end flags [T, N] in {0, 1}. With both flags set, terminated decides."""
    sizes: dict[str, int] = {}
    check(sizes, "T N", f32, terminated, truncated)
    alive = 1.0 - terminated
    return np.float32(gamma) * alive, alive * (1.0 - truncated)


def reverse_scan(x: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """y[t] = x[t] + decay[t] y[t+1] with y[T] = 0, written over ``x``: the one recursion behind every return.

    With x the temporal-difference errors it gives GAE and V-trace; with x the rewards, discounted returns.
    """
    sizes: dict[str, int] = {}
    check(sizes, "T N", f32, x, decay)
    carried = np.empty_like(x[0])
    for t in range(len(x) - 2, -1, -1):
        np.multiply(decay[t], x[t + 1], out=carried)
        x[t] += carried
    return x


def gae(
    reward: np.ndarray,
    discount: np.ndarray,
    trace: np.ndarray,
    valid: np.ndarray,
    value: np.ndarray,
    gae_lambda: float,
) -> np.ndarray:
    """Generalised advantage estimates [T, N] (Schulman et al. 2016, equation 16) with value [T+1, N], others [T, N].

        δ_t = r_t + γ_t V_{t+1} - V_t,    A_t = Σ_l (Π_{k<l} γ_{t+k} λ trace_{t+k}) δ_{t+l}

    λ = 0 is one-step temporal difference; λ = 1 the discounted return, bootstrapped at T, less V_t. A_t + V_t is the
    λ-return, the value function's target.
    """
    sizes: dict[str, int] = {}
    check(sizes, "T N", f32, reward, discount, trace, valid)
    check(sizes, "T+1 N", f32, value)
    delta = reward + discount * value[1:] - value[:-1]
    decay = discount * trace * np.float32(gae_lambda)
    # Assigned, not multiplied: what an invalid row holds may be anything, NaN included.
    delta[valid == 0.0] = 0.0
    decay[valid == 0.0] = 0.0
    return reverse_scan(delta, decay)


class VTrace(NamedTuple):
    """What :func:`vtrace` returns, [T, N] each."""

    target: np.ndarray
    """v_t: what the value function should say. Where ``valid`` is 0, the value as it was."""
    advantage: np.ndarray
    """For the policy gradient, its clipped ratio ρ included."""


def vtrace(
    reward: np.ndarray,
    discount: np.ndarray,
    trace: np.ndarray,
    valid: np.ndarray,
    value: np.ndarray,
    log_ratio: np.ndarray,
    lambda_: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> VTrace:
    """V-trace (Espeholt et al. 2018, equations 1 and 2), with value [T+1, N], all others [T, N].

        δ_t = ρ_t (r_t + γ_t V_{t+1} - V_t),    v_t = V_t + Σ_l (Π_{k<l} γ_{t+k} c_{t+k} trace_{t+k}) δ_{t+l}
        A_t = ρ_t (r_t + γ_t [λ v_{t+1} + (1 - λ) V_{t+1}] - V_t)

    ``log_ratio`` is log π(a|s)/μ(a|s) of the policy that learns and the one that acted; ρ_t = min(ρ̄, π/μ) decides
    whose value function is learned and c_t = λ min(c̄, π/μ) how fast. At λ = 1, A_t is the paper's; for a smaller λ it
    bootstraps as the targets do. With ratios of 1 and both thresholds at least that, v_t - V_t = A_t = GAE(λ).
    """
    sizes: dict[str, int] = {}
    check(sizes, "T N", f32, reward, discount, trace, valid, log_ratio)
    check(sizes, "T+1 N", f32, value)
    ratio = np.exp(log_ratio)
    rho, c = np.minimum(ratio, np.float32(rho_clip)), np.minimum(ratio, np.float32(c_clip))
    advantage = rho * (reward + discount * value[1:] - value[:-1])
    reach = discount * trace * np.float32(lambda_)
    for x in (rho, c, advantage, reach):  # as in `gae`: what an invalid row holds may be anything
        x[valid == 0.0] = 0.0
    correction = reverse_scan(advantage.copy(), reach * c)
    advantage[:-1] += (rho * reach)[:-1] * correction[1:]
    return VTrace(value[:-1] + correction, advantage)


def episode_rows(terminated: np.ndarray, truncated: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Of each row the number of transitions that its episode made in these T steps; [T, N] each, the result too.

    Rows that are no transitions count nowhere; what stands there means nothing.
    """
    sizes: dict[str, int] = {}
    check(sizes, "T N", f32, terminated, truncated, valid)
    rows = np.empty_like(valid)
    for n, column in enumerate(valid.T):
        ended = (np.maximum(terminated[:, n], truncated[:, n]) * column) != 0.0
        part = np.cumsum(ended) - ended  # which of the column's episodes a row belongs to
        rows[:, n] = np.bincount(part, weights=column)[part]
    return rows


def explained_variance(target: np.ndarray, value: np.ndarray, valid: np.ndarray) -> float:
    """1 - Var[target - value] / Var[target] over valid rows, [T, N] each: 1 is perfect, 0 as good as the mean.

    Where the targets are all the same there is nothing to explain: 0.
    """
    sizes: dict[str, int] = {}
    check(sizes, "T N", f32, target, value, valid)
    rows = valid != 0.0
    variance = float(np.var(target[rows], dtype=np.float64)) if rows.any() else 0.0
    if variance < 1e-12:
        return 0.0
    return 1.0 - float(np.var((target - value)[rows], dtype=np.float64)) / variance
