"""What an environment returns is looked at before it is stored: refused with a name, or stored as it was meant."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from faulty_envs import Steady
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from recording import record
from rollouts import BOX, DISCRETE, network, vector_spec

from htsrl import envs
from htsrl.actors.executor import Replica, place_of, step_group
from htsrl.actors.inference import InferenceBatch
from htsrl.actors.reports import EnvironmentFault
from htsrl.config import GymnasiumOptions
from htsrl.envs import checks
from htsrl.envs.spaces import encode_observations
from htsrl.envs.synthetic import Counting
from htsrl.errors import ConfigError, EnvironmentFailed, RunFailed
from htsrl.evaluation import evaluate, evaluation_batch
from htsrl.models import build_model
from htsrl.rng import episode_seed
from htsrl.settings import configure

GOOD = np.array([1.5, -2.0, 3.0, 4.0], np.float32)
SPEC = replace(vector_spec(), env_id="faulty_envs:Steady-v0")
PICTURES = replace(SPEC, observation_shape=(2, 2, 1), observation_dtype=np.dtype(np.uint8), observation_kind="image")


class Says:
    """An environment that returns what it is told to."""

    def __init__(self, *outcome, reset=GOOD):
        self.outcome, self.first = outcome, reset

    def step(self, action):
        return self.outcome if len(self.outcome) != 1 else self.outcome[0]

    def reset(self, seed):
        return self.first


def replica(env, spec=SPEC):
    made = Replica.__new__(Replica)
    made.column, made.seed, made.spec, made.env = 0, 0, spec, env
    made.limit, made.episode, made.steps, made.reward, made.reset_pending = 100, 0, 7, 0.0, False
    return made


def stepped(*outcome, spec=SPEC, **env):
    """The storage row after one step."""
    rows = SimpleNamespace(
        obs=np.zeros((2, 1, *spec.observation_shape), spec.observation_dtype),
        action=np.zeros((1, 1), np.int64),
        reward=np.full((1, 1), np.nan, np.float32),
        **{name: np.zeros((1, 1), bool) for name in ("terminated", "truncated", "valid")},
        **{name: np.zeros((1, 1)) for name in ("episode_return", "episode_length", "episode_score")},
    )
    made = replica(Says(*outcome, **env), spec)
    step_group(rows, 0, [made], lambda actions: actions.tolist())
    return rows, made


# ------------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ((GOOD[:1], 1.0, False, False, {}), r"shape \(1,\), but its space says \(4,\)"),
        ((GOOD[None], 1.0, False, False, {}), r"shape \(1, 4\)"),
        ((None, 1.0, False, False, {}), r"shape \(\)"),
        ((GOOD.astype(complex), 1.0, False, False, {}), "observation of complex128"),
        ((GOOD.astype(str), 1.0, False, False, {}), "observation of <U"),
        ((GOOD.astype(object), 1.0, False, False, {}), "observation of object"),
        ((GOOD, np.nan, False, False, {}), "reward of nan"),
        ((GOOD, -np.inf, False, False, {}), "reward of -inf"),
        ((GOOD, 1e39, False, False, {}), "finite in float32"),
        ((GOOD, np.float32(np.inf), False, False, {}), "reward of inf"),
        ((GOOD, None, False, False, {}), r"None \(NoneType\) as reward, which must be one number"),
        ((GOOD, "1.0", False, False, {}), r"'1.0' \(str\) as reward"),
        ((GOOD, 1j, False, False, {}), "as reward"),
        ((GOOD, np.array([1.0]), False, False, {}), r"array\(\[1.\]\) \(ndarray\) as reward"),
        ((GOOD, 1.0, None, False, {}), r"None \(NoneType\) as terminated, which must be True or False"),
        ((GOOD, 1.0, "False", False, {}), "as terminated"),
        ((GOOD, 1.0, 2, False, {}), r"2 \(int\) as terminated"),
        ((GOOD, False, 1.0, False, {}), r"1.0 \(float\) as terminated"),
        ((GOOD, 1.0, np.array([False]), False, {}), "as terminated"),
        ((GOOD, 1.0, False, {}, False), r"\{\} \(dict\) as truncated"),
        ((GOOD, 1.0, False, {}), "not enough values to unpack"),
        ((None,), "cannot unpack"),
    ],
)
def test_nonsense_is_named_with_its_place(outcome, words):
    with pytest.raises(EnvironmentFault) as fault:
        stepped(*outcome)
    assert fault.value.context == fault.value.context | {"phase": "step", "replica": 0, "episode": 0, "step": 7}
    with pytest.raises(type(fault.value.__cause__), match=words):
        raise fault.value.__cause__


@pytest.mark.parametrize(
    "picture", [np.full((2, 2, 1), 256), np.full((2, 2, 1), 0.5), np.full((2, 2, 1), -1, np.int8)], ids=str
)
def test_a_picture_of_another_type_is_not_cast(picture):
    assert picture.astype(np.uint8)[0, 0, 0] in (0, 255)  # what a cast would make of it
    with pytest.raises(EnvironmentFault) as fault:
        stepped(picture, 1.0, False, False, {}, spec=PICTURES)
    assert "can't be stored as uint8 without loss" in str(fault.value.__cause__)


@pytest.mark.parametrize("first", [None, GOOD[:2], GOOD.astype(str), (GOOD, {})])
def test_a_nonsensical_first_observation_is_named(first):
    with pytest.raises(EnvironmentFault) as fault:
        stepped(GOOD, 1.0, True, False, {}, reset=first)
    assert fault.value.context == fault.value.context | {"phase": "reset", "episode": 1}


def test_what_a_spec_promises_of_info_is_demanded():
    raw = replace(SPEC, has_raw_reward=True)
    for info in ({}, None, {"raw_reward": None}):
        with pytest.raises(EnvironmentFault):
            stepped(GOOD, 1.0, False, False, info, spec=raw)
    _, made = stepped(GOOD, 1.0, False, False, {"raw_reward": np.float32(5.0)}, spec=raw)
    assert made.reward == 5.0
    with pytest.raises(EnvironmentFault) as fault:
        stepped(GOOD, 1.0, False, False, {}, spec=replace(SPEC, has_life_loss=True))
    assert isinstance(fault.value.__cause__, KeyError)


# ----------------------------------------------------------------------------------------------------------- accepted


@pytest.mark.parametrize("obs", [GOOD.astype(np.float64), GOOD.tolist(), GOOD.astype(np.float16), GOOD.astype(int)])
def test_observations_of_other_real_types_are_stored(obs):
    rows, _ = stepped(obs, 1.0, False, False, {})
    np.testing.assert_array_equal(rows.obs[1, 0], np.asarray(obs, np.float32))


@pytest.mark.parametrize("reward", [3, 3.0, np.float32(3), np.float64(3), np.int64(3), np.array(3.0), np.array(3)])
def test_rewards_of_other_number_types_are_stored(reward):
    rows, made = stepped(GOOD, reward, False, False, {})
    assert rows.reward[0, 0] == 3.0
    assert isinstance(made.reward, float)


def test_returns_are_added_up_in_double_precision():
    made = replica(Says(GOOD, np.float32(0.1), False, False, {}))
    rows = stepped(GOOD, 1.0, False, False, {})[0]
    for _ in range(1000):
        made.steps = 0
        step_group(rows, 0, [made], lambda actions: actions.tolist())
    assert made.reward == pytest.approx(1000 * float(np.float32(0.1)), rel=1e-12)


@pytest.mark.parametrize("yes", [True, np.True_, 1, np.int64(1), np.array(True)])
@pytest.mark.parametrize("no", [False, np.False_, 0, np.array(0)])
def test_flags_of_other_types_are_believed(yes, no):
    rows, _ = stepped(GOOD, True, yes, no, {})
    assert (rows.terminated[0, 0], rows.truncated[0, 0], rows.reward[0, 0]) == (True, False, 1.0)
    rows, _ = stepped(GOOD, 1.0, no, yes, {})
    assert (rows.terminated[0, 0], rows.truncated[0, 0]) == (False, True)


@given(st.sampled_from("?bBhHiIlLqQefdg"), st.sampled_from([np.float32, np.uint8]))
def test_what_may_be_stored_comes_back(code, dtype):
    dtype = np.dtype(dtype)
    given_ = np.array([0, 1, 100], code)
    if np.dtype(code) in checks.storable(dtype):
        np.testing.assert_array_equal(given_.astype(dtype).astype(code), given_)
    else:
        assert dtype == np.uint8
        assert np.dtype(code) not in (np.uint8, np.bool_)


# ----------------------------------------------------------------------------------------------------------- encoders


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (spaces.Discrete(5), 5),
        (spaces.Discrete(5), -1),
        (spaces.Discrete(5, start=2), 1),
        (spaces.MultiDiscrete([2, 3]), np.array([2, 0])),  # would be the second component's first choice
        (spaces.MultiDiscrete([2, 3]), np.array([0, -1])),
        (spaces.Box(0.0, 1.0, (2, 3)), np.zeros((3, 2), np.float32)),
        (spaces.MultiBinary((2, 3)), np.zeros((3, 2), np.int8)),
        (spaces.Box(0, 255, (2, 8, 9, 3), np.uint8), np.zeros((2, 9, 8, 3), np.uint8)),
    ],
    ids=str,
)
def test_what_would_be_encoded_as_something_else_is_refused(space, wrong):
    encode = encode_observations(space, "X").encode
    encode(space.sample())
    with pytest.raises(ValueError, match="the environment returned"):
        encode(wrong)


# ------------------------------------------------------------------------------------------------------------ actions


@pytest.mark.parametrize("mode", [True, False])
def test_an_action_of_nan_never_reaches_an_environment(mode):
    for action in (BOX, DISCRETE):
        spec = vector_spec(action)
        model, parameters = network(spec)
        batch = InferenceBatch(model, spec, [4], torch.device("cpu"))
        batch.answer(3, mode)
        parameters.vector.fill_(torch.nan)
        if action is DISCRETE:  # it is one of the space's, and the loss will tell
            assert (batch.answer(3, mode).action < 3).all()
            continue
        with pytest.raises(RunFailed, match="the policy's action is NaN"):
            batch.answer(3, mode)


# ------------------------------------------------------------------------------------------- before a start, evaluating


def test_every_row_of_an_interval_knows_its_episode_and_step(tmp_path):
    """Reckoned back from where a replica stands after an interval, across both ends of episodes and carried resets."""
    intervals = record(tmp_path, "synthetic:counting", num_envs=3, sync_interval=16, total_steps=3 * 16 * 6).intervals
    for n in range(3):
        tags = [Counting.Episode.of(episode_seed(0, n, k)).tag for k in range(40)]
        for interval in intervals:
            storage = SimpleNamespace(**interval)
            places = [(tags.index(tag), step) for _, tag, step, _ in storage.obs[:, n].astype(int).tolist()]
            stands = SimpleNamespace(column=n, episode=places[-1][0], steps=places[-1][1])
            first = 0 if storage.valid[0, n] else 1  # an observation carried over was looked at before
            reckoned = [place_of(storage, stands, row) for row in range(first, len(places))]
            assert reckoned == places[first:]
        assert places[-1][0] > 3


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (lambda obs, *rest: (obs.astype(complex), *rest), "complex128"),
        (lambda obs, reward, *rest: (obs, None, *rest), "as reward"),
        (lambda obs, reward, terminated, truncated, info: (obs, reward, terminated, info, truncated), "as truncated"),
        (lambda obs, reward, terminated, truncated, info: (obs, reward, terminated, truncated, None), "TypeError"),
    ],
)
def test_a_first_step_of_nonsense_is_refused_before_anything_starts(monkeypatch, outcome, words):
    class Odd(Steady):
        def outcome(self):
            return outcome(*super().outcome())

    monkeypatch.setitem(gymnasium.registry, "Odd-v0", gymnasium.envs.registration.EnvSpec("Odd-v0", entry_point=Odd))
    with pytest.raises(ConfigError, match=f"API failed: .*{words}"):
        envs.describe("Odd-v0", GymnasiumOptions())


@pytest.mark.parametrize(
    ("env", "words"),
    [("Raises", "the robot fell over"), ("RaisesInReset", "didn't get up"), ("WrongShape", r"shape \(1,\)")],
)
def test_evaluation_names_the_fault(env, words):
    config = configure(f"faulty_envs:{env}-v0")
    spec = envs.describe(config.env, config.environment)
    batch = evaluation_batch(build_model(spec, config.network, 0), spec)
    with pytest.raises(EnvironmentFailed, match=rf"(?s)faulty_envs:{env}-v0 failed in evaluation episode \d+.*{words}"):
        evaluate(batch, spec, config.environment, seed=0, episodes=8, stochastic=True)
