from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from htsrl.learner.checks import check
from htsrl.learner.returns import end_factors, explained_variance, gae, reverse_scan, vtrace

f32 = np.float32


def oracle_gae(reward, terminated, truncated, valid, value, gamma, lam):
    """Schulman et al. 2016, equation 16, one replica and one step at a time, with the ends written out as branches."""
    steps, replicas = reward.shape
    advantage = np.zeros((steps, replicas))
    for n in range(replicas):
        for t in range(steps):
            if not valid[t, n]:
                continue
            factor = 1.0  # (γλ)^l
            for s in range(t, steps):
                after = 0.0 if terminated[s, n] else value[s + 1, n]
                delta = reward[s, n] + gamma * after - value[s, n]  # δ_s = r_s + γ V(s_{s+1}) - V(s_s)
                advantage[t, n] += factor * delta
                if terminated[s, n] or truncated[s, n]:
                    break
                factor *= gamma * lam
    return advantage


def oracle_return(reward, terminated, truncated, valid, value, gamma):
    """The discounted sum of rewards up to the end of the episode, or to the end of the interval and V there."""
    steps, replicas = reward.shape
    total = np.zeros((steps, replicas))
    for n in range(replicas):
        for t in range(steps):
            for s in range(t, steps):
                total[t, n] += gamma ** (s - t) * reward[s, n]
                if terminated[s, n]:
                    break
                if truncated[s, n] or s == steps - 1:
                    total[t, n] += gamma ** (s - t + 1) * value[s + 1, n]
                    break
    return np.where(valid, total, 0.0)


def advantages(reward, terminated, truncated, valid, value, gamma, lam):
    discount, trace = end_factors(gamma, terminated, truncated)
    return gae(reward, discount, trace, valid, value, lam)


def random_case(seed, steps, replicas, end_rate):
    """Rewards, end flags, mask, values; after a truncation comes the row that is no transition."""
    rng = np.random.default_rng(seed)
    reward = rng.standard_normal((steps, replicas), f32)
    value = rng.standard_normal((steps + 1, replicas), f32)
    terminated = (rng.random((steps, replicas)) < end_rate).astype(f32)
    truncated = np.zeros((steps, replicas), f32)
    valid = np.ones((steps, replicas), f32)
    for t in range(steps):
        truncated[t] = (rng.random(replicas) < end_rate) * valid[t]
        terminated[t] *= valid[t]
        if t + 1 < steps:
            valid[t + 1] = 1.0 - truncated[t] * (1.0 - terminated[t])
    return reward, terminated, truncated, valid, value


cases = st.builds(
    random_case, st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4), st.sampled_from([0.0, 0.2, 0.6])
)
fractions = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@settings(max_examples=150, deadline=None)
@given(cases, fractions, fractions)
def test_gae_is_the_double_sum(case, gamma, lam):
    np.testing.assert_allclose(advantages(*case, gamma, lam), oracle_gae(*case, gamma, lam), rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(cases, fractions)
def test_lambda_one_is_the_bootstrapped_return(case, gamma):
    valid, value = case[3], case[4]
    target = advantages(*case, gamma, 1.0) + value[:-1] * valid
    np.testing.assert_allclose(target, oracle_return(*case, gamma), rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(cases, fractions)
def test_lambda_zero_is_the_temporal_difference(case, gamma):
    reward, terminated, _, valid, value = case
    delta = (reward + gamma * (1 - terminated) * value[1:] - value[:-1]) * valid
    np.testing.assert_allclose(advantages(*case, gamma, 0.0), delta, rtol=1e-6, atol=1e-6)


def test_golden():
    reward = np.array([[1.0, 0.0], [-1.0, 2.0], [0.5, 0.0], [0.0, 1.0], [2.0, -0.5]], f32)
    value = np.array([[0.5, 1.0], [1.0, 0.0], [0.0, -1.0], [2.0, 0.5], [1.0, 1.5], [0.5, 2.0]], f32)
    terminated = np.zeros((5, 2), f32)
    terminated[2, 0] = 1.0  # replica 0 dies in step 2
    truncated = np.zeros((5, 2), f32)
    truncated[1, 1] = 1.0  # replica 1 is cut off in step 1: row 2 is its last observation
    valid = np.ones((5, 2), f32)
    valid[2, 1] = 0.0
    # By hand with γ = 0.5, λ = 0.5, so a factor of 1/4 per step. Replica 0: δ = 1, -2, 0.5 | -1.5, 1.25.
    # Replica 1: δ = -1, 1.5 | none | 1.25, -1.
    expected = np.array([[0.53125, -0.625], [-1.875, 1.5], [0.5, 0.0], [-1.1875, 1.0], [1.25, -1.0]], f32)
    np.testing.assert_allclose(advantages(reward, terminated, truncated, valid, value, 0.5, 0.5), expected, atol=1e-6)


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize(("flags", "target"), [("truncated", 10.0), ("terminated", 1.0), ("both", 1.0)])
def test_time_limit_oracle(lam, flags, target):
    """Reward 1 forever, episodes of 5 steps, γ 0.9, critic 10 = 1/(1 - γ): cut off, the critic is exactly right."""
    steps = 12
    reward = np.ones((steps, 1), f32)
    value = np.full((steps + 1, 1), 10.0, f32)
    truncated, terminated, valid = np.zeros((steps, 1), f32), np.zeros((steps, 1), f32), np.ones((steps, 1), f32)
    last = 4
    if flags in ("truncated", "both"):
        truncated[last] = 1.0
    if flags in ("terminated", "both"):
        terminated[last] = 1.0
    if flags == "truncated":
        valid[last + 1] = 0.0
        reward[last + 1] = 1e6
    advantage = advantages(reward, terminated, truncated, valid, value, 0.9, lam)
    assert advantage[last, 0] + 10.0 == pytest.approx(target, abs=1e-5)
    before = 9.0 * (0.9 * lam) ** np.arange(last, -1, -1) if target == 1.0 else np.zeros(5)
    np.testing.assert_allclose(advantage[: last + 1, 0], -before, atol=1e-4)
    np.testing.assert_allclose(advantage[last + 1 :], 0.0, atol=1e-4)  # the next episode knows nothing of it


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_rows_that_are_no_transitions_do_not_leak(garbage):
    case = reward, terminated, truncated, valid, _ = random_case(3, 20, 4, 0.3)
    assert (valid == 0).sum() > 5
    clean = advantages(*case, 0.99, 0.95)
    reward = np.where(valid, reward, f32(garbage))
    terminated = np.where(valid, terminated, 1.0).astype(f32)
    truncated = np.where(valid, truncated, 1.0).astype(f32)
    np.testing.assert_array_equal(advantages(reward, terminated, truncated, valid, case[4], 0.99, 0.95), clean)


def test_nothing_reaches_back_over_an_end():
    case = random_case(5, 10, 4, 0.0)
    reward, terminated, truncated, valid, value = case
    terminated[4, 0] = truncated[4, 1] = truncated[4, 2] = 1.0
    valid[5, 1] = 0.0  # the flag alone must do in replica 2
    first = advantages(*case, 0.99, 0.95)
    reward[5:] += 100.0
    value[6:] += 100.0
    second = advantages(*case, 0.99, 0.95)
    np.testing.assert_array_equal(first[:5, :3], second[:5, :3])
    assert (first[:5, 3] != second[:5, 3]).all()


def test_arguments_stay_as_they_are():
    case = random_case(1, 6, 2, 0.3)
    copies = [x.copy() for x in case]
    advantages(*case, 0.99, 0.95)
    for x, copy in zip(case, copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_reverse_scan_of_rewards_is_the_discounted_return():
    reward = np.array([[1.0], [2.0], [4.0]], f32)
    decay = np.full((3, 1), 0.5, f32)
    np.testing.assert_array_equal(reverse_scan(reward, decay), [[3.0], [4.0], [4.0]])


# ------------------------------------------------------------------------------------------------------------- V-trace


def oracle_vtrace(reward, terminated, truncated, valid, value, ratio, gamma, lam, rho_bar, c_bar):
    """Espeholt et al. 2018, equation 1 as its double sum, one replica and one step at a time, ends as branches."""
    steps, replicas = reward.shape
    rho, c = np.minimum(rho_bar, ratio), lam * np.minimum(c_bar, ratio)
    target = value[:-1].astype(np.float64)
    advantage = np.zeros((steps, replicas))

    def after(t, n):  # V(x_{t+1})
        return 0.0 if terminated[t, n] else value[t + 1, n]

    for n in range(replicas):
        for s in range(steps):
            if not valid[s, n]:
                continue
            for t in range(s, steps):
                delta = rho[t, n] * (reward[t, n] + gamma * after(t, n) - value[t, n])  # δ_t V
                target[s, n] += gamma ** (t - s) * np.prod(c[s:t, n]) * delta
                if terminated[t, n] or truncated[t, n]:
                    break
    # The policy gradient's advantage: ρ_s (r_s + γ v_{s+1} - V(x_s)); v_{s+1} is V where no step followed
    for n in range(replicas):
        for s in range(steps):
            follows = s + 1 < steps and not terminated[s, n] and not truncated[s, n]
            next_target = target[s + 1, n] if follows else after(s, n)
            mixed = lam * next_target + (1 - lam) * after(s, n)
            advantage[s, n] = rho[s, n] * (reward[s, n] + gamma * mixed - value[s, n]) if valid[s, n] else 0.0
    return target, advantage


def vtraced(case, log_ratio, gamma, lam=1.0, rho_clip=1.0, c_clip=1.0):
    reward, terminated, truncated, valid, value = case
    discount, trace = end_factors(gamma, terminated, truncated)
    return vtrace(reward, discount, trace, valid, value, log_ratio, lam, rho_clip, c_clip)


def log_ratios(case, seed=0):
    """Ratios on both sides of every threshold that is tried here."""
    return np.random.default_rng(seed).normal(0.0, 1.0, case[0].shape).astype(f32)


@settings(max_examples=150, deadline=None)
@given(cases, fractions, fractions, st.sampled_from([0.5, 1.0, 3.7]), st.sampled_from([0.3, 1.0, 2.2]))
def test_vtrace_is_the_double_sum(case, gamma, lam, rho_clip, c_clip):
    log_ratio = log_ratios(case)
    got = vtraced(case, log_ratio, gamma, lam, rho_clip, c_clip)
    expected = oracle_vtrace(*case, np.exp(log_ratio), gamma, lam, rho_clip, c_clip)
    np.testing.assert_allclose(got.target, expected[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got.advantage, expected[1], rtol=1e-4, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(cases, fractions, fractions)
def test_vtrace_with_ratios_of_one_is_gae(case, gamma, lam):
    value = case[4]
    expected = advantages(*case, gamma, lam)
    got = vtraced(case, np.zeros_like(case[0]), gamma, lam)
    np.testing.assert_allclose(got.target - value[:-1], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.advantage, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(cases, fractions)
def test_vtrace_of_the_acting_policy_is_the_bootstrapped_return(case, gamma):
    """On-policy, with λ = 1: Monte Carlo up to the episode's end or the interval's."""
    valid = case[3]
    target = vtraced(case, np.zeros_like(case[0]), gamma).target
    np.testing.assert_allclose(target * valid, oracle_return(*case, gamma), rtol=1e-5, atol=1e-5)


def test_vtrace_with_lambda_zero_is_the_weighted_temporal_difference():
    case = reward, terminated, _, valid, value = random_case(4, 12, 4, 0.2)
    log_ratio = log_ratios(case)
    delta = (reward + 0.9 * (1 - terminated) * value[1:] - value[:-1]) * valid * np.minimum(np.exp(log_ratio), 2.0)
    got = vtraced(case, log_ratio, 0.9, 0.0, rho_clip=2.0)
    np.testing.assert_allclose(got.target - value[:-1], delta, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.advantage, delta, rtol=1e-5, atol=1e-6)


def test_vtrace_with_wide_thresholds_is_unbiased_importance_sampling():
    """Unclipped, v_0 is the return of the target policy: its mean over the acting policy's trajectories is exact."""
    # Two steps, two actions each; action a pays a in the first step and 10 a in the second.
    acting, learning = np.array([0.7, 0.3]), np.array([0.2, 0.8])
    total = 0.0
    for a in (0, 1):
        for b in (0, 1):
            reward = np.array([[a], [10.0 * b]], f32)
            flags = np.zeros((2, 1), f32), np.zeros((2, 1), f32), np.ones((2, 1), f32)
            flags[0][1] = 1.0
            log_ratio = np.log(np.array([[learning[a] / acting[a]], [learning[b] / acting[b]]], f32))
            value = np.array([[3.0], [5.0], [7.0]], f32)
            target = vtraced((reward, *flags, value), log_ratio, 0.9, 1.0, 100.0, 100.0).target
            total += acting[a] * acting[b] * float(target[0, 0])
    assert total == pytest.approx(0.8 + 0.9 * 8.0, rel=1e-5)


def test_vtrace_golden():
    reward = np.array([[1.0, 0.0], [-1.0, 2.0], [0.5, 0.0], [0.0, 1.0], [2.0, -0.5]], f32)
    value = np.array([[0.5, 1.0], [1.0, 0.0], [0.0, -1.0], [2.0, 0.5], [1.0, 1.5], [0.5, 2.0]], f32)
    terminated, truncated, valid = np.zeros((5, 2), f32), np.zeros((5, 2), f32), np.ones((5, 2), f32)
    terminated[2, 0] = truncated[1, 1] = 1.0
    valid[2, 1] = 0.0
    log_ratio = np.log(np.array([[2.0, 0.5], [0.5, 4.0], [1.0, 1.0], [0.25, 1.0], [4.0, 0.5]], f32))
    # By hand with γ = 0.5, λ = 1, ρ̄ = 2, c̄ = 1. Replica 0: ρ = 2, .5, 1 | .25, 2; c = 1, .5, 1 | .25, 1; the
    # differences 1, -2, .5 | -1.5, 1.25 of test_golden times ρ: δ = 2, -1, .5 | -.375, 2.5.
    # v - V = 2 + .5(-.875), -1 + .25 .5, .5 | -.375 + .125 2.5, 2.5.
    # Replica 1: ρ = .5, 2 | none | 1, .5; δ = -.5, 3 | none | 1.25, -.5; v - V = -.5 + .25 3, 3 | none | 1, -.5.
    correction = np.array([[1.5625, 0.25], [-0.875, 3.0], [0.5, 0.0], [-0.0625, 1.0], [2.5, -0.5]], f32)
    # A = δ + ρ γ (v - V of the next row of the episode)
    advantage = np.array([[1.125, 0.25], [-0.875, 3.0], [0.5, 0.0], [-0.0625, 1.0], [2.5, -0.5]], f32)
    got = vtraced((reward, terminated, truncated, valid, value), log_ratio, 0.5, 1.0, 2.0, 1.0)
    np.testing.assert_allclose(got.target, value[:-1] + correction, atol=1e-6)
    np.testing.assert_allclose(got.advantage, advantage, atol=1e-6)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_vtrace_does_not_look_at_rows_that_are_no_transitions(garbage):
    case = reward, terminated, truncated, valid, value = random_case(3, 20, 4, 0.3)
    log_ratio = log_ratios(case)
    clean = vtraced(case, log_ratio, 0.99, 0.95)
    wild = np.where(valid, reward, f32(garbage)), np.where(valid, log_ratio, f32(min(garbage, 80.0)))
    flags = (np.where(valid, flag, 1.0).astype(f32) for flag in (terminated, truncated))
    with np.errstate(invalid="ignore"):
        dirty = vtraced((wild[0], *flags, valid, value), wild[1], 0.99, 0.95)
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one, other)


def test_vtrace_leaves_its_arguments_as_they_are_and_asserts_their_shapes():
    case = random_case(1, 6, 2, 0.3)
    log_ratio = log_ratios(case)
    copies = [x.copy() for x in (*case, log_ratio)]
    vtraced(case, log_ratio, 0.99, 0.95)
    for x, copy in zip((*case, log_ratio), copies, strict=True):
        np.testing.assert_array_equal(x, copy)
    with pytest.raises(AssertionError, match="T N"):
        vtraced(case, log_ratio[:-1], 0.99)
    with pytest.raises(AssertionError, match=r"T\+1 N"):
        vtraced((*case[:4], case[4][:-1]), log_ratio, 0.99)


def test_explained_variance():
    rng = np.random.default_rng(0)
    target = rng.standard_normal((50, 4), f32)
    valid = (rng.random((50, 4)) < 0.8).astype(f32)
    wild = np.where(valid, target, 1e9).astype(f32)
    assert explained_variance(target, wild, valid) == pytest.approx(1.0)
    assert explained_variance(target, np.zeros_like(target), valid) == pytest.approx(0.0)
    assert explained_variance(target, -target, valid) == pytest.approx(-3.0, rel=1e-5)
    assert explained_variance(np.ones_like(target), target, valid) == 0.0
    assert explained_variance(target, target, np.zeros_like(valid)) == 0.0


def test_shapes_and_dtypes_are_asserted():
    reward, terminated, truncated, valid, value = random_case(0, 5, 2, 0.0)
    discount, trace = end_factors(0.9, terminated, truncated)
    with pytest.raises(AssertionError, match=r"T\+1 N"):
        gae(reward, discount, trace, valid, value[:-1], 0.9)
    with pytest.raises(AssertionError, match="float32, got float64"):
        gae(reward.astype(np.float64), discount, trace, valid, value, 0.9)
    with pytest.raises(AssertionError, match="T N"):
        gae(reward[:, 0], discount, trace, valid, value, 0.9)
    sizes: dict[str, int] = {}
    check(sizes, "T N", np.float32, reward)
    assert sizes == {"T": 5, "N": 2}
