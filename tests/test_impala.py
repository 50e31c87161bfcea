from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rollouts import BOX, DISCRETE, MULTI, image_spec, network, rollout, vector_spec

from htsrl.config import IMPALAOptions
from htsrl.learner import minibatches
from htsrl.learner.impala import IMPALA

RNG = np.random.default_rng(0)


def learner(spec=None, lag=True, **options):
    """An algorithm, and a rollout by a policy that is, with ``lag``, another than the one that learns."""
    spec = spec or vector_spec()
    model, parameters = network(spec)
    data = rollout(spec, model)
    if lag:  # ratios on both sides of every threshold
        noise = np.random.default_rng(5).normal(0.0, 1.0, data.log_prob.shape).astype(np.float32)
        data = replace(data, log_prob=data.log_prob + torch.from_numpy(noise))
    return IMPALA(IMPALAOptions(**options), model, parameters), data


def plain_gradient(options, model, data, replicas):
    """Gradient of Espeholt et al. 2018, section 4.2, by autograd and a loop over every step of ``replicas``, by name.

    Targets by the recursion of remark 1: v_s = V_s + δ_s + γ c_s (v_{s+1} - V_{s+1}).
    """
    params, value = model(data.obs.flatten(0, 1))
    T, N = data.reward.shape
    log_prob = model.head.log_prob(params[: T * N], data.action.flatten(0, 1)).view(T, N)
    entropy = model.head.entropy(params[: T * N]).view(T, N)
    value = value.view(T + 1, N)
    loss = torch.zeros(())
    rows = float(data.valid[:, replicas].sum())
    for n in replicas:
        v_next = V_next = value[T, n].item()
        for t in reversed(range(T)):
            V = value[t, n].item()
            if not data.valid[t, n]:
                v_next = V_next = V  # the last observation of an episode that was cut off
                continue
            if data.truncated[t, n]:
                v_next = V_next
            gamma = 0.0 if data.terminated[t, n] else options.discount
            ratio = (log_prob[t, n] - data.log_prob[t, n]).exp().item()
            rho, c = min(options.rho_clip, ratio), options.gae_lambda * min(options.c_clip, ratio)
            delta = rho * (float(data.reward[t, n]) + gamma * V_next - V)
            v = V + delta + gamma * c * (v_next - V_next)
            mixed = options.gae_lambda * v_next + (1 - options.gae_lambda) * V_next
            advantage = rho * (float(data.reward[t, n]) + gamma * mixed - V)
            loss = loss - advantage * log_prob[t, n]
            loss = loss + options.value_coef * 0.5 * (v - value[t, n]) ** 2
            loss = loss - options.entropy_coef * entropy[t, n]
            v_next, V_next = v, V
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss / rows, list(named.values()))
    return dict(zip(named, gradients, strict=True))


def norm_of(gradients):
    return float(torch.cat([g.flatten() for g in gradients.values()]).norm())


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (2.5, 0.7)])
@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOX], ids=["discrete", "multi_discrete", "box"])
def test_the_gradient_is_the_papers(action, thresholds):
    rho_clip, c_clip = thresholds
    algorithm, data = learner(vector_spec(action), max_grad_norm=1e9, rho_clip=rho_clip, c_clip=c_clip, gae_lambda=0.9)
    assert (data.valid == 0).any()
    with torch.no_grad():
        params, _ = algorithm.model(data.obs[:-1].flatten(0, 1))
        ratio = (algorithm.model.head.log_prob(params, data.action.flatten(0, 1)) - data.log_prob.flatten()).exp()
    assert (ratio > rho_clip).any()
    assert (ratio < c_clip).any()
    expected = plain_gradient(algorithm.options, algorithm.model, data, range(4))
    metrics = algorithm.update(data, 0.0, RNG)
    assert metrics["loss/grad_norm"] == pytest.approx(norm_of(expected), rel=1e-4)
    for name, parameter in algorithm.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6, msg=name)


def test_the_critic_that_acted_plays_no_part():
    algorithm, data = learner()
    other, _ = learner()
    algorithm.update(data, 0.0, RNG)
    other.update(replace(data, value=data.value + 100.0), 0.0, RNG)
    assert torch.equal(algorithm.parameters.vector, other.parameters.vector)


def test_minibatches_are_replicas_and_each_starts_where_the_one_before_ended():
    """With plain gradient descent in the optimizer's place: two steps, each on two of the four replicas."""
    algorithm, data = learner(minibatches=2, max_grad_norm=1e9, lr_schedule="constant", learning_rate=0.1)
    algorithm.optimizer = torch.optim.SGD([algorithm.parameters.vector], lr=99.0)
    model, parameters = network(vector_spec())
    parameters.vector.copy_(algorithm.parameters.vector)
    metrics = algorithm.update(data, 0.0, np.random.default_rng(3))
    assert metrics["loss/gradient_steps"] == 2
    order = np.random.default_rng(3).permutation(4)
    assert sorted(order.tolist()) == [0, 1, 2, 3] != order.tolist()
    for replicas in (order[:2], order[2:]):
        gradients = plain_gradient(algorithm.options, model, data, replicas)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(0.1 * gradients[name])
    torch.testing.assert_close(algorithm.parameters.vector, parameters.vector, rtol=1e-5, atol=1e-6)


def test_a_policy_that_learns_from_itself_has_ratios_of_one():
    algorithm, data = learner(lag=False)
    metrics = algorithm.update(data, 0.0, RNG)
    assert metrics["loss/rho"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["loss/kl"] == pytest.approx(0.0, abs=1e-6)
    far, data = learner()
    metrics = far.update(data, 0.0, RNG)
    assert metrics["loss/rho"] < 0.9
    assert metrics["loss/kl"] > 0.01


@pytest.mark.parametrize("rows", [1, 18, 27])
def test_pieces_give_the_gradient_of_the_whole(monkeypatch, rows):
    """Pieces are whole columns of 9 observations: one or two of the four; one even where it is too large."""
    spec = image_spec(36, 36, 1)
    whole, data = learner(spec)
    pieces, _ = learner(spec)
    first = whole.update(data, 0.0, RNG)
    monkeypatch.setattr(minibatches, "PIECE_BYTES", {"cpu": whole.model.row_bytes * rows})
    sizes = []
    pieces.model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output[1])))
    second = pieces.update(data, 0.0, RNG)
    assert sum(sizes) == 36
    assert max(sizes) == {1: 9, 18: 18, 27: 18}[rows]
    assert first == pytest.approx(second, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(
        whole.parameters.vector.grad, pieces.parameters.vector.grad, rtol=1e-3, atol=1e-5 * first["loss/grad_norm"]
    )


def test_the_gradient_is_clipped_in_every_minibatch_and_the_step_size_falls():
    algorithm, data = learner(minibatches=4, max_grad_norm=0.05)
    metrics = algorithm.update(replace(data, reward=100.0 * data.reward), 0.5, RNG)
    assert metrics["loss/grad_norm"] > 1.0
    assert metrics["loss/grad_norm_clipped"] == pytest.approx(0.05, rel=1e-4)
    assert metrics["learning_rate"] == pytest.approx(3e-4)
    assert metrics.keys() == {
        "learning_rate", "loss/total", "loss/policy", "loss/value", "loss/entropy", "loss/kl", "loss/rho",
        "loss/grad_norm", "loss/grad_norm_clipped", "loss/explained_variance", "loss/gradient_steps",
    }  # fmt: skip
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())


def test_rows_that_are_no_transitions_teach_nothing():
    """But for their observation, whose value bootstraps the row before."""
    algorithm, data = learner()
    other, _ = learner()
    hole = data.valid == 0
    algorithm.update(data, 0.0, RNG)
    data.reward[hole] = float("nan")
    data.log_prob[hole] -= 3.0
    data.action[hole] = (data.action[hole] + 1) % 3
    other.update(data, 0.0, RNG)
    assert torch.equal(algorithm.parameters.vector, other.parameters.vector)


def test_replicas_without_transitions_are_passed_over():
    algorithm, data = learner(minibatches=4)
    valid = data.valid.clone()
    valid[:, :3] = 0.0
    assert algorithm.update(replace(data, valid=valid), 0.0, RNG)["loss/gradient_steps"] == 1
    before = algorithm.parameters.vector.clone()
    metrics = algorithm.update(replace(data, valid=torch.zeros_like(valid)), 0.0, RNG)
    assert metrics["loss/gradient_steps"] == metrics["loss/explained_variance"] == 0
    assert torch.equal(algorithm.parameters.vector, before)
