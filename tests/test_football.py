"""Football: our adapter against gfootball's own wrappers, bit for bit, and episodes that depend on seed and actions alone."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from htsrl import envs
from htsrl.config import FootballOptions
from htsrl.errors import ConfigError
from htsrl.rng import Stream, generator

pytest.importorskip("gfootball")
pytestmark = pytest.mark.football

SPARSE = FootballOptions(rewards="scoring")
DENSE = FootballOptions()
VECTOR = FootballOptions(representation="simple115v2")
RIGHT, SHOT = 5, 12


def actions(seed: int, biased: bool) -> Iterator[int]:
    """Random actions; biased ones run towards the goal and shoot, so that checkpoints and goals occur."""
    random = np.random.Generator(np.random.Philox(seed))
    while True:
        action = int(random.integers(19))
        yield (SHOT if action < 3 else RIGHT) if biased and action < 16 else action


def digest(env: envs.Environment, seed: int, steps: int = 60) -> str:
    """Of everything that an episode shows, for actions that depend on the seed."""
    sha = hashlib.sha256(env.reset(seed).tobytes())
    chosen = actions(seed, biased=True)
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(next(chosen))
        sha.update(observation.tobytes() + repr((reward, terminated, truncated, info)).encode())
        if terminated:
            break
    return sha.hexdigest()


@pytest.fixture(scope="module")
def dense() -> Iterator[envs.Environment]:
    env = envs.make("gfootball", DENSE)
    yield env
    env.close()


@pytest.mark.parametrize(
    ("scenario", "options", "steps"),
    [
        ("academy_empty_goal_close", DENSE, 120),
        ("academy_3_vs_1_with_keeper", SPARSE, 100),
        ("academy_run_to_score_with_keeper", DENSE.model_copy(update={"stacked": False}), 150),
        ("academy_counterattack_easy", VECTOR, 60),
        ("11_vs_11_easy_stochastic", DENSE, 60),
        ("5_vs_5", VECTOR.model_copy(update={"stacked": False, "rewards": "scoring"}), 60),
    ],
)
def test_equal_to_gfootballs_own_wrappers(scenario: str, options: FootballOptions, steps: int) -> None:
    import gfootball.env

    reference = gfootball.env.create_environment(
        env_name=scenario,
        stacked=options.stacked and options.representation == "extracted",
        representation=options.representation,
        rewards=options.rewards,
    )
    config = reference.unwrapped._config
    env = envs.make(f"gfootball:{scenario}", options)
    paid = set()
    for seed in (1, 2, 3):
        rng = generator(seed, Stream.ENVIRONMENT)
        config["game_engine_random_seed"] = int(rng.integers(1 << 31))
        config["episode_number"] = int(rng.integers(2))
        config._values.pop("reverse_team_processing", None)
        expected, observation = reference.reset(), env.reset(seed)
        chosen = actions(seed, biased=seed < 3)
        score = 0
        for _ in range(steps // 3):
            newest = observation if observation.shape == expected.shape else observation[-115:]
            assert newest.dtype == expected.dtype
            assert newest.tobytes() == expected.tobytes()
            action = next(chosen)
            expected, reward, done, info = reference.step(action)
            observation, ours, terminated, truncated, extra = env.step(action)
            score += info["score_reward"]
            paid.add(ours)
            assert (ours, terminated, truncated) == (float(reward), done, False)
            assert extra == ({"score": score} if done else {})
            if done:
                break
    if "checkpoints" in options.rewards and "academy" in scenario:
        assert max(paid) > 0.0
    env.close()
    reference.close()


def test_simple115_is_stacked_newest_last() -> None:
    env = envs.make("gfootball:academy_empty_goal", VECTOR)
    first = env.reset(1).copy().reshape(4, 115)
    assert (first == first[0]).all()
    second = env.step(RIGHT)[0].copy().reshape(4, 115)
    third = env.step(RIGHT)[0].reshape(4, 115)
    assert (second[:3] == first[0]).all()
    assert (third[2] == second[3]).all()
    assert (third[3] != second[3]).any()
    env.close()


def test_episodes_depend_on_seed_and_actions_alone(dense: envs.Environment) -> None:
    alone = digest(dense, 5)
    assert digest(dense, 6) != alone
    dense.reset(8)
    dense.step(0)  # an episode that is abandoned in the middle
    assert digest(dense, 5) == alone
    # A full game in between: the engine is reused by another scenario, whose episodes count sides.
    other = envs.make("gfootball:11_vs_11_stochastic", SPARSE)
    kick_off = digest(other, 3, steps=5)
    other.reset(9)
    assert digest(other, 3, steps=5) == kick_off
    other.close()
    again = envs.make("gfootball", DENSE)
    assert digest(again, 5) == alone
    again.close()
    code = (
        "from tests.test_football import *; env = envs.make('gfootball', DENSE); digest(env, 6); print(digest(env, 5));"
        "assert 'torch' not in sys.modules"
    )
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert fresh.stdout.split()[-1] == alone
    assert "gym" not in fresh.stderr.lower()


def test_eight_engines_in_one_process_take_turns(dense: envs.Environment) -> None:
    replicas = [envs.make("gfootball", DENSE) for _ in range(8)]
    first = [env.reset(5).copy() for env in replicas]
    assert all((observation == first[0]).all() for observation in first)
    chosen = actions(5, biased=True)
    for _ in range(5):
        action = next(chosen)
        rows = [env.step(action)[0].copy() for env in replicas]
        assert all((row == rows[0]).all() for row in rows)
    for env in replicas:
        env.close()


@pytest.mark.parametrize("options", [DENSE, VECTOR, SPARSE.model_copy(update={"stacked": False})])
def test_describe_says_what_make_does_without_an_engine(options: FootballOptions) -> None:
    from gfootball.env import football_env_core

    engines = len(football_env_core._unused_engines)
    football_env_core._unused_engines.clear()
    spec = envs.describe("gfootball", options)
    assert not football_env_core._unused_engines
    assert spec.env_id == "gfootball:academy_empty_goal_close"
    assert spec.action.nvec == (19,)
    assert spec.has_score
    assert engines >= 0
    env = envs.make(spec.env_id, options)
    observation = env.reset(0)
    assert observation.shape == spec.observation_shape
    assert observation.dtype == spec.observation_dtype
    env.close()


def test_unknown_scenario_names_its_neighbours() -> None:
    with pytest.raises(ConfigError, match="Did you mean academy_3_vs_1_with_keeper"):
        envs.describe("gfootball:academy_3_vs_1_keeper", DENSE)
    with pytest.raises(ConfigError, match="academy_empty_goal_close"):
        envs.make("gfootball:zzz", DENSE)


def test_missing_gfootball_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gfootball", None)
    monkeypatch.delitem(sys.modules, "htsrl.envs.football", raising=False)
    with pytest.raises(ConfigError, match="make setup"):
        envs.describe("gfootball", DENSE)
