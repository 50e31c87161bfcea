"""Football: the adapter against gfootball's own wrappers, bit for bit; episodes depend on seed and actions alone."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from htsrl import envs
from htsrl.config import FootballOptions
from htsrl.errors import ConfigError
from htsrl.rng import Stream, generator

pytest.importorskip("htsrl.envs.football", reason="needs gfootball", exc_type=ImportError)
pytestmark = [pytest.mark.football, pytest.mark.filterwarnings("ignore:.*old step API:DeprecationWarning")]

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
    """Of everything that an episode shows, for the same actions whatever the seed."""
    sha = hashlib.sha256(env.reset(seed).tobytes())
    chosen = actions(0, biased=True)
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
        stacked=options.stacked,
        representation=options.representation,
        rewards=options.rewards,
    )
    config = reference.unwrapped._config
    env = envs.make(f"gfootball:{scenario}", options)
    paid: set[float] = set()
    ends = 0
    for seed in (1, 2, 3):
        rng = generator(seed, Stream.ENVIRONMENT)
        config["game_engine_random_seed"] = int(rng.integers(1 << 31))
        config["episode_number"] = int(rng.integers(2))
        config._values.pop("reverse_team_processing", None)
        expected, observation = reference.reset(), env.reset(seed)
        chosen = actions(seed, biased=seed < 3)
        score = 0
        for _ in range(steps // 3):
            assert (observation.shape, observation.dtype) == (expected.shape, expected.dtype)
            assert observation.tobytes() == expected.tobytes()
            action = next(chosen)
            expected, reward, done, info = reference.step(action)
            observation, ours, terminated, truncated, extra = env.step(action)
            score += info["score_reward"]
            paid.add(ours)
            assert (ours, terminated, truncated) == (float(reward), done, False)
            assert extra == {"score": score}
            if done:
                ends += 1
                break
    if scenario == "academy_empty_goal_close":
        assert ends >= 2
        assert max(paid) > 1.0  # a goal and the checkpoints that were left
        assert any(0.0 < reward < 1.0 for reward in paid)
    env.close()
    reference.close()


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
    other.reset(9)  # gfootball itself would now let the other side kick off
    assert digest(other, 3, steps=5) == kick_off
    other.close()
    again = envs.make("gfootball", DENSE)
    assert digest(again, 5) == alone
    again.close()
    code = (
        "from test_football import *; env = envs.make('gfootball', DENSE); digest(env, 6); print(digest(env, 5));"
        "assert 'torch' not in sys.modules"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert fresh.stdout.split() == [alone]
    assert fresh.stderr == ""


def rest_of_a_match(env: envs.Environment, steps: int = 200) -> str:
    """Digest of everything that a match shows from here on, and of the next ones."""
    sha = hashlib.sha256()
    chosen = actions(1, biased=True)
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(next(chosen))
        sha.update(observation.tobytes() + repr((reward, terminated, truncated, info)).encode())
        if terminated:
            sha.update(env.reset(8).tobytes())
    return sha.hexdigest()


# Seed 1 processes the right team first, which the engine remembers in more places than its state tells
LEFT = [("5_vs_5", DENSE, 1, 40), ("11_vs_11_stochastic", VECTOR, 2, 70), ("academy_3_vs_1_with_keeper", DENSE, 1, 9)]


def test_matches_go_on_from_a_snapshot_in_another_process(tmp_path: Path) -> None:
    expected = []
    for scenario, options, seed, steps in LEFT:
        env = envs.make(f"gfootball:{scenario}", options)
        env.reset(seed)
        for action, _ in zip(actions(0, biased=False), range(steps), strict=False):
            assert not env.step(action)[2]
        (tmp_path / scenario).write_bytes(env.snapshot())
        assert env.snapshot() == (tmp_path / scenario).read_bytes()
        expected.append(rest_of_a_match(env))
        env.close()
    code = (
        "from test_football import *\n"
        "for scenario, options, seed, _ in LEFT:\n"
        "    env = envs.make(f'gfootball:{scenario}', options); env.reset(seed)\n"
        "    env.restore((Path(sys.argv[1]) / scenario).read_bytes()); print(rest_of_a_match(env)); env.close()"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert fresh.stdout.split() == expected
    assert len(set(expected)) == len(LEFT)


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


def test_the_scenarios_time_ends_an_episode_for_good() -> None:
    env = envs.make("gfootball:test_example_multiagent", DENSE)
    env.reset(1)
    steps, terminated = 0, False
    while not terminated:
        _, _, terminated, truncated, info = env.step(0)
        steps += 1
        assert not truncated
    assert (steps, info) == (101, {"score": 0})
    env.close()


def test_draws_the_minimap(dense: envs.Environment) -> None:
    dense.reset(1)
    frame = dense.render()
    assert frame is not None
    assert (frame.shape, frame.dtype) == ((576, 768, 3), np.uint8)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) >= 3


@pytest.mark.parametrize("options", [DENSE, VECTOR, SPARSE.model_copy(update={"stacked": False})])
def test_describe_says_what_make_does_without_an_engine(options: FootballOptions) -> None:
    from gfootball.env import football_env_core

    football_env_core._unused_engines.clear()
    spec = envs.describe("gfootball", options)
    assert not football_env_core._unused_engines  # where a closed one would be
    assert spec.env_id == "gfootball:academy_empty_goal_close"
    assert spec.action.nvec == (19,)
    assert spec.has_score
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
