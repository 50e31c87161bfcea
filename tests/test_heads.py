from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollouts import BINARY, BOX, DISCRETE, MULTI
from torch import distributions

from htsrl.config import NetworkOptions
from htsrl.models import make_head
from htsrl.models.heads import MASKED_LOGIT, DiagonalGaussian, mask_logits

ACTIONS = [DISCRETE, MULTI, BINARY, BOX]
KINDS = ["discrete", "multi_discrete", "multi_binary", "box"]


def reference(action, params):
    """PyTorch's distributions, which the heads must agree with."""
    if action.kind == "multi_binary":
        return [distributions.Independent(distributions.Bernoulli(logits=params), 1)]
    if action.kind == "discrete":
        return [distributions.Categorical(logits=params)]
    if action.kind == "multi_discrete":
        return [distributions.Categorical(logits=logits) for logits in params.split(action.nvec, -1)]
    mean, log_std = params.chunk(2, -1)
    return [distributions.Independent(distributions.Normal(mean, log_std.exp()), 1)]


def noise(head, rows, seed=0):
    rng = np.random.default_rng(seed)
    draw = rng.gumbel if head.noise_kind == "gumbel" else rng.normal
    return torch.from_numpy(draw(size=(rows, head.noise_size)).astype(np.float32))


def parameters(head, rows=64, seed=0):
    return torch.randn(rows, head.param_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("action", ACTIONS, ids=KINDS)
def test_log_prob_and_entropy(action):
    head = make_head(action)
    params = parameters(head)
    chosen = head.sample(params, noise(head, len(params)))
    parts = reference(action, params)
    columns = chosen.unbind(-1) if action.kind == "multi_discrete" else [chosen]
    log_prob = sum(part.log_prob(column.to(params.dtype)) for part, column in zip(parts, columns, strict=True))
    entropy = sum(part.entropy() for part in parts)
    torch.testing.assert_close(head.log_prob(params, chosen), log_prob)
    torch.testing.assert_close(head.entropy(params), entropy)
    together = head.log_prob_entropy(params, chosen)
    torch.testing.assert_close(together[0], log_prob)
    torch.testing.assert_close(together[1], entropy)


@pytest.mark.parametrize("action", ACTIONS, ids=KINDS)
def test_shapes_and_dtypes(action):
    head = make_head(action)
    params = parameters(head, rows=5)
    for chosen in (head.sample(params, noise(head, 5)), head.mode(params)):
        assert chosen.shape == (5, *action.stored_shape)
        assert chosen.numpy().dtype == action.stored_dtype
        assert head.log_prob(params, chosen).shape == head.entropy(params).shape == (5,)
    sizes = {"discrete": (3, 3, 3), "multi_discrete": (5, 5, 5), "multi_binary": (3, 3, 6), "box": (2, 4, 2)}[
        action.kind
    ]
    assert (head.output_size, head.param_size, head.noise_size) == sizes


@pytest.mark.parametrize("action", ACTIONS, ids=KINDS)
def test_gradients_are_the_reference_gradients(action):
    head = make_head(action)
    params = parameters(head).requires_grad_()
    chosen = head.sample(params.detach(), noise(head, len(params)))
    columns = chosen.unbind(-1) if action.kind == "multi_discrete" else [chosen]
    parts = reference(action, params)
    expected = sum(
        p.log_prob(c.to(params.dtype)).sum() + 0.3 * p.entropy().sum() for p, c in zip(parts, columns, strict=True)
    )
    log_prob, entropy = head.log_prob_entropy(params, chosen)
    (got,) = torch.autograd.grad(log_prob.sum() + 0.3 * entropy.sum(), params)
    (wanted,) = torch.autograd.grad(expected, params)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_gumbel_noise_samples_the_softmax():
    head = make_head(DISCRETE)
    logits = torch.tensor([[0.0, 1.0, -1.0]]).expand(200_000, -1)
    counts = head.sample(logits, noise(head, len(logits))).bincount(minlength=3) / len(logits)
    torch.testing.assert_close(counts, logits[0].softmax(-1), atol=0.005, rtol=0)


def test_components_are_sampled_on_their_own():
    head = make_head(MULTI)
    params = torch.tensor([[0.0, 1.0, -1.0, 0.5, -0.5]]).expand(200_000, -1)
    chosen = head.sample(params, noise(head, len(params)))
    joint = (chosen[:, 0] * 2 + chosen[:, 1]).bincount(minlength=6).view(3, 2) / len(params)
    expected = params[0, :3].softmax(-1)[:, None] * params[0, 3:].softmax(-1)
    torch.testing.assert_close(joint, expected, atol=0.005, rtol=0)


def test_yes_and_no_are_sampled_with_their_chances():
    head = make_head(BINARY)
    params = torch.tensor([[0.0, 2.0, -1.0]]).expand(200_000, -1)
    chosen = head.sample(params, noise(head, len(params)))
    torch.testing.assert_close(chosen.float().mean(0), params[0].sigmoid(), atol=0.005, rtol=0)
    together = (chosen[:, 0] * chosen[:, 1]).float().mean()
    torch.testing.assert_close(together, params[0, :2].sigmoid().prod(), atol=0.005, rtol=0)


def test_gaussian_samples_mean_and_deviation():
    head = make_head(BOX)
    params = torch.tensor([[1.0, -2.0, 0.0, -1.0]]).expand(200_000, -1)
    chosen = head.sample(params, noise(head, len(params)))
    torch.testing.assert_close(chosen.mean(0), params[0, :2], atol=0.01, rtol=0)
    torch.testing.assert_close(chosen.std(0), params[0, 2:].exp(), atol=0.01, rtol=0)


@pytest.mark.parametrize("action", ACTIONS, ids=KINDS)
def test_mode_is_the_most_likely_action(action):
    head = make_head(action)
    params = parameters(head)
    best = head.log_prob(params, head.mode(params))
    for seed in range(20):
        assert (head.log_prob(params, head.sample(params, noise(head, len(params), seed))) <= best + 1e-6).all()


@pytest.mark.parametrize("action", ACTIONS, ids=KINDS)
def test_pure(action):
    """Same inputs, same outputs; inputs and the global generator stay as they were."""
    head = make_head(action)
    params, draws = parameters(head), noise(head, 64)
    before = params.clone(), draws.clone(), torch.get_rng_state()
    first, mode = head.sample(params, draws), head.mode(params)
    assert torch.equal(first, head.sample(params, draws))
    log_prob = head.log_prob_entropy(params, first)[0]
    assert torch.equal(params, before[0])
    assert torch.equal(draws, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    kept = mode.clone()
    params.zero_()
    assert torch.equal(mode, kept), "an action must not be a view of the parameters"
    assert torch.isfinite(log_prob).all()


def test_extreme_deviations_stay_finite():
    head = make_head(BOX)
    params = torch.tensor([[1e4, -1e4, -20.0, 20.0], [0.0, 1e-9, 20.0, -20.0]], requires_grad=True)
    action = head.sample(params, noise(head, 2)).detach()
    log_prob, entropy = head.log_prob_entropy(params, action)
    (grad,) = torch.autograd.grad((log_prob + entropy).sum(), params)
    for values in (action, log_prob, entropy, grad):
        assert torch.isfinite(values).all()


def test_extreme_components_stay_finite():
    head = make_head(MULTI)
    params = torch.tensor([[1e9, -1e9, 0.0, -1e9, 1e9]], requires_grad=True)
    log_prob, entropy = head.log_prob_entropy(params, torch.tensor([[1, 0]]))
    (grad,) = torch.autograd.grad((log_prob + entropy).sum(), params)
    for values in (log_prob, entropy, grad):
        assert torch.isfinite(values).all()


def test_extreme_logits_stay_finite():
    head = make_head(DISCRETE)
    params = torch.tensor([[1e4, -1e4, 0.0], [-1e9, 0.0, -1e9]], requires_grad=True)
    log_prob, entropy = head.log_prob_entropy(params, torch.tensor([0, 1]))
    torch.testing.assert_close(log_prob, torch.zeros(2))
    torch.testing.assert_close(entropy, torch.zeros(2))
    (grad,) = torch.autograd.grad((log_prob + entropy).sum(), params)
    assert torch.isfinite(grad).all()


def test_extreme_chances_stay_finite_and_exact():
    head = make_head(BINARY)
    params = torch.tensor([[1e9, -1e9, 0.0], [20.0, -20.0, 5.0]], requires_grad=True)
    log_prob, entropy = head.log_prob_entropy(params, torch.tensor([[1, 0, 1], [1, 0, 0]]))
    double = torch.tensor([20.0, -20.0, 5.0], dtype=torch.float64)
    part = distributions.Bernoulli(logits=double)
    torch.testing.assert_close(entropy.double()[1], part.entropy().sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(log_prob[0], torch.tensor(0.5).log())
    (grad,) = torch.autograd.grad((log_prob + entropy).sum(), params)
    assert torch.isfinite(grad).all()


# ------------------------------------------------------------------------------------------ deviations of the network


def test_deviations_of_the_network_are_a_normal_s_within_their_range():
    head = make_head(BOX, NetworkOptions(state_dependent_std=True))
    assert (head.output_size, head.param_size, head.noise_size) == (4, 4, 2)
    params = torch.tensor([[0.3, -1.0, -0.5, 1.0], [0.0, 0.0, -99.0, 99.0]], requires_grad=True)
    action = head.sample(params, noise(head, 2)).detach()
    clamped = torch.tensor([[-0.5, 1.0], [-5.0, 2.0]])
    part = distributions.Independent(distributions.Normal(params[:, :2], clamped.exp()), 1)
    log_prob, entropy = head.log_prob_entropy(params, action)
    torch.testing.assert_close(log_prob, part.log_prob(action))
    torch.testing.assert_close(entropy, part.entropy())
    (grad,) = torch.autograd.grad((log_prob + entropy).sum(), params)
    assert torch.isfinite(grad).all()
    assert (grad[0] != 0).all()
    assert (grad[1, 2:] == 0).all(), "beyond the range there is nothing to gain"


# ------------------------------------------------------------------------------------------------------------ squashed

SQUASHED = DiagonalGaussian(2, squashed=True)


def test_squashed_log_probs_are_those_of_the_transformed_normal():
    params = parameters(SQUASHED, rows=256).double()
    u = SQUASHED.sample(params, noise(SQUASHED, 256).double())
    mean, log_std = params.chunk(2, -1)
    base = distributions.Normal(mean, log_std.exp())
    squashed = distributions.TransformedDistribution(base, [distributions.TanhTransform()])
    wanted, near = squashed.log_prob(u.tanh()).sum(-1), u.abs().amax(-1) < 8  # beyond, the inverse in there is lost
    torch.testing.assert_close(SQUASHED.log_prob(params, u)[near], wanted[near], rtol=1e-6, atol=1e-6)
    assert near.sum() > 200
    single = SQUASHED.log_prob(params.float(), u.float())
    torch.testing.assert_close(single.double(), SQUASHED.log_prob(params, u), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.5, -1.0), (-0.7, 0.5)])
def test_the_squashed_density_integrates_to_one_and_its_entropy_is_the_integral(mean, log_std):
    """Over the actions themselves, a in (-1, 1): nothing of the change of variables is taken for granted."""
    head = DiagonalGaussian(1, squashed=True)
    a = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 200_000 - 1.0
    params = torch.tensor([[mean, log_std]], dtype=torch.float64).expand(len(a), -1)
    log_density = head.log_prob(params, a.atanh()[:, None])
    width = 2.0 / len(a)
    assert float((log_density.exp() * width).sum()) == pytest.approx(1.0, abs=1e-4)
    entropy = -float((log_density.exp() * log_density * width).sum())
    assert float(head.entropy(params[:1].float())) == pytest.approx(entropy, abs=2e-3)


@given(st.floats(-4.0, 4.0), st.floats(-5.0, 2.0))
def test_the_squashed_entropy_is_near_a_fine_quadrature(mean, log_std):
    params = torch.tensor([[mean, log_std]], requires_grad=True)
    entropy = DiagonalGaussian(1, squashed=True).entropy(params)
    double = params.detach().double().requires_grad_()
    m, s = double[0, 0], double[0, 1].exp()
    z = torch.linspace(-9.0, 9.0, 20_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * z**2)
    slope = -2.0 * torch.log(torch.cosh((m + s * z).clamp(-300, 300)))
    fine = double[0, 1] + 0.5 * math.log(2 * math.pi * math.e) + (weight * slope).sum() / weight.sum()
    assert entropy.item() == pytest.approx(fine.item(), abs=0.1 if log_std > 1.0 else 2e-3)
    (got,), (wanted,) = torch.autograd.grad(entropy, params), torch.autograd.grad(fine, double)
    torch.testing.assert_close(got.double(), wanted, atol=0.3 if log_std > 1.0 else 5e-3, rtol=0)


def test_squashed_extremes_stay_finite():
    params = torch.tensor([[1e4, -1e4, -20.0, 20.0], [40.0, -40.0, 0.0, 0.0]], requires_grad=True)
    u = SQUASHED.sample(params, noise(SQUASHED, 2)).detach()
    assert (u.abs() > 20).any(), "where tanh rounds to 1 and its inverse would be infinite"
    log_prob, entropy = SQUASHED.log_prob_entropy(params, u)
    (grad,) = torch.autograd.grad((log_prob + entropy).sum(), params)
    for values in (log_prob, entropy, grad):
        assert torch.isfinite(values).all()


def test_wider_is_not_always_more_entropy_between_bounds():
    """What the bonus must know: far out, a wider normal puts more and more on the bounds."""
    head = DiagonalGaussian(1, squashed=True)
    entropies = [float(head.entropy(torch.tensor([[0.0, log_std]]))) for log_std in (-2.0, -0.14, 1.5)]
    assert entropies[0] < entropies[1] > entropies[2]
    assert max(entropies) < math.log(2.0), "that of the uniform distribution"


# --------------------------------------------------------------------------------------------------------------- masks


@given(st.integers(0, 10**6), st.sampled_from([DISCRETE, MULTI]))
def test_what_is_masked_is_never_chosen_and_has_no_gradient(seed, action):
    rng = np.random.default_rng(seed)
    head = make_head(action)
    allowed = torch.from_numpy(rng.integers(0, 2, (64, head.param_size), np.uint8))
    for first, last in zip(np.cumsum((0, *action.nvec)), np.cumsum(action.nvec)):
        allowed[torch.arange(64), torch.from_numpy(rng.integers(first, last, 64))] = 1
    logits = (parameters(head, seed=seed) * 10.0 ** float(rng.integers(-2, 4))).requires_grad_()
    params = mask_logits(logits, allowed)
    split = list(params.split(action.nvec, -1))
    chances = torch.cat([each.softmax(-1) for each in split], -1)
    assert (chances[allowed == 0] == 0).all()
    for draw in range(8):
        for chosen in (head.sample(params, noise(head, 64, seed + draw)), head.mode(params)):
            places = chosen.reshape(64, -1) + torch.tensor(np.cumsum((0, *action.nvec))[:-1])
            assert allowed.gather(1, places).all()

    # As the distribution over what is left, entropy and gradients included
    log_prob, entropy = head.log_prob_entropy(params, chosen)
    infinite = logits.detach().double().masked_fill(allowed == 0, -torch.inf)
    parts = [distributions.Categorical(logits=each) for each in infinite.split(action.nvec, -1)]
    columns = chosen.reshape(64, -1).unbind(-1)
    wanted = sum(p.log_prob(c) for p, c in zip(parts, columns, strict=True))
    torch.testing.assert_close(log_prob.double(), wanted, rtol=1e-5, atol=1e-3)  # of logits in the thousands
    torch.testing.assert_close(entropy.double(), sum(p.entropy() for p in parts), rtol=1e-3, atol=1e-4)
    (grad,) = torch.autograd.grad((log_prob + entropy).sum(), logits)
    assert torch.isfinite(grad).all()
    assert (grad[allowed == 0] == 0).all()


def test_where_nothing_is_allowed_everything_is_finite():
    head = make_head(DISCRETE)
    logits = torch.tensor([[3.0, -2.0, 0.0]], requires_grad=True)
    params = mask_logits(logits, torch.zeros(1, 3, dtype=torch.uint8))
    assert (params == MASKED_LOGIT).all()
    log_prob, entropy = head.log_prob_entropy(params, head.sample(params, noise(head, 1)))
    (grad,) = torch.autograd.grad((log_prob + entropy).sum(), logits)
    torch.testing.assert_close(log_prob, torch.tensor([-math.log(3.0)]))
    assert (grad == 0).all()
