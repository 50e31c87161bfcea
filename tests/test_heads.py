from __future__ import annotations

import numpy as np
import pytest
import torch
from rollouts import BOX, DISCRETE, MULTI
from torch import distributions

from htsrl.models import make_head

ACTIONS = [DISCRETE, MULTI, BOX]
KINDS = ["discrete", "multi_discrete", "box"]


def reference(action, params):
    """PyTorch's distributions, which the heads must agree with."""
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
    log_prob = sum(part.log_prob(column) for part, column in zip(parts, columns, strict=True))
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
    sizes = {"discrete": (3, 3, 3), "multi_discrete": (5, 5, 5), "box": (2, 4, 2)}[action.kind]
    assert (head.output_size, head.param_size, head.noise_size) == sizes


@pytest.mark.parametrize("action", ACTIONS, ids=KINDS)
def test_gradients_are_the_reference_gradients(action):
    head = make_head(action)
    params = parameters(head).requires_grad_()
    chosen = head.sample(params.detach(), noise(head, len(params)))
    columns = chosen.unbind(-1) if action.kind == "multi_discrete" else [chosen]
    parts = reference(action, params)
    expected = sum(p.log_prob(c).sum() + 0.3 * p.entropy().sum() for p, c in zip(parts, columns, strict=True))
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
