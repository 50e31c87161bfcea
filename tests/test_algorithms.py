"""What every algorithm promises alike: all settings matter, its state is all it keeps, transitions alone teach it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rollouts import BOX, image_spec, network, rollout, vector_spec

from htsrl.config import ALGORITHMS, Config, GymnasiumOptions
from htsrl.errors import NonFinite
from htsrl.learner import A2C, ACKTR, IMPALA, PPO, make_algorithm

CLASSES = {"ppo": PPO, "batchppo": PPO, "a2c": A2C, "impala": IMPALA, "acktr": ACKTR}
WARM = {"cold_updates": 0, "momentum": 0.0, "lr_schedule": "constant"}


def draws(seed=0):
    return np.random.default_rng(seed)


def learner(algo, spec=None, seed=0, **options):
    """An algorithm and a rollout; IMPALA's was collected by another policy than the one that learns."""
    spec = spec or vector_spec()
    model, parameters = network(spec, seed)
    data = rollout(spec, model)
    if algo == "impala":  # ratios on both sides of every threshold
        noise = draws(5).normal(0.0, 1.0, data.log_prob.shape).astype(np.float32)
        data = replace(data, log_prob=data.log_prob + torch.from_numpy(noise))
    kind = ALGORITHMS[algo]
    sections = {"algorithm": kind(**options), "environment": GymnasiumOptions()}
    config = Config[GymnasiumOptions, kind](algo=algo, env="CartPole-v1", **sections)
    return make_algorithm(config, model, parameters), data


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_make_algorithm():
    assert CLASSES.keys() == ALGORITHMS.keys()
    for algo, wanted in CLASSES.items():
        algorithm, _ = learner(algo, discount=0.5)
        assert type(algorithm) is wanted
        assert type(algorithm.options) is ALGORITHMS[algo]
        assert algorithm.options.discount == 0.5
    for algo in ("a2c", "impala"):
        for name, optimizer in (("rmsprop", torch.optim.RMSprop), ("adam", torch.optim.Adam)):
            assert type(learner(algo, optimizer=name)[0].optimizer) is optimizer


# ----------------------------------------------------------------------------------------------------------- settings

OF_ALL = [
    {"learning_rate": 1e-3},
    {"lr_schedule": "constant"},
    {"discount": 0.5},
    {"gae_lambda": 0.5},
    {"entropy_coef": 0.3},
    {"value_coef": 0.1},
    {"max_grad_norm": 0.001},
]
OF_OPTIMIZER = [{"optimizer": "adam"}, {"rmsprop_decay": 0.5}, {"optimizer_eps": 0.1}]
# The last of several is the one whose effect is looked for
CHANGES = {
    "ppo": [
        *OF_ALL,
        {"epochs": 5},
        {"minibatches": 8},
        {"clip_range": 0.001},
        {"clip_value": 0.001},
        {"normalize_advantage": False},
        {"target_kl": 1e-9},
        {"adam_eps": 0.1},
        {"batched_by": "episodes"},
        {"normalize_reward": True},
        {"kl_penalty": 10.0},
        {"kl_penalty": 0.1, "kl_penalty_target": 1e-5},
        {"kl_penalty": 0.1, "kl_cutoff": 1e-5},
        {"kl_penalty": 0.1, "kl_cutoff": 1e-5, "kl_cutoff_coef": 3.0},
    ],
    "a2c": [*OF_ALL, *OF_OPTIMIZER, {"normalize_advantage": True}],
    "impala": [*OF_ALL, *OF_OPTIMIZER, {"rho_clip": 0.5}, {"c_clip": 0.5}, {"minibatches": 2}],
    "acktr": [
        *OF_ALL,
        {"normalize_advantage": True},
        {"kl_clip": 1e-5},
        {"momentum": 0.9},
        {"damping": 1.0},
        {"factor_decay": 0.1},
        {"kfac_interval": 2},
        {"cold_updates": 2},
        {"cold_learning_rate": 0.1},
    ],
}
# Of ACKTR, what settings do shows after a few updates of both kinds
BEGINNING = {"acktr": {"cold_updates": 1, "kfac_interval": 1, "kl_clip": 0.1}}
UPDATES = {"acktr": 4}


def named(change):
    return next(reversed(change))


@pytest.mark.parametrize("algo", CHANGES)
def test_no_setting_is_left_out(algo):
    assert {named(change) for change in CHANGES[algo]} == ALGORITHMS[algo].model_fields.keys()
    assert ALGORITHMS["batchppo"].model_fields.keys() == ALGORITHMS["ppo"].model_fields.keys()


@pytest.mark.parametrize(
    ("algo", "change"),
    [pytest.param(algo, change, id=f"{algo}-{named(change)}") for algo in CHANGES for change in CHANGES[algo]],
)
def test_every_setting_has_an_effect(algo, change):
    without = BEGINNING.get(algo, {}) | {name: value for name, value in change.items() if name != named(change)}
    default, data = learner(algo, **without)
    changed, _ = learner(algo, **without | change)
    for k in range(UPDATES.get(algo, 1)):
        default.update(data, 0.5, draws(k))
        changed.update(data, 0.5, draws(k))
    assert not torch.equal(default.parameters.vector, changed.parameters.vector)


# -------------------------------------------------------------------------------------------------------------- state

KFAC = {"cold_updates": 1, "kfac_interval": 2}


@pytest.mark.parametrize(
    ("algo", "spec", "options", "before"),
    [
        ("ppo", vector_spec(), {}, 1),
        ("ppo", vector_spec(), {}, 0),
        ("batchppo", vector_spec(), {"learning_rate": 3e-3, "epochs": 5}, 1),
        ("batchppo", vector_spec(), {"learning_rate": 3e-3, "epochs": 5}, 0),
        *(
            (algo, vector_spec(), {"optimizer": optimizer}, before)
            for algo in ("a2c", "impala")
            for optimizer in ("rmsprop", "adam")
            for before in (0, 1)
        ),
        # From among the cold updates and from between two decompositions
        *(("acktr", spec, KFAC, before) for spec in (vector_spec(BOX), image_spec(36, 36, 1)) for before in range(4)),
    ],
    ids=lambda value: value.observation_kind if hasattr(value, "observation_kind") else None,
)
def test_a_state_continues_bit_for_bit(algo, spec, options, before):
    straight, data = learner(algo, spec, **options)
    for k in range(before):
        straight.update(data, 0.1, draws(k))
    saved, vector = straight.state(), straight.parameters.vector.clone()
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    resumed, _ = learner(algo, spec, seed=9, **options)
    resumed.update(replace(data, reward=-data.reward), 0.0, draws(9))  # what it holds must be forgotten
    forgetful, _ = learner(algo, spec, seed=9, **options)
    for each in (resumed, forgetful):
        each.parameters.vector.copy_(vector)
    resumed.load_state(saved)

    later = replace(data, reward=3.0 * data.reward)
    for k in range(before, before + 3):
        for each in (straight, resumed, forgetful):
            each.update(later, 0.5, draws(k))
    assert torch.equal(resumed.parameters.vector, straight.parameters.vector)
    assert_same_state(resumed.state(), straight.state())
    assert torch.equal(forgetful.parameters.vector, straight.parameters.vector) == (before == 0)
    assert_same_state(saved, kept)  # it is a copy: later steps don't change it


# -------------------------------------------------------------------------------------------------------- transitions


@pytest.mark.parametrize(
    ("algo", "options"),
    [
        ("ppo", {}),
        ("batchppo", {"minibatches": 2, "batched_by": "steps"}),
        ("batchppo", {"minibatches": 2, "batched_by": "episodes"}),
        ("a2c", {}),
        ("acktr", WARM),
    ],
)
def test_rows_that_are_no_transitions_change_nothing(algo, options):
    """IMPALA needs the observations of such rows, see its own tests."""
    one, data = learner(algo, **options)
    other, _ = learner(algo, **options)
    hole = data.valid == 0
    assert hole.any()
    metrics = one.update(data, 0.0, draws())
    for field in ("obs", "log_prob", "reward"):
        getattr(data, field)[: len(hole)][hole] = float("nan")
    data.action[hole] = -7
    data.terminated[hole] = data.truncated[hole] = 1.0
    assert other.update(data, 0.0, draws()) == metrics
    assert torch.equal(one.parameters.vector, other.parameters.vector)
    assert_same_state(one.state(), other.state())


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_rollout_without_transitions_teaches_nothing(algo):
    algorithm, data = learner(algo)
    before, state = algorithm.parameters.vector.clone(), algorithm.state()
    metrics = algorithm.update(replace(data, valid=torch.zeros_like(data.valid)), 0.0, draws())
    assert metrics["loss/gradient_steps"] == metrics["loss/explained_variance"] == 0
    assert torch.equal(algorithm.parameters.vector, before)
    assert_same_state(algorithm.state(), state)


ONE_STEP = {"ppo": {"epochs": 2, "minibatches": 1}, "acktr": WARM}
POISON = {
    "ppo": ("reward", "value", "obs", "log_prob"),
    "a2c": ("reward", "value", "obs"),
    "impala": ("reward", "log_prob", "obs"),
    "acktr": ("reward", "value", "obs"),
}


@pytest.mark.parametrize(("algo", "field"), [(algo, field) for algo, fields in POISON.items() for field in fields])
def test_what_is_not_finite_stops_before_anything_changes(algo, field):
    for bad in (float("nan"), *([float("inf")] if field in ("reward", "value") else [])):
        algorithm, data = learner(algo, **ONE_STEP.get(algo, {}))
        algorithm.update(data, 0.0, draws())
        data.valid[2, 1] = 1.0
        getattr(data, field)[2, 1] = bad
        before, state = algorithm.parameters.vector.clone(), algorithm.state()
        with pytest.raises(NonFinite, match="not finite in epoch 0, minibatch 0 of the update"):
            algorithm.update(data, 0.25, draws())
        assert torch.equal(algorithm.parameters.vector, before)
        assert_same_state(algorithm.state(), state)
