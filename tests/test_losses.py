from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from htsrl.learner import losses


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def case(seed: int, rows: int = 24, fillers: int = 5) -> dict[str, torch.Tensor]:
    """Ratios on both sides of 1 ± 0.2, advantages of both signs, and some filler rows."""
    rng = np.random.default_rng(seed)
    weight = np.zeros(rows)
    weight[: rows - fillers] = 1.0 / (rows - fillers)
    arrays = {
        "log_prob": rng.normal(-1.0, 0.3, rows),
        "behaviour_log_prob": rng.normal(-1.0, 0.3, rows),
        "advantage": rng.normal(0.3, 1.0, rows),
        "value": rng.normal(0.0, 1.0, rows),
        "behaviour_value": rng.normal(0.0, 1.0, rows),
        "target": rng.normal(0.0, 1.0, rows),
        "weight": weight,
    }
    return {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}


def oracle_surrogate(c, epsilon):
    """Schulman et al. 2017, equation 7, row by row."""
    total, count = 0.0, 0
    for lp, old, a, w in zip(c["log_prob"], c["behaviour_log_prob"], c["advantage"], c["weight"], strict=True):
        if w == 0:
            continue
        r = math.exp(float(lp) - float(old))
        total += min(r * float(a), min(max(r, 1 - epsilon), 1 + epsilon) * float(a))
        count += 1
    return -total / count


def surrogate(c, epsilon):
    ratio = losses.log_ratio(c["log_prob"], c["behaviour_log_prob"]).exp()
    return losses.clipped_surrogate(ratio, c["advantage"], c["weight"], epsilon)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.05, 0.2, 0.5]))
def test_surrogate_is_the_papers(seed, epsilon):
    c = case(seed)
    c["log_prob"][:2] = c["behaviour_log_prob"][:2] + torch.tensor(
        [1.0, -1.0]
    )  # ratios 2.7 and 0.37: clipped at both ends
    ratio = (c["log_prob"] - c["behaviour_log_prob"]).exp()
    assert ratio.min() < 1 - epsilon, "the clip must be exercised"
    assert ratio.max() > 1 + epsilon, "the clip must be exercised"
    assert float(surrogate(c, epsilon)) == pytest.approx(oracle_surrogate(c, epsilon), rel=1e-4, abs=1e-5)


def test_surrogate_golden_and_where_its_gradient_is_cut():
    #           inside  above, A>0  below, A>0  above, A<0  below, A<0
    ratio = tensor(1.1, 1.5, 0.5, 1.5, 0.5).requires_grad_()
    advantage = tensor(2.0, 1.0, 1.0, -1.0, -1.0)
    loss = losses.clipped_surrogate(ratio, advantage, torch.full((5,), 0.2), 0.2)
    assert float(loss.detach()) == pytest.approx(-(2.2 + 1.2 + 0.5 - 1.5 - 0.8) / 5)
    loss.backward()
    assert ratio.grad is not None
    np.testing.assert_allclose(ratio.grad, [-0.4, 0.0, -0.2, 0.2, 0.0], atol=1e-7)


def test_at_the_behaviour_policy_the_surrogate_is_the_policy_gradient():
    c = case(1)
    log_prob = c["behaviour_log_prob"].clone().requires_grad_()
    ratio = losses.log_ratio(log_prob, c["behaviour_log_prob"]).exp()
    (ppo,) = torch.autograd.grad(losses.clipped_surrogate(ratio, c["advantage"], c["weight"], 0.2), log_prob)
    (a2c,) = torch.autograd.grad(losses.policy_gradient(log_prob, c["advantage"], c["weight"]), log_prob)
    np.testing.assert_allclose(ppo, a2c, rtol=1e-6)
    np.testing.assert_allclose(a2c, -c["advantage"] * c["weight"], rtol=1e-6)


def test_log_ratio_stays_finite():
    ratio = losses.log_ratio(tensor(0.0, -500.0, 0.0), tensor(-500.0, 0.0, -0.5)).exp()
    assert torch.isfinite(ratio).all()
    assert float(ratio[2]) == pytest.approx(math.exp(0.5))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 0.1, 0.5, 100.0]))
def test_value_loss_is_the_mean_over_real_rows(seed, clip):
    c = case(seed)
    expected, count = 0.0, 0
    for v, target, old, w in zip(c["value"], c["target"], c["behaviour_value"], c["weight"], strict=True):
        if w == 0:
            continue
        error = (float(v) - float(target)) ** 2
        if clip is not None:
            kept = float(old) + min(max(float(v) - float(old), -clip), clip)
            error = max(error, (kept - float(target)) ** 2)
        expected += 0.5 * error
        count += 1
    loss = losses.value_loss(c["value"], c["target"], c["behaviour_value"], c["weight"], clip)
    assert float(loss) == pytest.approx(expected / count, rel=1e-4)


def test_value_clip_golden():
    # V moved from 0 to 1, clip 0.2. Target 2: both errors shrink with V, the clipped one (1.8²) is larger, no gradient.
    # Target 0.5: V's own error (0.5²) is larger than the clipped one (0.3²), gradient V - target.
    value = tensor(1.0, 1.0).requires_grad_()
    loss = losses.value_loss(value, tensor(2.0, 0.5), tensor(0.0, 0.0), tensor(0.5, 0.5), 0.2)
    assert float(loss.detach()) == pytest.approx(0.5 * (1.8**2 + 0.5**2) / 2)
    loss.backward()
    assert value.grad is not None
    np.testing.assert_allclose(value.grad, [0.0, 0.25], atol=1e-7)


def test_kl_and_clip_fraction_golden():
    ratio = tensor(1.0, 1.5, 0.75, 1e6)
    weight = tensor(0.25, 0.25, 0.5, 0.0)
    kl = losses.approximate_kl(ratio.log(), ratio, weight)
    assert float(kl) == pytest.approx(0.25 * (0.5 - math.log(1.5)) + 0.5 * (-0.25 - math.log(0.75)), rel=1e-5)
    assert float(losses.clip_fraction(ratio, weight, 0.2)) == pytest.approx(0.75)
    assert float(losses.clip_fraction(ratio, weight, 0.3)) == pytest.approx(0.25)


def test_kl_estimates_the_divergence():
    rng = np.random.default_rng(0)
    old, new = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    action = rng.choice(3, 200_000, p=old)
    log_ratio = torch.from_numpy(np.log(new / old)[action].astype(np.float32))
    estimate = losses.approximate_kl(log_ratio, log_ratio.exp(), torch.full((200_000,), 1 / 200_000))
    assert float(estimate) == pytest.approx(float((old * np.log(old / new)).sum()), rel=0.02)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_whitening(seed):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(5.0, 3.0, (3, 16)).astype(np.float32))
    weight = torch.zeros(3, 16)
    for k, real in enumerate((16, 9, 2)):
        weight[k, :real] = 1.0 / real
    x[1, 9:] = 1e9
    white = losses.whiten(x, weight)
    for k, real in enumerate((16, 9, 2)):
        rows = x[k, :real].double()
        expected = (rows - rows.mean()) / rows.std(correction=0)
        np.testing.assert_allclose(white[k, :real], expected, rtol=1e-3, atol=1e-3)
        assert (white[k, real:] == 0).all()


def test_whitening_without_spread_gives_nothing():
    weight = torch.full((1, 7), 1 / 7)
    for level in (0.0, 0.1, -3.3, 12345.678):
        assert losses.whiten(torch.full((1, 7), level), weight).abs().max() < 0.1
    assert float(losses.whiten(tensor(5.0)[None], tensor(1.0)[None])) == 0.0


def all_losses(c):
    log_ratio = losses.log_ratio(c["log_prob"], c["behaviour_log_prob"])
    ratio, weight = log_ratio.exp(), c["weight"]
    return torch.stack(
        [
            losses.clipped_surrogate(ratio, c["advantage"], weight, 0.2),
            losses.policy_gradient(c["log_prob"], c["advantage"], weight),
            losses.value_loss(c["value"], c["target"], c["behaviour_value"], weight),
            losses.value_loss(c["value"], c["target"], c["behaviour_value"], weight, 0.3),
            losses.approximate_kl(log_ratio, ratio, weight),
            losses.clip_fraction(ratio, weight, 0.2),
            losses.weighted_mean(c["value"], weight),
        ]
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("poisoned", ["log_prob", "behaviour_log_prob", "advantage", "value", "target"])
def test_no_guard_hides_what_is_not_finite(poisoned, bad):
    """Clamps and maxima keep good numbers good; a bad one must reach the check of the loss."""
    if poisoned == "behaviour_log_prob" and math.isinf(bad):
        pytest.skip("an action of probability 0: the ratio is clamped like any other")
    c = case(3)
    c[poisoned][4] = bad
    white = losses.whiten(c["advantage"][None], c["weight"][None])[0]
    log_ratio = losses.log_ratio(c["log_prob"], c["behaviour_log_prob"])
    ratio, weight = log_ratio.exp(), c["weight"]
    total = losses.clipped_surrogate(ratio, white, weight, 0.2) + losses.approximate_kl(log_ratio, ratio, weight)
    total = total + losses.value_loss(c["value"], c["target"], c["behaviour_value"], weight, 0.3)
    total = total + losses.policy_gradient(c["log_prob"], white, weight)
    assert not torch.isfinite(total)


def test_filler_rows_count_for_nothing():
    c = case(4, rows=24, fillers=5)
    real = {name: x[:19] for name, x in c.items()}
    torch.testing.assert_close(all_losses(c), all_losses(real))


def test_pieces_add_up():
    c = case(5)
    pieces = [{name: x[start : start + 7] for name, x in c.items()} for start in range(0, 24, 7)]
    torch.testing.assert_close(torch.stack([all_losses(piece) for piece in pieces]).sum(0), all_losses(c))


def test_shapes_are_asserted():
    c = case(0)
    with pytest.raises(AssertionError, match=r"expected \[M\]"):
        losses.value_loss(c["value"][:, None], c["target"], c["behaviour_value"], c["weight"])
    with pytest.raises(AssertionError, match="float64"):
        losses.policy_gradient(c["log_prob"].double(), c["advantage"], c["weight"])
    with pytest.raises(AssertionError, match="'M': 24"):
        losses.clipped_surrogate(c["log_prob"], c["advantage"][:3], c["weight"], 0.2)
