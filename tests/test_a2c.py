from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rollouts import BINARY, BOX, DISCRETE, MULTI, image_spec, network, rollout, vector_spec

from htsrl.config import A2COptions
from htsrl.learner import minibatches
from htsrl.learner.a2c import A2C
from htsrl.learner.returns import end_factors, gae

RNG = np.random.default_rng(0)


def learner(spec=None, **options):
    spec = spec or vector_spec()
    model, parameters = network(spec)
    return A2C(A2COptions(**options), model, parameters), rollout(spec, model)


def plain_gradient(options, model, data):
    """The gradient of Mnih et al. 2016's objective by autograd over all transitions at once, as one vector by name."""
    arrays = {name: getattr(data, name).numpy() for name in ("reward", "terminated", "truncated", "valid", "value")}
    discount, trace = end_factors(options.discount, arrays["terminated"], arrays["truncated"])
    advantage = gae(arrays["reward"], discount, trace, arrays["valid"], arrays["value"], options.gae_lambda)
    rows = torch.from_numpy(np.flatnonzero(arrays["valid"]))
    flat = torch.from_numpy(advantage).flatten()
    target = (flat + data.value[:-1].flatten())[rows]
    a = flat[rows]
    if options.normalize_advantage:
        a = (a - a.mean()) / a.std(correction=0)
    params, value = model(data.obs[:-1].flatten(0, 1)[rows])
    log_prob = model.head.log_prob(params, data.action.flatten(0, 1)[rows])
    entropy = model.head.entropy(params).mean()
    loss = -(a * log_prob).mean() + options.value_coef * 0.5 * ((value - target) ** 2).mean()
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss - options.entropy_coef * entropy, list(named.values()))
    return dict(zip(named, gradients, strict=True))


def norm_of(gradients):
    return float(torch.cat([g.flatten() for g in gradients.values()]).norm())


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "action", [DISCRETE, MULTI, BINARY, BOX], ids=["discrete", "multi_discrete", "multi_binary", "box"]
)
def test_the_gradient_is_the_papers(action, normalize):
    algorithm, data = learner(vector_spec(action), max_grad_norm=1e9, normalize_advantage=normalize, gae_lambda=0.9)
    assert (data.valid == 0).any()
    expected = plain_gradient(algorithm.options, algorithm.model, data)
    metrics = algorithm.update(data, 0.0, RNG)
    assert metrics["loss/grad_norm"] == pytest.approx(norm_of(expected), rel=1e-4)
    for name, parameter in algorithm.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6, msg=name)


def test_from_other_parameters_the_gradient_is_weighted_by_the_ratio():
    """∇ of E_b[π/π_b A], where π_b acted and π learns; with equal policies it is the plain one."""
    algorithm, data = learner(max_grad_norm=1e9, gae_lambda=0.9, entropy_coef=0.0)
    weighted = A2C(algorithm.options, algorithm.model, algorithm.parameters, importance=True)
    start = algorithm.parameters.vector.clone()
    gradients = {}
    for name, each in (("plain", algorithm), ("weighted", weighted)):
        each.parameters.vector.copy_(start)
        each.update(data, 0.0, RNG)
        gradients[name] = each.parameters.vector.grad.clone()
    torch.testing.assert_close(gradients["weighted"], gradients["plain"], rtol=1e-3, atol=1e-6)

    moved = replace(
        data, log_prob=data.log_prob + torch.linspace(-1.0, 1.0, data.log_prob.numel()).view_as(data.log_prob)
    )
    weighted.parameters.vector.copy_(start)
    weighted.update(moved, 0.0, RNG)
    arrays = {name: getattr(data, name).numpy() for name in ("reward", "terminated", "truncated", "valid", "value")}
    discount, trace = end_factors(0.99, arrays["terminated"], arrays["truncated"])
    advantage = torch.from_numpy(
        gae(arrays["reward"], discount, trace, arrays["valid"], arrays["value"], 0.9)
    ).flatten()
    weighted.parameters.vector.copy_(start)
    params, value = weighted.model(data.obs[:-1].flatten(0, 1))
    log_prob = weighted.model.head.log_prob(params, data.action.flatten(0, 1))
    ratio = (log_prob - moved.log_prob.flatten()).exp()
    target = advantage + data.value[:-1].flatten()
    loss = (data.valid.flatten() * (-ratio * advantage + 0.25 * (value - target) ** 2)).sum() / data.valid.sum()
    expected = torch.autograd.grad(loss, list(weighted.model.parameters()))
    for (name, parameter), wanted in zip(weighted.model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-6, msg=name)


def test_one_step_of_gradient_descent_on_the_clipped_gradient(monkeypatch):
    """With plain gradient descent in the optimizer's place: θ' = θ - η g min(1, c/|g|), once."""
    algorithm, data = learner(max_grad_norm=0.1)
    algorithm.optimizer = torch.optim.SGD([algorithm.parameters.vector], lr=99.0)
    expected = plain_gradient(algorithm.options, algorithm.model, data)
    scale = 0.1 / norm_of(expected)
    assert scale < 1
    before = {name: p.detach().clone() for name, p in algorithm.model.named_parameters()}
    metrics = algorithm.update(data, 0.5, RNG)
    assert metrics["learning_rate"] == pytest.approx(3.5e-4)
    assert metrics["loss/grad_norm_clipped"] == pytest.approx(0.1, rel=1e-4)
    for name, p in algorithm.model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 3.5e-4 * scale * expected[name], rtol=1e-5, atol=1e-8)


def test_rmsprop_is_the_papers():
    """g' = α g' + (1-α) Δθ², θ' = θ - η Δθ / (√g' + ε), over two updates."""
    algorithm, data = learner(lr_schedule="constant", rmsprop_decay=0.9, optimizer_eps=1e-3)
    vector, square = algorithm.parameters.vector.clone().double(), 0.0
    for _ in range(2):
        algorithm.update(data, 0.0, RNG)
        gradient = algorithm.parameters.vector.grad.double()
        square = 0.9 * square + 0.1 * gradient**2
        vector = vector - 7e-4 * gradient / (square**0.5 + 1e-3)
    torch.testing.assert_close(algorithm.parameters.vector, vector.float(), rtol=1e-5, atol=1e-7)


def test_metrics():
    algorithm, data = learner()
    metrics = algorithm.update(data, 0.5, RNG)
    assert metrics.keys() == {
        "learning_rate", "loss/total", "loss/policy", "loss/value", "loss/entropy", "loss/grad_norm",
        "loss/grad_norm_clipped", "loss/explained_variance", "loss/gradient_steps",
    }  # fmt: skip
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())
    assert metrics["loss/gradient_steps"] == 1


def test_an_advantaged_action_becomes_more_likely_and_entropy_is_kept_by_its_bonus():
    chances = {}
    for coefficient in (0.0, 2.0):
        algorithm, data = learner(learning_rate=3e-3, lr_schedule="constant", entropy_coef=coefficient, value_coef=0.0)
        flat = {"terminated": torch.ones_like(data.valid), "truncated": torch.zeros_like(data.valid)}
        data = replace(data, reward=(data.action == 1).float(), value=0 * data.value, valid=flat["terminated"], **flat)
        for _ in range(20):
            algorithm.update(data, 0.0, RNG)
        with torch.no_grad():
            chances[coefficient] = float(algorithm.model(data.obs[0])[0].softmax(-1)[:, 1].mean())
    assert chances[0.0] > 0.6 > chances[2.0] > 1 / 3


@pytest.mark.parametrize("rows", [1, 5, 31])
def test_pieces_give_the_gradient_of_the_whole(monkeypatch, rows):
    spec = image_spec(36, 36, 1)
    whole, data = learner(spec)
    pieces, _ = learner(spec)
    first = whole.update(data, 0.0, RNG)
    monkeypatch.setattr(minibatches, "PIECE_BYTES", {"cpu": 4 * 36 * 36 * rows})
    sizes = []
    pieces.model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output[1])))
    second = pieces.update(data, 0.0, RNG)
    assert sum(sizes) == 32
    assert max(sizes) <= rows
    assert first == pytest.approx(second, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(
        whole.parameters.vector.grad, pieces.parameters.vector.grad, rtol=1e-3, atol=1e-5 * first["loss/grad_norm"]
    )
