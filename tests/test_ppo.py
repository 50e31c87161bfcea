from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rollouts import BOX, DISCRETE, MULTI, image_spec, network, rollout, vector_spec

from htsrl.config import PPOOptions
from htsrl.learner import minibatches, ppo
from htsrl.learner.minibatches import deal
from htsrl.learner.optimizer import adam
from htsrl.learner.ppo import PPO
from htsrl.learner.schedules import learning_rate
from htsrl.models import FlatParameters

METRICS = {
    "learning_rate",
    "loss/total",
    "loss/policy",
    "loss/value",
    "loss/entropy",
    "loss/kl",
    "loss/clip_fraction",
    "loss/grad_norm",
    "loss/grad_norm_clipped",
    "loss/explained_variance",
    "loss/gradient_steps",
}


def learner(spec=None, **options):
    spec = spec or vector_spec()
    model, parameters = network(spec)
    return PPO(PPOOptions(**options), model, parameters), rollout(spec, model)


def rng(seed=0):
    return np.random.default_rng(seed)


def oracle_update(options, model, data, progress, draws):
    """PPO the plain way: whole tensors, lists of parameters, PyTorch's own clipping, nothing preallocated."""
    steps, replicas = data.reward.shape
    advantage = torch.zeros(steps, replicas)
    for n in range(replicas):
        carried = 0.0
        for t in reversed(range(steps)):
            alive = 1 - data.terminated[t, n]
            delta = data.reward[t, n] + options.discount * alive * data.value[t + 1, n] - data.value[t, n]
            carry = options.discount * options.gae_lambda * alive * (1 - data.truncated[t, n])
            carried = delta + carry * carried if data.valid[t, n] else 0.0
            advantage[t, n] = carried
    target = (advantage + data.value[:-1]).flatten()
    obs, action, old = data.obs[:-1].flatten(0, 1), data.action.flatten(0, 1), data.log_prob.flatten()
    advantage, value_old = advantage.flatten(), data.value[:-1].flatten()
    learned = list(model.parameters())
    optimizer = torch.optim.Adam(learned, lr=options.learning_rate * (1 - progress), eps=options.adam_eps)
    rows = np.flatnonzero(data.valid.numpy())
    for _ in range(options.epochs):
        for part in np.array_split(draws.permutation(rows), options.minibatches):
            index = torch.from_numpy(part)
            params, value = model(obs[index])
            log_prob = model.head.log_prob(params, action[index])
            a = advantage[index]
            if options.normalize_advantage:
                a = (a - a.mean()) / (a.std(correction=0) + 1e-8)
            ratio = (log_prob - old[index]).exp()
            clipped = ratio.clamp(1 - options.clip_range, 1 + options.clip_range)
            policy = -torch.min(ratio * a, clipped * a).mean()
            error = (value - target[index]) ** 2
            if options.clip_value is not None:
                kept = value_old[index] + (value - value_old[index]).clamp(-options.clip_value, options.clip_value)
                error = torch.max(error, (kept - target[index]) ** 2)
            entropy = model.head.entropy(params).mean()
            optimizer.zero_grad()
            (policy + options.value_coef * 0.5 * error.mean() - options.entropy_coef * entropy).backward()
            torch.nn.utils.clip_grad_norm_(learned, options.max_grad_norm)
            optimizer.step()


@pytest.mark.parametrize("clip_value", [None, 0.05])
@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOX], ids=["discrete", "multi_discrete", "box"])
def test_update_is_the_plain_one(action, clip_value):
    algorithm, data = learner(
        vector_spec(action), minibatches=3, epochs=3, clip_value=clip_value, clip_range=0.02, learning_rate=3e-3
    )
    assert (data.valid == 0).any()
    plain, _ = network(vector_spec(action))
    oracle_update(algorithm.options, plain, data, 0.25, rng())
    metrics = algorithm.update(data, 0.25, rng())
    assert 0 < metrics["loss/clip_fraction"] < 1
    for (name, got), wanted in zip(algorithm.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, msg=name)


def test_metrics():
    algorithm, data = learner()
    metrics = algorithm.update(data, 0.5, rng())
    assert metrics.keys() == METRICS
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())
    assert metrics["learning_rate"] == pytest.approx(1.5e-4)
    assert metrics["loss/gradient_steps"] == 16


def test_before_the_first_step_the_ratio_is_one():
    algorithm, data = learner(epochs=1, minibatches=1)
    metrics = algorithm.update(data, 0.0, rng())
    assert metrics["loss/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["loss/clip_fraction"] == 0.0


def test_an_advantaged_action_becomes_more_likely():
    algorithm, data = learner(learning_rate=1e-2, entropy_coef=0.0, minibatches=1)
    data = replace(
        data,
        reward=(data.action == 1).float(),
        value=torch.zeros_like(data.value),
        terminated=torch.ones_like(data.reward),
        truncated=torch.zeros_like(data.reward),
        valid=torch.ones_like(data.reward),
    )

    def likelihood():
        with torch.no_grad():
            return algorithm.model(data.obs[:-1].flatten(0, 1))[0].softmax(-1).mean(0)

    before = likelihood()
    first = algorithm.update(data, 0.0, rng(1))
    last = [algorithm.update(data, 0.0, rng(seed)) for seed in range(2, 8)][-1]
    after = likelihood()
    assert after[1] > before[1] + 0.1
    assert after[0] < before[0]
    assert last["loss/policy"] < first["loss/policy"]
    assert last["loss/value"] < first["loss/value"]


def test_the_entropy_bonus_raises_entropy():
    entropies = {}
    for coefficient in (0.0, 1.0):
        algorithm, data = learner(entropy_coef=coefficient, value_coef=0.0, learning_rate=1e-2, epochs=10)
        with torch.no_grad():
            algorithm.model.policy[-1].weight.mul_(300.0)
        algorithm.update(replace(data, reward=torch.zeros_like(data.reward)), 0.0, rng())
        with torch.no_grad():
            entropies[coefficient] = algorithm.model.head.entropy(algorithm.model(data.obs[0])[0]).mean()
    assert entropies[1.0] > entropies[0.0] + 0.05


def test_every_minibatch_is_clipped(monkeypatch):
    norms = []
    clip = ppo.clip_gradient
    monkeypatch.setattr(ppo, "clip_gradient", lambda *a: norms.append(clip(*a)) or norms[-1])
    algorithm, data = learner(epochs=2, minibatches=4, max_grad_norm=0.5)
    metrics = algorithm.update(replace(data, reward=1e4 * data.reward), 0.0, rng())
    before, after = torch.stack(norms).T
    assert len(before) == 8
    assert (before > 100).all()
    assert (after <= 0.5 + 1e-6).all()
    assert metrics["loss/grad_norm"] == pytest.approx(float(before.mean()), rel=1e-5)
    assert metrics["loss/grad_norm_clipped"] == pytest.approx(float(after.max()))


def test_a_small_gradient_is_not_scaled():
    algorithm, data = learner(epochs=1, minibatches=1, max_grad_norm=1e9)
    metrics = algorithm.update(data, 0.0, rng())
    assert metrics["loss/grad_norm"] == metrics["loss/grad_norm_clipped"] > 0


@pytest.mark.parametrize("spec", [vector_spec(), image_spec(40, 40, 2)], ids=["vector", "image"])
def test_gradients_are_accumulated_into_the_vector(spec):
    """Autograd adds to the preallocated views; it never puts tensors of its own in their place."""
    algorithm, data = learner(spec)
    gradient = algorithm.parameters.vector.grad
    views = {name: p.grad for name, p in algorithm.model.named_parameters()}
    storage = gradient.untyped_storage().data_ptr()
    algorithm.update(data, 0.0, rng())
    assert algorithm.parameters.vector.grad is gradient
    for name, p in algorithm.model.named_parameters():
        assert p.grad is views[name]
        assert p.grad.untyped_storage().data_ptr() == storage
        assert p.grad.abs().sum() > 0
        assert p.untyped_storage().data_ptr() == algorithm.parameters.vector.untyped_storage().data_ptr()


def test_epochs_stop_where_the_policy_has_moved_too_far():
    free, data = learner(epochs=10, learning_rate=1e-2)
    stopped, _ = learner(epochs=10, learning_rate=1e-2, target_kl=0.001)
    assert free.update(data, 0.0, rng())["loss/gradient_steps"] == 40
    metrics = stopped.update(data, 0.0, rng())
    assert metrics["loss/gradient_steps"] in range(4, 40, 4)
    patient, _ = learner(epochs=10, learning_rate=1e-2, target_kl=1e9)
    assert patient.update(data, 0.0, rng())["loss/gradient_steps"] == 40
    assert torch.equal(patient.parameters.vector, free.parameters.vector)


def test_two_transitions_make_two_minibatches():
    algorithm, data = learner(epochs=4, minibatches=4)
    lonely = torch.zeros_like(data.valid)
    lonely[0, :2] = 1.0
    assert algorithm.update(replace(data, valid=lonely), 0.0, rng())["loss/gradient_steps"] == 4 * 2


def test_pieces_give_the_gradient_of_the_whole(monkeypatch):
    spec = image_spec(36, 36, 1)
    whole, data = learner(spec, epochs=1, minibatches=2)
    pieces, _ = learner(spec, epochs=1, minibatches=2)
    first = whole.update(data, 0.0, rng())
    monkeypatch.setattr(minibatches, "PIECE_BYTES", {"cpu": 4 * 36 * 36 * 5})
    second = pieces.update(data, 0.0, rng())
    assert first == pytest.approx(second, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(
        whole.parameters.vector.grad, pieces.parameters.vector.grad, rtol=1e-3, atol=1e-5 * first["loss/grad_norm"]
    )


@pytest.mark.parametrize("shards", [2, 3, 40])
def test_a_gradient_shared_by_threads_is_the_whole_one_and_always_the_same(shards, monkeypatch):
    spec = image_spec(36, 36, 1)
    whole, data = learner(spec, epochs=1, minibatches=2)
    first = whole.update(data, 0.0, rng())
    if shards == 2:
        monkeypatch.setattr(minibatches, "PIECE_BYTES", {"cpu": 4 * 36 * 36 * 5})
    vectors = []
    for _ in range(3):
        shared, _ = learner(spec, epochs=1, minibatches=2)
        shared.parameters = FlatParameters(shared.model, shards=shards)
        shared.optimizer = adam(shared.parameters.vector, shared.options.learning_rate, shared.options.adam_eps)
        assert first == pytest.approx(shared.update(data, 0.0, rng()), rel=1e-3, abs=1e-5)
        torch.testing.assert_close(
            whole.parameters.vector.grad, shared.parameters.vector.grad, rtol=1e-3, atol=1e-5 * first["loss/grad_norm"]
        )
        vectors.append(shared.parameters.vector.clone())
    assert torch.equal(vectors[0], vectors[1])
    assert torch.equal(vectors[0], vectors[2])


def test_a_failure_in_a_gradient_thread_is_raised(monkeypatch):
    algorithm, data = learner()
    algorithm.parameters = FlatParameters(algorithm.model, shards=2)
    monkeypatch.setattr(algorithm, "_loss", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        algorithm.update(data, 0.0, rng())


def test_the_update_is_a_function_of_its_arguments():
    vectors = []
    for seed in (1, 1, 2):
        algorithm, data = learner()
        torch.manual_seed(len(vectors))
        state = torch.get_rng_state()
        algorithm.update(data, 0.0, rng(seed))
        assert torch.equal(torch.get_rng_state(), state)
        vectors.append(algorithm.parameters.vector.clone())
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


def test_dealing():
    index, weight = deal(np.array([7, 3, 9, 1, 5]), 2, 4)
    np.testing.assert_array_equal(index, [[7, 3, 9, 7], [1, 5, 1, 5]])
    np.testing.assert_allclose(weight, [[1 / 3, 1 / 3, 1 / 3, 0], [0.5, 0.5, 0, 0]])
    index, weight = deal(np.arange(6), 3, 2)
    np.testing.assert_array_equal(index, [[0, 1], [2, 3], [4, 5]])
    assert (weight == 0.5).all()


def test_schedule():
    assert learning_rate(0.1, "constant", 0.9) == 0.1
    assert [learning_rate(0.1, "linear", p) for p in (0.0, 0.25, 1.0, 1.5)] == [0.1, pytest.approx(0.075), 0.0, 0.0]
