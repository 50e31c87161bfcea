"""Action masks and observations of parts in the running system. The environments raise where a mask is not obeyed."""

from __future__ import annotations

from contextlib import nullcontext

import gymnasium
import numpy as np
import pytest
from masked_envs import Numbers
from recording import known_to, record
from test_resume import bits, interrupted, no_changes
from test_runtime import assert_same_bits, digests

from htsrl import envs
from htsrl.actors.executor import action_converter
from htsrl.config import GymnasiumOptions
from htsrl.errors import ConfigError, EnvironmentFailed
from htsrl.evaluation import evaluate, evaluation_batch
from htsrl.models import build_model
from htsrl.settings import configure
from htsrl.training import resume, train

pytestmark = pytest.mark.usefixtures("quick_children")

DEFAULT = GymnasiumOptions()
SMALL = {"num_envs": 4, "sync_interval": 16, "total_steps": 4 * 16 * 4, "minibatches": 2, "epochs": 1}


def parts_of(recording, spec):
    """Every part of every observation, [intervals * T, N, ...] by name."""
    obs = recording.stacked("obs")
    return {
        part.name: np.ascontiguousarray(obs[..., part.bytes]).view(part.dtype).reshape(*obs.shape[:2], *part.shape)
        for part in spec.parts
    }


# ------------------------------------------------------------------------------------------------------------ described


def test_masks_are_found_where_they_are():
    rooms, numbers, levers = (
        envs.describe(f"masked_envs:{name}-v0", DEFAULT) for name in ("Rooms", "Numbers", "Levers")
    )
    assert {part.name for part in rooms.parts} == {"action_mask", "camera", "sensors.room", "sensors.wind"}
    assert (rooms.mask.shape, rooms.mask_in_info, rooms.has_images) == ((6,), False, True)
    assert {part.name for part in numbers.parts} == {"action_mask", "observation"}
    assert (numbers.mask.shape, numbers.mask_in_info, numbers.has_images) == ((6,), True, False)
    assert levers.mask.shape == (6,)
    assert envs.describe("CartPole-v1", DEFAULT).mask is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"action_space": gymnasium.spaces.Discrete(5)}, r"of shape \(6,\), which must be \(5,\)"),
        ({"action_space": gymnasium.spaces.MultiBinary(6)}, "masks for Discrete and MultiDiscrete actions alone"),
        ({"action_space": gymnasium.spaces.Box(-1, 1, (6,))}, "masks for Discrete and MultiDiscrete actions alone"),
        ({"info": lambda self: {"action_mask": self.mask()} if self.steps else {}}, "must come with every observation"),
        ({"info": lambda self: {} if self.steps else {"action_mask": self.mask()}}, "which came with its first reset"),
        ({"mask": lambda self: np.zeros(6, np.int8)}, "allows no action"),
    ],
)
def test_masks_that_can_not_be_are_refused_before_anything_starts(monkeypatch, changes, words):
    odd = type("Odd", (Numbers,), changes)
    monkeypatch.setitem(gymnasium.registry, "Odd-v0", gymnasium.envs.registration.EnvSpec("Odd-v0", entry_point=odd))
    with pytest.raises(ConfigError, match=words):
        envs.describe("Odd-v0", DEFAULT)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("Forgets", "returned no info['action_mask'], which came with its first reset"),
        ("Surprises", "returned info['action_mask'], which must come with every observation"),
        ("ForbidsAll", "an action mask that allows no action, in an episode that goes on"),
        ("Shortens", "an action mask of shape (5,), which must be (6,)"),
        ("Doubts", "which must be zeros and ones"),
        ("Loses", "part 'sensors.wind' of the observation: the environment did not return it"),
        ("Overflows", "NaN or infinity"),
    ],
)
def test_a_fault_is_named_with_its_place(tmp_path, env, words):
    with pytest.raises(EnvironmentFailed) as failure:
        record(tmp_path / "run", f"masked_envs:{env}-v0", max_restarts=0, **SMALL)
    message = str(failure.value)
    place = "episode 0, step 3" if env == "Overflows" else "episode 0, step "
    assert [word for word in (words, "replica", place) if word not in message] == []
    if env == "Overflows":
        return  # found at the barrier; an evaluation learns nothing from it
    config = configure(f"masked_envs:{env}-v0")
    spec = envs.describe(config.env, config.environment)
    batch = evaluation_batch(build_model(spec, config.network, 0), spec)
    with pytest.raises(EnvironmentFailed, match=r"evaluation episode \d+, step [23]"):
        evaluate(batch, spec, config.environment, seed=0, episodes=2, stochastic=True)


# -------------------------------------------------------------------------------------------------------------- running


@pytest.mark.parametrize("env", ["Rooms", "Levers"])
def test_layouts_give_the_same_bits_and_another_seed_does_not(tmp_path, env):
    name = f"masked_envs:{env}-v0"
    first = record(tmp_path / "1", name, num_executors=1, envs_per_group=4, **SMALL)
    assert_same_bits(first, record(tmp_path / "2", name, num_executors=3, num_actors=2, envs_per_group=1, **SMALL))
    other = record(tmp_path / "seed", name, seed=1, **SMALL)
    assert digests(other)[0] != digests(first)[0]
    assert digests(other)[1] != digests(first)[1]

    # What stands in the storage is what the environment said, and no forbidden action was taken in a transition
    spec = envs.describe(name, DEFAULT)
    parts, action, valid = parts_of(first, spec), first.stacked("action"), first.stacked("valid")
    mask = parts["action_mask"]
    assert set(np.unique(mask)) == {0, 1}
    if env == "Levers":
        obeyed = np.take_along_axis(mask, action + np.array([0, 2]), -1).all(-1)
    else:
        obeyed = np.take_along_axis(mask, action[..., None], -1)[..., 0]
        steps = parts["sensors.wind"][..., 1]
        assert (np.diff(steps, axis=0)[valid[:-1] & ~first.stacked("terminated")[:-1]] == 1).all()
    assert obeyed[valid].all()
    # The last observation of a truncated episode allows nothing, and does no harm
    assert not mask[1:][first.stacked("truncated")[:-1]].any()
    assert first.stacked("truncated")[:-1].any()
    assert np.isfinite(first.stacked("log_prob")[valid]).all()
    assert all(np.isfinite(value) for each in first.metrics for key, value in each.items() if key.startswith("loss/"))


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path):
    settings = {"env": "masked_envs:Rooms-v0", "delay": "importance", "progress": "none", "tensorboard": False, **SMALL}
    train(configure(run_dir=tmp_path / "whole", **settings))
    interrupted(tmp_path / "stopped", 2, **settings)
    resume(tmp_path / "stopped", no_changes(num_executors=2, envs_per_group=1))
    assert bits(tmp_path / "stopped") == bits(tmp_path / "whole")


@pytest.mark.parametrize(
    ("env", "algo", "settings"),
    [
        ("Numbers", "impala", {"schedule": "async"}),
        ("Rooms", "impala", {}),
        ("Rooms", "acktr", {"cold_updates": 1}),
        ("Levers", "batchppo", {"normalize_obs": False}),
        ("Switches", "a2c", {}),
        ("Stretched", "ppo", {"squash_actions": True, "state_dependent_std": True}),
        ("Stretched", "acktr", {"cold_updates": 1, "squash_actions": True}),
    ],
)
def test_heads_and_parts_work_under_every_algorithm(tmp_path, env, algo, settings):
    small = known_to(algo, SMALL) | {"total_steps": 4 * 16 * 3}
    config = configure(
        f"masked_envs:{env}-v0", algo, run_dir=tmp_path / "run", progress="none", tensorboard=False,
        eval_every=64, eval_episodes=2, eval_stochastic=True, **settings, **small,
    )  # fmt: skip
    values = train(config).values
    assert values["steps"] >= small["total_steps"]
    assert (tmp_path / "run" / "evaluations.jsonl").read_text().count("\n") >= 2


def test_the_learner_s_policy_is_masked_as_the_actor_s(tmp_path):
    """Its entropy is that of three actions of six, and its ratio starts at exactly 1."""
    recording = record(tmp_path / "run", "masked_envs:Numbers-v0", **SMALL)
    entropies = [each["loss/entropy"] for each in recording.metrics]
    assert min(entropies) > 0.9
    assert max(entropies) < np.log(3.0) + 1e-4
    one_step = record(tmp_path / "one", "masked_envs:Numbers-v0", **SMALL | {"minibatches": 1})
    assert max(abs(each["loss/kl"]) for each in one_step.metrics) < 1e-6


# ------------------------------------------------------------------------------------------------------------- squashed


def test_squashed_actions_lie_between_their_bounds_and_do_not_depend_on_their_company():
    spec = envs.describe("masked_envs:Stretched-v0", DEFAULT)
    convert = action_converter(spec.action, squashed=True)
    u = np.random.default_rng(0).normal(scale=4.0, size=(64, 2)).astype(np.float32)
    u[0] = [-50.0, 50.0]
    together = np.array(convert(u))
    wanted = np.array([-1.0, 0.01]) + np.array([2.0, 0.02]) * np.tanh(u.astype(np.float64))
    np.testing.assert_allclose(together, wanted, rtol=1e-6, atol=1e-6)
    assert ((together >= spec.action.low) & (together <= spec.action.high)).all()
    for row, action in zip(u, together):
        (alone,) = convert(row[None])
        assert alone.tobytes() == action.tobytes()
        assert alone.dtype == np.float32


@pytest.mark.parametrize("squashed", [True, False])
def test_evaluation_squashes_as_training_does(squashed):
    config = configure("masked_envs:Stretched-v0", squash_actions=squashed)
    spec = envs.describe(config.env, config.environment)
    batch = evaluation_batch(build_model(spec, config.network, 0), spec)
    with nullcontext() if squashed else pytest.raises(EnvironmentFailed, match="was clipped"):
        evaluate(batch, spec, config.environment, seed=0, episodes=4, stochastic=True)
