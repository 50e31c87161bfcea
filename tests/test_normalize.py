"""Streaming normalisation: exact statistics, frozen during an interval, and the same for every row and everybody."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recording import record
from rollouts import image_spec, vector_spec
from test_recovery import assert_kills_change_no_bit, left_in_peace
from test_resume import bits, interrupted, no_changes

from htsrl import envs, evaluation
from htsrl.checkpoint import list_checkpoints, load_checkpoint
from htsrl.cli import main
from htsrl.config import NetworkOptions
from htsrl.errors import ConfigError
from htsrl.learner.learner import Learner
from htsrl.learner.moments import EPSILON, Moments
from htsrl.learner.rewards import normalized
from htsrl.models import FlatParameters, build_model
from htsrl.models.normalize import LIMIT, Normalize
from htsrl.settings import configure
from htsrl.training import fork, resume, train

# Pendulum, with truncations in every interval: rows that are no transitions.
SMALL = {
    "num_envs": 4, "sync_interval": 16, "total_steps": 4 * 16 * 5, "max_episode_steps": 7, "minibatches": 4,
    "epochs": 2, "progress": "none",
}  # fmt: skip


def rows_of(rng, size=3, rows=50):
    """Features of very different sizes and places: one far from 0 and hardly moving, one tiny, one constant."""
    x = rng.standard_normal((rows, size)) * [30.0, 1e-3, 0.0][:size] + [5e4, 0.0, 7.0][:size]
    return x.astype(np.float32)


# --------------------------------------------------------------------------------------------------------- statistics


def test_moments_are_those_of_all_rows_however_they_arrive():
    rng = np.random.default_rng(0)
    for seed in range(20):
        batches = [rows_of(rng, rows=int(rows)) for rows in np.random.default_rng(seed).integers(0, 40, 12)]
        moments = Moments.empty(3)
        for batch in batches:
            moments.add(batch)
        every = np.concatenate(batches).astype(np.float64)
        assert moments.count == len(every)
        np.testing.assert_allclose(moments.mean, every.mean(0), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(moments.variance, every.var(0), rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(moments.root_mean_square(), np.sqrt(np.square(every).mean(0)), rtol=1e-12)


def test_normalised_rows_are_centred_and_scaled():
    rng = np.random.default_rng(1)
    rows = np.stack([rng.normal(40.0, 3.0, 1000), rng.normal(-2.0, 0.5, 1000), np.full(1000, 9.0)], 1)
    moments = Moments.empty(3)
    moments.add(rows.astype(np.float32))
    mean, scale = moments.centre_and_scale()
    assert mean.dtype == scale.dtype == np.float32
    out = (rows - mean) * scale
    np.testing.assert_allclose(out.mean(0), 0.0, atol=1e-3)
    np.testing.assert_allclose(out.std(0)[:2], 1.0, rtol=1e-3)
    # A feature that never moves must not be blown up by what rounding leaves of it
    assert np.abs(out[:, 2]).max() < 1e-3
    assert scale[2] == pytest.approx(EPSILON**-0.5)


@pytest.mark.parametrize("count", [0, 1])
def test_before_two_rows_nothing_is_normalised(count):
    moments = Moments.empty(2)
    moments.add(np.full((count, 2), 50.0, np.float32))
    mean, scale = moments.centre_and_scale()
    assert mean.tolist() == [0, 0]
    assert scale.tolist() == [1, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": np.array(-1.0)},
        {"count": np.array(np.nan)},
        {"m2": np.array([1.0, -1.0])},
        {"mean": np.array([np.inf, 0.0])},
        {"mean": np.zeros(3)},
        {"m2": np.zeros(2, np.float32)},
        {"more": np.zeros(2)},
    ],
)
def test_impossible_statistics_are_refused(wrong):
    arrays = {"count": np.array(3.0), "mean": np.zeros(2), "m2": np.ones(2)}
    assert Moments.loaded(arrays, 2).count == 3.0
    with pytest.raises(ValueError, match="statistics"):
        Moments.loaded(arrays | wrong, 2)


def test_rewards_are_divided_by_their_running_size():
    rng = np.random.default_rng(0)
    seen, kept = Moments.empty(1), []
    for _ in range(4):
        reward = (rng.standard_normal((8, 3)) * 20.0 + 5.0).astype(np.float32)
        valid = (rng.random((8, 3)) < 0.8).astype(np.float32)
        reward[valid == 0] = 1e6
        kept += reward[valid != 0].tolist()
        size = np.sqrt(np.mean(np.square(np.array(kept, np.float64))))
        scaled = normalized(reward, valid, 0.9, seen)
        assert scaled.dtype == np.float32
        np.testing.assert_allclose(scaled[valid != 0], 0.1 * np.clip(reward[valid != 0] / size, -10, 10), rtol=1e-5)
    ones = np.ones((8, 3), np.float32)
    np.testing.assert_allclose(normalized(ones, ones, 0.98, Moments.empty(1)), 0.02, rtol=1e-6)
    np.testing.assert_allclose(normalized(ones, ones, 1.0, Moments.empty(1)), 0.001, rtol=1e-6)
    assert (normalized(0 * ones, ones, 0.98, Moments.empty(1)) == 0).all()
    rare = np.zeros((100, 10), np.float32)
    rare[3, 3] = 7.0
    assert normalized(rare, np.ones_like(rare), 0.5, Moments.empty(1)).max() == pytest.approx(5.0)


# -------------------------------------------------------------------------------------------------------- parameters


def test_the_layer():
    layer = Normalize((3,))
    x = torch.tensor([[1.0, -2.0, 100.0]])
    assert layer(x).tolist() == [[1.0, -2.0, LIMIT]]
    layer.mean.copy_(torch.tensor([1.0, 0.0, 99.0]))
    layer.scale.copy_(torch.tensor([1.0, 10.0, 0.5]))
    assert layer(x).tolist() == [[0.0, -LIMIT, 0.5]]


def test_statistics_travel_with_the_parameters_but_are_not_trained():
    spec = vector_spec()
    plain = FlatParameters(build_model(spec, NetworkOptions(), 0))
    assert len(plain) == len(plain.vector)
    model = build_model(spec, NetworkOptions(normalize_obs=True), 0)
    parameters = FlatParameters(model)
    assert len(parameters) == len(plain) + 8
    assert torch.equal(parameters.vector, plain.vector), "the same initial weights as without"
    assert parameters.vector.grad.shape == plain.vector.shape
    names = [name for name, _ in parameters.items()]
    assert names == sorted(names)
    assert {"normalize.mean", "normalize.scale"} == set(names) - {name for name, _ in plain.items()}
    assert "normalize.mean" not in dict(parameters.gradients())

    parameters.state[len(parameters.vector) :] = torch.arange(8.0)
    assert model.normalize.mean.tolist() == [0, 1, 2, 3]
    assert model.normalize.scale.tolist() == [4, 5, 6, 7]
    for give in (lambda other: other.assign(parameters.state), lambda other: other.load(dict(parameters.items()))):
        other_model = build_model(spec, NetworkOptions(normalize_obs=True), 1)
        other = FlatParameters(other_model, gradients=False)
        give(other)
        assert torch.equal(other.state, parameters.state)
        obs = torch.randn(5, 4)
        assert torch.equal(other_model(obs)[0], model(obs)[0])
    with pytest.raises(ValueError, match="don't fit"):
        plain.load(dict(parameters.items()))


def test_images_are_refused():
    with pytest.raises(ConfigError, match=r"normalize_obs is for observations that are vectors.*--no-normalize-obs"):
        build_model(image_spec(84, 84, 4), NetworkOptions(normalize_obs=True), 0)


# -------------------------------------------------------------------------------------------------------- an interval


def storage_of(learner, seed, T=16, N=4):
    """A full storage that the behaviour parameters might have collected, with rows that are no transitions."""
    rng = np.random.default_rng(seed)
    obs = (rng.standard_normal((T + 1, N, 4)) * [1.0, 10.0, 0.1, 1.0] + [0.0, 50.0, 3.0, seed]).astype(np.float32)
    learner.parameters.state.copy_(learner.behaviour)
    with torch.inference_mode():
        params, value = learner.model(torch.from_numpy(obs[:-1].reshape(-1, 4)))
        action = learner.model.head.mode(params)
        log_prob = learner.model.head.log_prob(params, action)
    flags = np.zeros((T, N), bool)
    valid = rng.random((T, N)) < 0.9
    obs[:-1][~valid] = 1e6  # must not be counted
    return SimpleNamespace(
        obs=obs, action=action.reshape(T, N).numpy(), log_prob=log_prob.reshape(T, N).numpy(),
        value=value.reshape(T, N).numpy(), reward=rng.standard_normal((T, N)).astype(np.float32), terminated=flags,
        truncated=flags, valid=valid, behaviour_version=np.array([learner.version - learner.lag]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("algo", "schedule", "delay"),
    [
        *((algo, schedule, "gradient") for algo in ("ppo", "a2c", "impala", "acktr") for schedule in ("hts", "sync")),
        ("ppo", "hts", "importance"),
    ],
)
def test_the_learner_sees_the_statistics_that_collected_a_storage(algo, schedule, delay, monkeypatch):
    """Those of all intervals before, once per version, for bootstrap values and gradients as for all other rows.

    An update that starts at the newest parameters has its gradients of theirs.
    """
    sizes = {"num_envs": 4, "sync_interval": 16, "delay": delay}
    config = configure("CartPole-v1", algo, learner_threads=1, schedule=schedule, normalize_obs=True, **sizes)
    learner = Learner(config, vector_spec(), torch.device("cpu"))
    learner.warm_up()
    seen = []
    update = learner.algorithm.update

    def watched(rollout, progress, rng):
        normalize = learner.model.normalize
        before = (normalize.mean.clone(), normalize.scale.clone())
        start = learner.parameters.state.clone()
        learner.parameters.state.copy_(learner.behaviour)
        meant = torch.cat((rollout.valid, torch.ones(1, 4))) > 0
        with torch.no_grad():
            value = learner.model(rollout.obs.flatten(0, 1))[1].view(17, 4)
        torch.testing.assert_close(rollout.value[meant], value[meant])
        learner.parameters.state.copy_(start)
        metrics = update(rollout, progress, rng)
        assert torch.equal(normalize.mean, before[0]), "constants of the update"
        seen.append(before)
        return metrics

    monkeypatch.setattr(learner.algorithm, "update", watched)
    counted = [Moments.empty(4)]
    for seed in range(4):
        storage = storage_of(learner, seed)
        learner.learn(storage, 0.0)
        counted.append(Moments.empty(4))
        counted[-1].__dict__ |= {name: np.copy(each) for name, each in counted[-2].__dict__.items()}
        counted[-1].add(storage.obs[:-1][storage.valid])
    lag = 1 if (schedule, delay) == ("hts", "gradient") else 0
    for j, (mean, scale) in enumerate(seen):
        wanted = counted[max(j - lag, 0)].centre_and_scale()
        np.testing.assert_array_equal(mean, wanted[0])
        np.testing.assert_array_equal(scale, wanted[1])
    named = learner.named(learner.newest)
    np.testing.assert_array_equal(named["normalize.mean"], counted[-1].centre_and_scale()[0])
    assert np.abs(named["normalize.mean"]).max() < 100, "rows that are no transitions don't count"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("norm") / "run", "Pendulum-v1", "batchppo", **SMALL)


def answers(parameters, obs, mean, scale):
    """Policy parameters and value of a network without normalisation for ``obs``, normalised here."""
    config = configure("Pendulum-v1", "batchppo", normalize_obs=False)
    model = build_model(envs.describe(config.env, config.environment), config.network, 0)
    flat = FlatParameters(model, gradients=False)
    flat.assign(torch.from_numpy(parameters[: len(flat)]))
    normalised = np.clip((obs - mean) * scale, -LIMIT, LIMIT).astype(np.float32)
    with torch.inference_mode():
        return model, *model(torch.from_numpy(normalised))


def test_actors_use_the_statistics_of_all_intervals_but_the_last_two(recorded):
    """Of those that were learned from when the interval began; with any other count the values would differ."""
    moments = [Moments.empty(3)]
    for interval in recorded.intervals:
        moments.append(Moments.loaded(moments[-1].arrays(), 3))
        moments[-1].add(interval["obs"][:-1][interval["valid"]])
    assert not all(interval["valid"].all() for interval in recorded.intervals)
    for j, (parameters, interval) in enumerate(zip(recorded.parameters, recorded.intervals, strict=True)):
        obs = interval["obs"][:-1].reshape(-1, 3)
        for count in range(len(moments)):
            mean, scale = moments[count].centre_and_scale()
            model, policy, value = answers(parameters, obs, mean, scale)
            action = torch.from_numpy(interval["action"].reshape(-1, 1))
            log_prob = model.head.log_prob(policy, action)
            same = torch.allclose(value, torch.from_numpy(interval["value"].ravel()), atol=1e-5)
            same_policy = torch.allclose(log_prob, torch.from_numpy(interval["log_prob"].ravel()), atol=1e-4)
            assert same == same_policy == (count == max(j - 1, 0)), (j, count)
        mean, scale = moments[max(j - 1, 0)].centre_and_scale()
        np.testing.assert_array_equal(parameters[-6:], np.concatenate((mean, scale)))


# ----------------------------------------------------------------------------------------------- the whole run, again


@pytest.mark.usefixtures("quick_children")
def test_layouts_kills_and_seeds(tmp_path, capsys):
    sizes = {name: value for name, value in SMALL.items() if name != "progress"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    assert main(["verify", "--env=Pendulum-v1", "--algo=batchppo", "--layouts=1x1,3x2x1", "--json", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["bits"] for row in rows] == ["reference", "same", "different"]

    chosen = {"env": "Pendulum-v1", "algo": "batchppo", "max_episode_steps": 7}
    expected = left_in_peace(tmp_path / "undisturbed", **chosen)
    assert_kills_change_no_bit(tmp_path / "killed", expected, **chosen)


def test_resumed_evaluated_and_forked(tmp_path):
    """A resumed run is the run; evaluations use the saved statistics; a fork goes on counting."""
    chosen = SMALL | {"env": "Pendulum-v1", "algo": "batchppo", "max_episode_steps": 16, "keep_checkpoints": 100}
    evaluated = {"eval_every": 4 * 16, "eval_episodes": 2}
    train(configure(run_dir=tmp_path / "whole", **chosen, **evaluated))
    run_dir = tmp_path / "stopped"
    interrupted(run_dir, 2, **chosen, **evaluated)
    resume(run_dir, no_changes(num_executors=2))
    assert bits(run_dir) == bits(tmp_path / "whole")
    checkpoint = load_checkpoint(list_checkpoints(run_dir / "checkpoints")[-1])
    moments = Moments.loaded(checkpoint.group("moments"), 3)
    assert moments.count == checkpoint.state["steps"]
    np.testing.assert_array_equal(checkpoint.tensors["parameters/normalize.mean"], moments.centre_and_scale()[0])
    assert not np.array_equal(
        checkpoint.tensors["parameters/normalize.mean"], checkpoint.tensors["behaviour/normalize.mean"]
    )

    # The run's own evaluator played with the statistics of its time, `htsrl eval` does with those of the end
    config = configure(run_dir=run_dir, **chosen)
    spec = envs.describe(config.env, config.environment)

    def played(group):
        model = build_model(spec, config.network, config.seed)
        FlatParameters(model, gradients=False).load(checkpoint.group(group))
        batch = evaluation.evaluation_batch(model, spec)
        results = evaluation.evaluate(batch, spec, config.environment, config.seed, 2, stochastic=False)
        return evaluation.summarise(results, spec)

    last = json.loads((run_dir / "evaluations.jsonl").read_text().splitlines()[-1])
    assert last == {**last, "stochastic": False, **played("behaviour")}
    final = evaluation.evaluate_run(run_dir, 2, stochastic=False)
    assert final == {**final, **played("parameters")}
    assert final["return_mean"] != last["return_mean"]

    forked = fork(run_dir, no_changes(run_dir=tmp_path / "fork", total_steps=64))
    counted = load_checkpoint(list_checkpoints(forked.run_dir / "checkpoints")[-1])
    assert counted.group("moments")["count"] == moments.count + counted.state["steps"]


def test_the_mean_action_is_that_of_normalised_observations():
    config = configure("Pendulum-v1", "batchppo")
    assert config.output.eval_stochastic is False
    spec = envs.describe(config.env, config.environment)
    model = build_model(spec, config.network, 0)
    parameters = FlatParameters(model, gradients=False)
    parameters.state[-6:] = torch.tensor([0.1, -0.2, 1.0, 2.0, 3.0, 0.5])
    batch = evaluation.evaluation_batch(model, spec)
    obs = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    batch.obs[:4] = obs
    batch.noise[:4] = 9.0
    before = batch.answer(4, mode=True).action.copy()
    _, policy, _ = answers(parameters.state.numpy(), obs, np.array([0.1, -0.2, 1.0]), np.array([2.0, 3.0, 0.5]))
    np.testing.assert_allclose(before, policy[:, :1], rtol=1e-4, atol=1e-6)
    # What was recorded at the start must follow statistics that come later
    parameters.state[-6:] = torch.tensor([5.0, 5.0, 5.0, 1.0, 1.0, 1.0])
    assert not np.allclose(batch.answer(4, mode=True).action, before)
    sampled = batch.answer(4).value
    np.testing.assert_allclose(
        sampled, answers(parameters.state.numpy(), obs, np.full(3, 5.0), np.ones(3))[2], rtol=1e-4, atol=1e-6
    )
