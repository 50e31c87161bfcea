"""The delayed update on a quadratic, where the recursion has a closed form."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recording import record
from rollouts import vector_spec
from test_runtime import assert_same_bits, digests

from htsrl.learner import learner as learner_module
from htsrl.learner.delayed import delayed_update
from htsrl.learner.learner import Learner
from htsrl.settings import configure

pytestmark = pytest.mark.usefixtures("quick_children")


def simulate(update, start, intervals):
    """θ_0, θ_1 = θ_0, then θ_{j+1} = θ_j + U(θ_{j-1}) - θ_{j-1}."""
    vector = start.clone()
    thetas = [start, start.clone()]
    for _ in range(intervals):
        thetas.append(delayed_update(thetas[-1], thetas[-2], vector, lambda: update(vector)))
    return torch.stack(thetas)


def test_one_gradient_step_on_a_quadratic_follows_the_papers_recursion():
    # J(θ) = -θ²/2 per coordinate: θ_{j+1} = θ_j - η θ_{j-1}; closed form by the roots of z² - z + η.
    eta = 0.2
    start = torch.tensor([1.0, -3.0])
    thetas = simulate(lambda vector: vector.sub_(eta * vector), start, 30).double().numpy()
    roots = np.roots([1, -1, eta])
    coefficients = np.linalg.solve(np.array([roots**0, roots**1]), np.array([1.0, 1.0]))
    closed = np.array([(coefficients * roots**j).sum().real for j in range(32)])
    np.testing.assert_allclose(thetas, closed[:, None] * start.numpy(), atol=1e-5)
    # Without the delay the first step would already have moved.
    assert (thetas[1] == thetas[0]).all()
    assert not np.allclose(thetas[2], thetas[1])


def test_several_inner_steps_start_at_the_behaviour_parameters():
    seen = []

    def update(vector):
        seen.append(vector.clone())
        for _ in range(3):
            vector.mul_(0.9)

    thetas = simulate(update, torch.ones(4), 5)
    for j, started_at in enumerate(seen):
        assert torch.equal(started_at, thetas[j])
        expected = thetas[j + 1] + (thetas[j] * 0.9 * 0.9 * 0.9 - thetas[j])
        torch.testing.assert_close(thetas[j + 2], expected)


def test_the_newest_parameters_are_not_changed_in_place():
    newest, behaviour, vector = torch.ones(3), torch.zeros(3), torch.full((3,), 9.0)
    after = delayed_update(newest, behaviour, vector, lambda: vector.add_(1.0))
    assert torch.equal(newest, torch.ones(3))
    assert torch.equal(behaviour, torch.zeros(3))
    assert torch.equal(after, torch.full((3,), 2.0))


# ------------------------------------------------------------------------------------- the learner, and its other start


class Descent:
    """One step of gradient descent on -J(θ) = θ²/2; notes what the rollout says and where the step began."""

    def __init__(self, config, model, parameters):
        self.vector = parameters.vector
        self.starts, self.bootstraps = [], []

    def update(self, rollout, progress, rng):
        self.starts.append(self.vector.clone())
        self.bootstraps.append(rollout.value[-1].clone())
        self.vector.sub_(ETA * self.vector)
        return {}


ETA = 0.2


@pytest.fixture
def learned(monkeypatch):
    """θ_0, θ_1, ... of a learner on the quadratic, by --delay, and the algorithm's notes."""
    monkeypatch.setattr(learner_module, "make_algorithm", Descent)

    def learn(delay, intervals=12):
        config = configure("CartPole-v1", delay=delay, num_envs=2, sync_interval=4, minibatches=2)
        learner = Learner(config, vector_spec(), torch.device("cpu"))
        learner.warm_up()
        thetas = [learner.behaviour.clone(), learner.newest.clone()]
        for j in range(intervals):
            storage = SimpleNamespace(
                obs=np.ones((5, 2, 4), np.float32), action=np.zeros((4, 2), np.int64),
                **{name: np.zeros((4, 2), np.float32) for name in ("log_prob", "value", "reward")},
                **{name: np.zeros((4, 2), bool) for name in ("terminated", "truncated", "valid")},
                behaviour_version=np.array([j]),
            )  # fmt: skip
            assert learner.learn(storage, 0.0)["policy_lag"] == 1
            assert torch.equal(learner.behaviour, thetas[-1])
            thetas.append(learner.newest.clone())
        return torch.stack(thetas), learner

    return learn


def test_both_delays_follow_their_recursion_on_a_quadratic(learned):
    gradient, _ = learned("gradient")
    importance, learner = learned("importance")
    start = importance[0]
    assert torch.equal(start, gradient[0])
    # θ_{j+1} = θ_j - η θ_{j-1} by the roots of z² - z + η, and θ_{j+1} = (1 - η) θ_j; θ_1 = θ_0 in both.
    roots = np.roots([1, -1, ETA])
    coefficients = np.linalg.solve(np.array([roots**0, roots**1]), np.array([1.0, 1.0]))
    delayed = torch.tensor([(coefficients * roots**j).sum().real for j in range(len(gradient))])
    plain = torch.tensor([1.0] + [(1 - ETA) ** j for j in range(len(importance) - 1)])
    torch.testing.assert_close(gradient, (delayed[:, None] * start).float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(importance, plain[:, None] * start, rtol=0, atol=1e-5)
    # Each step began at the newest parameters, but the row that bootstraps is valued by those that acted.
    assert torch.equal(torch.stack(learner.algorithm.starts), importance[1:-1])
    for theta, value in zip(importance, learner.algorithm.bootstraps):
        learner.parameters.vector.copy_(theta)
        with torch.no_grad():
            torch.testing.assert_close(learner.model(torch.ones(2, 4))[1], value)


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_importance_gives_the_same_bits_in_any_layout_and_others_than_gradient(tmp_path, algo):
    small = {"num_envs": 4, "sync_interval": 16, "total_steps": 4 * 16 * 4}
    small |= {"minibatches": 2, "epochs": 2} if algo == "ppo" else {}
    one = record(tmp_path / "1", "CartPole-v1", algo, delay="importance", num_executors=1, envs_per_group=4, **small)
    other = record(
        tmp_path / "2", "CartPole-v1", algo, delay="importance",
        num_executors=3, num_actors=2, envs_per_group=1, **small,
    )  # fmt: skip
    assert_same_bits(one, other)
    assert [each["policy_lag"] for each in one.metrics] == [1] * 4
    gradient = record(tmp_path / "gradient", "CartPole-v1", algo, **small)
    # The first update starts where both are one, and so does what is collected meanwhile; then they part.
    assert np.array_equal(one.parameters[1], gradient.parameters[1])
    assert digests(one)[1] != digests(gradient)[1]
    if algo == "ppo":
        # Its ratio starts at 1 only where the newest parameters are those that acted
        assert one.metrics[0]["loss/kl"] == gradient.metrics[0]["loss/kl"]
        assert one.metrics[2]["loss/kl"] > gradient.metrics[2]["loss/kl"]
