"""BatchPPO: exact divergences, the adaptive penalty, updates by episodes; each against a slow oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rollouts import BOX, network, rollout, vector_spec
from test_heads import ACTIONS, KINDS, parameters, reference
from test_ppo import rng
from torch import distributions

from htsrl.config import LOG_STD_RANGE, BatchPPOOptions, PPOOptions
from htsrl.learner import returns
from htsrl.learner.kl import RANGE, adapted, kl_penalty
from htsrl.learner.minibatches import deal, per_episode
from htsrl.learner.moments import Moments
from htsrl.learner.ppo import PPO
from htsrl.learner.rewards import normalized
from htsrl.models import make_head
from htsrl.models.heads import DiagonalGaussian
from htsrl.settings import configure


def learner(spec=None, **options):
    spec = spec or vector_spec()
    model, flat = network(spec)
    return PPO(BatchPPOOptions(**options), model, flat), rollout(spec, model)


# --------------------------------------------------------------------------------------------------------- divergence


@pytest.mark.parametrize("action", ACTIONS, ids=KINDS)
def test_divergences_are_pytorchs(action):
    head = make_head(action)
    before, params = parameters(head, seed=1), parameters(head, seed=2).requires_grad_()
    pairs = zip(reference(action, before), reference(action, params), strict=True)
    wanted = sum(distributions.kl_divergence(one, other) for one, other in pairs)
    got = head.kl(before, params)
    torch.testing.assert_close(got, wanted)
    (gradient,) = torch.autograd.grad(got.sum(), params)
    (expected,) = torch.autograd.grad(wanted.sum(), params)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.kl(before, before), torch.zeros(len(before)), atol=1e-6, rtol=0)


SQUASHED = DiagonalGaussian(2, state_dependent=True, squashed=True)


@pytest.mark.parametrize("head", [*map(make_head, ACTIONS), SQUASHED], ids=[*KINDS, "squashed"])
def test_divergences_are_means_of_log_ratios(head):
    """The definition: E over the policy before of log before - log after."""
    before, params = parameters(head, 1, seed=3), parameters(head, 1, seed=4)
    rows = 200_000
    draws = np.random.default_rng(0)
    draw = draws.gumbel if head.noise_kind == "gumbel" else draws.normal
    noise = torch.from_numpy(draw(size=(rows, head.noise_size)).astype(np.float32))
    chosen = head.sample(before.expand(rows, -1), noise)
    ratio = head.log_prob(before.expand(rows, -1), chosen) - head.log_prob(params.expand(rows, -1), chosen)
    assert float(ratio.mean()) == pytest.approx(float(head.kl(before, params)), rel=0.03)


def test_deviations_of_the_network_count_as_the_head_clamps_them():
    wild = torch.tensor([[0.5, -0.5, -99.0, 99.0]])
    tame = torch.tensor([[0.5, -0.5, *LOG_STD_RANGE]])
    assert float(SQUASHED.kl(wild, tame)) == 0.0
    assert float(SQUASHED.kl(tame, tame + 0.5 * (tame == 0.5))) > 0.0


def test_a_small_divergence_is_not_lost_to_rounding():
    head = make_head(BOX)
    before = torch.tensor([[0.5, -0.5, -1.0, 0.5]])
    params = before + torch.tensor([[0.0, 0.0, 1e-3, -1e-3]])
    exact = distributions.kl_divergence(reference(BOX, before.double())[0], reference(BOX, params.double())[0])
    assert float(head.kl(before, params)) == pytest.approx(float(exact), rel=0.1)


# ------------------------------------------------------------------------------------------------------------ penalty


def test_penalty_is_linear_and_beyond_the_cutoff_quadratic():
    generator = torch.Generator().manual_seed(0)
    for scale in (0.001, 0.019, 0.021, 0.3):
        kl = torch.rand(12, generator=generator) * 2 * scale
        weight = torch.rand(12, generator=generator)
        weight[3] = 0.0
        weight /= weight.sum()
        mean = sum(float(w) * float(x) for w, x in zip(weight, kl, strict=True))
        wanted = 1.7 * mean + (1000.0 * (mean - 0.02) ** 2 if mean > 0.02 else 0.0)
        assert float(kl_penalty(kl, weight, 1.7, 0.02, 1000.0)) == pytest.approx(wanted, rel=1e-4)
    # A few states that change much are no reason where the mean is small
    kl = torch.full((100,), 0.005)
    kl[0] = 0.5
    even = torch.full((100,), 0.01)
    assert float(kl_penalty(kl, even, 1.0, 0.02, 1000.0)) == pytest.approx(float(kl.mean()), rel=1e-5)


def test_pieces_of_a_minibatch_add_up():
    kl, weight = torch.full((12,), 0.05), torch.full((12,), 1 / 12)
    whole = kl_penalty(kl, weight, 2.0, 0.02, 1000.0)
    pieces = [kl_penalty(a, b, 2.0, 0.02, 1000.0) for a, b in zip(kl.split(5), weight.split(5), strict=True)]
    torch.testing.assert_close(sum(pieces), whole)
    fillers = kl_penalty(kl.requires_grad_(), torch.zeros(12), 2.0, 0.02, 1000.0)
    (gradient,) = torch.autograd.grad(fillers, kl)
    assert float(fillers.detach()) == 0.0
    assert (gradient == 0).all(), "a piece of fillers alone is no division by 0"


def test_the_coefficient_follows_the_divergence_and_never_gets_stuck():
    assert adapted(2.0, 0.0131, 0.01, 1.0) == 3.0
    assert adapted(2.0, 0.0129, 0.01, 1.0) == 2.0
    assert adapted(2.0, 0.0071, 0.01, 1.0) == 2.0
    assert adapted(3.0, 0.0069, 0.01, 1.0) == 2.0
    coefficient = 1.0
    for _ in range(10_000):
        coefficient = adapted(coefficient, 0.0, 0.01, 1.0)
    assert coefficient == 1.0 / RANGE
    for _ in range(18):
        coefficient = adapted(coefficient, 1.0, 0.01, 1.0)
    assert coefficient >= 1.0, "and comes back within a few updates"
    for _ in range(10_000):
        coefficient = adapted(coefficient, 1.0, 0.01, 1.0)
    assert coefficient == RANGE


# ------------------------------------------------------------------------------------------------------------- update


def oracle_update(algorithm, action_spec, model, data, draws, penalty):
    """BatchPPO the plain way: torch's distributions, lists of parameters, no pieces; returns KL(before ‖ after)."""
    options = algorithm.options
    steps, replicas = data.reward.shape
    valid = data.valid.bool()
    size = float(data.reward[valid].double().square().mean().sqrt())
    reward = (data.reward / size).clamp(-10, 10) * (1 - options.discount)
    advantage = torch.zeros(steps, replicas)
    length = torch.zeros(steps, replicas)
    for n in range(replicas):
        carried = 0.0
        for t in reversed(range(steps)):
            alive = 1 - data.terminated[t, n]
            delta = reward[t, n] + options.discount * alive * data.value[t + 1, n] - data.value[t, n]
            carry = options.discount * options.gae_lambda * alive * (1 - data.truncated[t, n])
            carried = delta + carry * carried if valid[t, n] else 0.0
            advantage[t, n] = carried
        episode, t = [], 0
        for t in range(steps):
            if valid[t, n]:
                episode.append(t)
            if episode and (t == steps - 1 or data.terminated[t, n] or data.truncated[t, n]):
                length[episode, n] = len(episode)
                episode = []
    target = (advantage + data.value[:-1]).flatten()
    obs, action, old = data.obs[:-1].flatten(0, 1), data.action.flatten(0, 1), data.log_prob.flatten()
    advantage, length = advantage.flatten(), length.flatten()
    with torch.no_grad():
        before = model(obs)[0]

    def divergence(index, params):
        pairs = zip(reference(action_spec, before[index]), reference(action_spec, params), strict=True)
        return sum(distributions.kl_divergence(one, other) for one, other in pairs)

    learned = list(model.parameters())
    optimizer = torch.optim.Adam(learned, lr=options.learning_rate, eps=options.adam_eps)
    rows = np.flatnonzero(valid.numpy())
    for _ in range(options.epochs):
        for part in np.array_split(draws.permutation(rows), options.minibatches):
            index = torch.from_numpy(part)
            weight = 1 / length[index] if options.batched_by == "episodes" else torch.ones(len(index))
            weight /= weight.sum()
            params, value = model(obs[index])
            a = advantage[index]
            mean = (weight * a).sum()
            a = (a - mean) / ((weight * (a - mean) ** 2).sum().sqrt() + 1e-8)
            ratio = (model.head.log_prob(params, action[index]) - old[index]).exp()
            kl = (weight * divergence(index, params)).sum()
            loss = -(weight * ratio * a).sum() + penalty * kl
            cutoff = options.kl_cutoff * options.kl_penalty_target
            if kl > cutoff:
                loss = loss + options.kl_cutoff_coef * (kl - cutoff) ** 2
            loss = loss + options.value_coef * 0.5 * (weight * (value - target[index]) ** 2).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learned, options.max_grad_norm)
            optimizer.step()
    with torch.no_grad():
        index = torch.from_numpy(rows)
        return float(divergence(index, model(obs[index])[0]).mean())


@pytest.mark.parametrize("batched_by", ["steps", "episodes"])
@pytest.mark.parametrize("action", ACTIONS, ids=KINDS)
def test_update_is_the_plain_one(action, batched_by):
    options = {"learning_rate": 3e-3, "epochs": 4, "minibatches": 2, "kl_penalty": 2.0, "batched_by": batched_by}
    algorithm, data = learner(vector_spec(action), kl_penalty_target=1e-3, **options)
    assert (data.valid == 0).any()
    plain, _ = network(vector_spec(action))
    moved = oracle_update(algorithm, action, plain, data, rng(), 2.0)
    metrics = algorithm.update(data, 0.25, rng())
    assert metrics["loss/kl_update"] == pytest.approx(moved, rel=1e-2)
    assert moved > 2e-3, "far enough for the quadratic term to matter"
    assert metrics["loss/kl_penalty"] == 2.0
    assert algorithm.penalty == 3.0
    assert metrics["loss/clip_fraction"] == 0.0
    for (name, got), wanted in zip(algorithm.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=3e-5, msg=name)


def test_the_penalty_holds_the_policy():
    moved = {}
    for penalty in (1e-3, 1.0, 100.0):
        algorithm, data = learner(kl_penalty=penalty, kl_cutoff_coef=0.0, learning_rate=3e-3)
        moved[penalty] = algorithm.update(data, 0.0, rng())["loss/kl_update"]
    assert moved[1e-3] > moved[1.0] > moved[100.0]
    free, data = learner(kl_penalty=1e-3, kl_cutoff_coef=0.0, learning_rate=3e-2)
    held, _ = learner(kl_penalty=1e-3, learning_rate=3e-2)
    assert held.update(data, 0.0, rng())["loss/kl_update"] < 0.5 * free.update(data, 0.0, rng())["loss/kl_update"]


def test_the_weight_of_the_penalty_and_the_size_of_rewards_are_part_of_the_state():
    first, data = learner(learning_rate=3e-3)
    first.update(data, 0.0, rng(1))
    saved, vector = first.state(), first.parameters.vector.clone()
    assert saved.keys() == {"step", "exp_avg", "exp_avg_sq", "kl_penalty", "reward/count", "reward/mean", "reward/m2"}
    assert float(saved["kl_penalty"]) == first.penalty != 1.0
    vectors = []
    for change in ({}, {"kl_penalty": torch.tensor(1.0, dtype=torch.float64)}, {"reward/m2": 9 * saved["reward/m2"]}):
        other, _ = learner(learning_rate=3e-3)
        other.parameters.vector.copy_(vector)
        other.load_state(saved | change)
        other.update(data, 0.5, rng(2))
        vectors.append(other.parameters.vector)
    assert not torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


@pytest.mark.parametrize(
    "wrong",
    [
        {"kl_penalty": torch.tensor(0.0, dtype=torch.float64)},
        {"kl_penalty": torch.tensor(float("nan"), dtype=torch.float64)},
        {"kl_penalty": torch.tensor(1.0)},
        {"reward/count": torch.tensor(-1.0, dtype=torch.float64)},
        {"reward/mean": torch.zeros(2, dtype=torch.float64)},
        {"step": torch.zeros(3)},
    ],
)
def test_a_state_of_something_else_is_refused(wrong):
    algorithm, data = learner()
    algorithm.update(data, 0.0, rng())
    state = algorithm.state()
    algorithm.load_state(state)
    with pytest.raises(ValueError, match=r"this is no|statistics"):
        algorithm.load_state(state | wrong)
    with pytest.raises(ValueError, match="this is no"):
        algorithm.load_state({name: tensor for name, tensor in state.items() if name != "kl_penalty"})


# ----------------------------------------------------------------------------------------------------------- episodes


def test_rows_of_episodes():
    flags = np.zeros((3, 6, 1), np.float32)
    terminated, truncated, valid = flags
    valid[:] = 1
    terminated[1] = 1
    truncated[3] = 1
    valid[4] = 0
    assert returns.episode_rows(terminated, truncated, valid)[:, 0].tolist() == [2, 2, 2, 2, 1, 1]
    generator = np.random.default_rng(0)
    for _ in range(50):
        terminated, truncated = (generator.random((2, 9, 3)) < 0.2).astype(np.float32)
        valid = np.ones((9, 3), np.float32)
        for t in range(1, 9):
            valid[t] = 1 - truncated[t - 1] * valid[t - 1] * (1 - terminated[t - 1])
        got = returns.episode_rows(terminated, truncated, valid)
        for n in range(3):
            part = 0
            parts = np.zeros(9, int)
            for t in range(9):
                parts[t] = part
                part += bool(valid[t, n] and (terminated[t, n] or truncated[t, n]))
            for t in range(9):
                if valid[t, n]:
                    assert got[t, n] == sum(valid[s, n] for s in range(9) if parts[s] == parts[t])


def test_every_episode_weighs_the_same():
    rows = np.array([4.0, 4.0, 4.0, 4.0, 1.0, 2.0, 2.0], np.float32)
    index, weight = deal(np.arange(7), 1, 9)
    shared = per_episode(index, weight, rows)[0]
    assert shared.dtype == np.float32
    np.testing.assert_allclose(shared[:7], [1 / 12, 1 / 12, 1 / 12, 1 / 12, 1 / 3, 1 / 6, 1 / 6], rtol=1e-6)
    assert (shared[7:] == 0).all()


# ------------------------------------------------------------------------------------------------------------ presets


def test_the_defaults_are_the_published_ones():
    options = BatchPPOOptions()
    assert (options.learning_rate, options.lr_schedule, options.discount, options.epochs) == (
        1e-4,
        "constant",
        0.995,
        25,
    )
    assert (options.kl_penalty, options.kl_penalty_target, options.kl_cutoff) == (1.0, 0.01, 2.0)
    assert (options.kl_cutoff_coef, options.clip_range, options.normalize_reward) == (1000.0, None, True)
    ours = PPOOptions()
    assert (ours.kl_penalty, ours.normalize_reward, ours.batched_by, ours.clip_range) == (None, False, "steps", 0.2)


@pytest.mark.parametrize(
    "env", ["Pendulum-v1", "HalfCheetah-v5", "Walker2d-v5", "Hopper-v5", "Humanoid-v5", "CartPole-v1"]
)
def test_presets(env):
    config = configure(env, "batchppo")
    assert config.network.normalize_obs
    assert config.network.hidden_sizes == (200, 100)
    assert config.algorithm.kl_penalty == 1.0
    assert config.algorithm.normalize_reward
    assert not config.output.eval_stochastic, "evaluation is by the mean action"
    assert not configure(env, "ppo").network.normalize_obs


def test_rewards_are_normalised_before_anything_is_made_of_them():
    """Scaling all rewards changes no bit of the first update but what rounding does."""
    one, data = learner()
    other, _ = learner()
    first, second = one.update(data, 0.0, rng()), other.update(replace(data, reward=1000.0 * data.reward), 0.0, rng())
    assert first == pytest.approx(second, rel=1e-2, abs=1e-5)
    assert float(other.state()["reward/m2"]) == pytest.approx(1e6 * float(one.state()["reward/m2"]), rel=1e-5)
    seen = Moments.empty(1)
    normalized(data.reward.numpy(), data.valid.numpy(), 0.995, seen)
    assert float(one.state()["reward/mean"]) == seen.mean
