"""Environments by name: Gymnasium's behind the executor's protocol, the synthetic ones, and every refusal."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import faulty_envs
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from htsrl import envs
from htsrl.config import AtariOptions, FootballOptions, GymnasiumOptions, Section, SyntheticOptions
from htsrl.envs.spec import seed31
from htsrl.envs.synthetic import Counting
from htsrl.errors import ConfigError

DEFAULT = GymnasiumOptions()
QUIET = SyntheticOptions(step_ms=0.0)


def play(env: envs.Environment, seed: int, steps: int = 30, choices: int = 2) -> list[bytes]:
    """All observations and rewards of ``steps`` steps of one episode, with actions that depend on the step."""
    seen = [env.reset(seed).tobytes()]
    for step in range(steps):
        observation, reward, terminated, truncated, _ = env.step(step * 7 % choices)
        seen.append(observation.tobytes() + repr((float(reward), terminated, truncated)).encode())
        if terminated or truncated:
            break
    return seen


@pytest.mark.parametrize(
    ("env", "family", "options"),
    [
        ("gfootball", "football", FootballOptions),
        ("gfootball:academy_corner", "football", FootballOptions),
        ("atari:Pong", "atari", AtariOptions),
        ("ALE/Pong-v5", "atari", AtariOptions),
        ("synthetic:sleep", "synthetic", SyntheticOptions),
        ("CartPole-v1", "gymnasium", GymnasiumOptions),
        ("my.package:Mine-v0", "gymnasium", GymnasiumOptions),
    ],
)
def test_families_by_name(env: str, family: str, options: type[Section]) -> None:
    assert (envs.family_of(env), envs.options_class(env)) == (family, options)
    other = SyntheticOptions() if options is GymnasiumOptions else DEFAULT
    with pytest.raises(ConfigError, match=options.__name__):
        envs.make(env, other)


def test_neither_families_nor_torch_are_imported_by_the_package() -> None:
    code = (
        "import sys; from htsrl import envs; envs.family_of('gfootball');"
        "assert not {'torch', 'gymnasium', 'gfootball', 'ale_py', 'cv2'} & sys.modules.keys();"
        "envs.make('CartPole-v1', envs.options_class('CartPole-v1')()).reset(0);"
        "envs.make('synthetic:counting', envs.options_class('synthetic:counting')()).reset(0);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ----------------------------------------------------------------------------------------------------- Gymnasium


def test_cartpole_is_the_bare_environment() -> None:
    spec = envs.describe("CartPole-v1", DEFAULT)
    assert (spec.observation_shape, spec.observation_kind, spec.action.nvec) == ((4,), "vector", (2,))
    assert (spec.max_episode_steps, spec.has_raw_reward, spec.frame_skip) == (500, False, 1)
    assert spec.versions == {"gymnasium": gymnasium.__version__}
    env, reference = envs.make("CartPole-v1", DEFAULT), gymnasium.make("CartPole-v1").unwrapped
    assert env.step.__func__ is type(reference).step  # type: ignore[attr-defined]
    assert np.array_equal(env.reset(7), reference.reset(seed=7)[0])
    for action in (0, 1, 1):
        assert np.array_equal(env.step(action)[0], reference.step(action)[0])


def test_time_limits_are_the_executors() -> None:
    assert envs.describe("CartPole-v1", GymnasiumOptions(max_episode_steps=7)).max_episode_steps == 7
    assert envs.describe("faulty_envs:Constant-v0", DEFAULT).max_episode_steps is None
    env = envs.make("Pendulum-v1", DEFAULT)
    env.reset(0)
    ends = {env.step(np.zeros(1, np.float32))[3] for _ in range(250)}
    assert ends == {False}


def test_episodes_depend_on_their_seed_alone() -> None:
    env, other = envs.make("CartPole-v1", DEFAULT), envs.make("CartPole-v1", DEFAULT)
    seed = (1 << 62) + 12345
    expected = play(env, seed)
    play(other, 3)
    assert play(other, seed) == expected
    assert play(other, seed + 1) != expected
    assert play(env, seed) == expected


def test_seeds_fold_to_31_bits_without_losing_any() -> None:
    assert [seed31(seed) for seed in (0, 1, 2**31 - 1)] == [0, 1, 2**31 - 1]
    flipped = {seed31(1 << bit) for bit in range(63)}
    assert 0 not in flipped
    assert max(seed31(2**63 - 1 - offset) for offset in range(100)) < 2**31


class Wrapped(gymnasium.Wrapper):
    """A user's wrapper, inside the environment's registration."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        observation, reward, terminated, _, info = self.env.step(action)
        return observation, reward, terminated, True, {**info, "mine": 1}


def test_a_users_wrappers_and_truncations_stay() -> None:
    def build(**kwargs: Any) -> gymnasium.Env:
        return Wrapped(gymnasium.make("CartPole-v1").unwrapped)

    gymnasium.register("Wrapped-v0", entry_point=build, max_episode_steps=9)
    assert envs.describe("Wrapped-v0", DEFAULT).max_episode_steps == 9
    env = envs.make("Wrapped-v0", DEFAULT)
    env.reset(0)
    _, _, _, truncated, info = env.step(0)
    assert (truncated, info) == (True, {"mine": 1})


def test_scaled_rewards_keep_the_raw_one() -> None:
    options = GymnasiumOptions(reward_scale=0.25)
    assert envs.describe("CartPole-v1", options).has_raw_reward
    env = envs.make("CartPole-v1", options)
    env.reset(0)
    _, reward, _, _, info = env.step(0)
    assert (reward, info["raw_reward"]) == (0.25, 1.0)


class Spaces(gymnasium.Env):
    """Records the actions that arrive; observations and actions are those of its spaces."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, False, False, {"action": action}


@pytest.mark.parametrize(
    ("observation_space", "action_space", "shape", "action"),
    [
        (spaces.Discrete(5, start=2), spaces.Discrete(3, start=-1), (5,), -1),
        (spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3), (5,), np.array([1, 0, 1])),
        (
            spaces.MultiBinary([2, 2]),
            spaces.MultiDiscrete(np.array([[3], [4]]), start=np.array([[5], [6]])),
            (4,),
            np.array([[2], [3]]),
        ),
        (
            spaces.Box(0, 255, (3, 8, 9), np.uint8),
            spaces.Box(-1, 1, (2,), np.float64),
            (8, 9, 3),
            np.ones(2, np.float32),
        ),
        (spaces.Box(-1, 1, (2, 3), np.float64), spaces.Box(-np.inf, np.inf, ()), (6,), np.array(3, np.float32)),
    ],
)
def test_spaces_are_converted_on_the_way(
    observation_space: spaces.Space, action_space: spaces.Space, shape: tuple[int, ...], action: Any
) -> None:
    def build(**kwargs: Any) -> gymnasium.Env:
        return Spaces(observation_space, action_space)

    gymnasium.register("Spaces-v0", entry_point=build)
    spec = envs.describe("Spaces-v0", DEFAULT)
    assert spec.observation_shape == shape
    env = envs.make("Spaces-v0", DEFAULT)
    assert np.shape(env.reset(3)) == shape
    assert np.shape(env.step(action)[0]) == shape
    del gymnasium.registry["Spaces-v0"]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("CartPole-v7", "no environment 'CartPole-v7'. Did you mean CartPole-v1"),
        ("Cartpole", "Did you mean CartPole-v1"),
        ("Zzz-v0", "your own environment module:Id-v0"),
        ("no_such_module:Mine-v0", "no_such_module.*ModuleNotFoundError"),
        ("faulty_envs:Raizes-v0", "Did you mean Raises-v0"),
        ("faulty_envs:RaisesInInit-v0", "can't be built: RuntimeError: there is no robot"),
        ("faulty_envs:AlwaysWrongShape-v0", r"shape \(3,\), but its space says \(4,\)"),
        ("faulty_envs:OldApi-v0", "Gymnasium's API failed: ValueError"),
    ],
)
def test_refusals_say_what_to_do(env: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        envs.describe(env, DEFAULT)
    assert "\n" not in str(refusal.value)


def test_a_module_that_fails_tells_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("import htsrl\n1 / 0\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)  # found in the current folder, though that isn't on the path
    with pytest.raises(ConfigError, match="ZeroDivisionError: division by zero"):
        envs.describe("broken_module:Mine-v0", DEFAULT)


def test_describe_builds_one_environment_and_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(faulty_envs.Steady, "__init__", lambda self: events.append("made"))
    monkeypatch.setattr(faulty_envs.Steady, "close", lambda self: events.append("closed"))
    envs.describe("faulty_envs:Steady-v0", DEFAULT)
    assert events == ["made", "closed"]


def test_renders_on_request() -> None:
    env = envs.make("FrozenLake-v1", DEFAULT, render=True)
    env.reset(0)
    env.close()
    assert envs.make("synthetic:counting", QUIET, render=True).render() is None


@pytest.mark.mujoco
@pytest.mark.filterwarnings("ignore:compiler attribute")
def test_mujoco_is_reproducible_and_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mujoco")
    spec = envs.describe("HalfCheetah-v5", DEFAULT)
    assert (spec.observation_shape, spec.action.kind, spec.action.low) == ((17,), "box", (-1.0,) * 6)
    assert "mujoco" in spec.versions
    assert "mujoco" not in envs.describe("CartPole-v1", GymnasiumOptions()).versions
    capfd.readouterr()

    def episode(env: envs.Environment, seed: int) -> list[bytes]:
        random = np.random.Generator(np.random.Philox(1))
        seen = [env.reset(seed).tobytes()]
        for _ in range(20):
            seen.append(env.step(random.uniform(-1, 1, 6).astype(np.float32))[0].tobytes())
        return seen

    env, other = envs.make("HalfCheetah-v5", DEFAULT), envs.make("HalfCheetah-v5", DEFAULT)
    expected = episode(env, 5)
    episode(other, 6)
    assert episode(other, 5) == expected
    assert episode(other, 6) != expected
    assert capfd.readouterr().err == ""
    assert not Path("MUJOCO_LOG.TXT").exists()


# ----------------------------------------------------------------------------------------------------- synthetic


@pytest.mark.parametrize("name", ["sleep", "counting", "football"])
def test_synthetic_environments_are_as_described_and_reproducible(name: str) -> None:
    env_id = f"synthetic:{name}"
    spec = envs.describe(env_id, QUIET)
    env, other = envs.make(env_id, QUIET), envs.make(env_id, QUIET)
    first = env.reset(5)
    assert (first.shape, first.dtype) == (spec.observation_shape, spec.observation_dtype)
    choices = spec.action.nvec[0]
    expected = play(env, 5, choices=choices)
    play(other, 6, choices=choices)
    assert play(other, 5, choices=choices) == expected
    assert play(other, 6, choices=choices) != expected
    assert play(other, 5, choices=1)[1:] != expected[1:]


def test_sleep_has_its_thread_woken_in_time() -> None:
    def slack() -> int:
        return ctypes.CDLL(None).prctl(30, *[ctypes.c_ulong(0)] * 4)  # PR_GET_TIMERSLACK, in nanoseconds

    def step_and_look() -> None:
        seen.append(slack())
        envs.make("synthetic:sleep", QUIET)
        seen.append(slack())
        envs.make("synthetic:sleep", SyntheticOptions(step_ms=0.1))
        seen.append(slack())

    seen: list[int] = []
    thread = threading.Thread(target=step_and_look)
    thread.start()
    thread.join()
    assert seen[0] > 1
    assert seen == [seen[0], seen[0], 1]


def test_sleep_takes_its_time_without_changing_anything() -> None:
    waiting = envs.make("synthetic:sleep", SyntheticOptions(step_ms=2.0, step_shape=50.0))
    start = time.monotonic()
    seen = play(waiting, 5)
    assert 0.04 < time.monotonic() - start < 20.0
    assert seen == play(envs.make("synthetic:sleep", QUIET), 5)


def test_counting_says_where_a_row_comes_from_and_ends_in_both_ways() -> None:
    env = envs.make("synthetic:counting", QUIET)
    ends = set()
    for seed in range(70000, 70040):
        episode = Counting.Episode.of(seed)
        assert np.array_equal(env.reset(seed), [seed & 0xFFFF, episode.tag, 0, -1])
        for step in range(1, episode.length + 1):
            action = step % 6
            observation, reward, terminated, truncated, _ = env.step(action)
            assert np.array_equal(observation, [seed & 0xFFFF, episode.tag, step, action])
            assert reward == episode.reward(step, action) == np.float32(reward)
            assert (terminated or truncated) == (step == episode.length)
        ends.add((terminated, truncated))
        assert truncated == episode.truncates
    assert ends == {(True, False), (False, True)}


def test_synthetic_football_can_be_won_and_costs_cpu_time() -> None:
    env = envs.make("synthetic:football", SyntheticOptions())
    assert envs.describe("synthetic:football", SyntheticOptions()).has_score
    env.reset(1)
    start = time.thread_time()
    results = []
    for _ in range(200):
        _, reward, terminated, _, info = env.step(5)
        results.append((reward, terminated, info))
        if terminated:
            break
    assert 0.002 * len(results) <= time.thread_time() - start < 0.01 * len(results)
    assert results[-1] in [(1.0, True, {"score": 1}), (0.0, True, {"score": 0})]
    frame = env.render()
    assert frame is not None
    assert frame.shape == (576, 768, 3)


def test_unknown_synthetic_environment() -> None:
    with pytest.raises(ConfigError, match="Did you mean synthetic:counting"):
        envs.make("synthetic:countin", QUIET)
    with pytest.raises(
        ConfigError, match="synthetic:sleep or synthetic:counting or synthetic:memory or synthetic:football"
    ):
        envs.describe("synthetic:zzzz", QUIET)


# -------------------------------------------------------------------------------------------- the faulty ones


def strike(name: str, seed: int = 1) -> tuple[Any, ...]:
    """Step 37 of an episode; odd seeds meet the fault."""
    env = envs.make(f"faulty_envs:{name}-v0", DEFAULT)
    env.reset(seed)
    for _ in range(faulty_envs.FAULT_STEP - 1):
        env.step(0)
    return env.step(0)


def test_faulty_environments_fail_where_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Raises", "WrongShape", "NanObservation", "InfReward", "Hangs", "Exits", "RaisesInReset"):
        assert strike(name, seed=2)[1] == strike("Steady", seed=2)[1]
    with pytest.raises(RuntimeError, match="fell over"):
        strike("Raises")
    assert strike("WrongShape")[0].shape == (1,)
    assert np.isnan(strike("NanObservation")[0]).all()
    assert strike("InfReward")[1] == np.inf
    with pytest.raises(RuntimeError, match="get up"):
        strike("RaisesInReset")
    assert strike("Clock")[0].tobytes() != strike("Clock")[0].tobytes()
    monkeypatch.setenv("FAULT_ONCE", str(tmp_path / "claimed"))
    with pytest.raises(RuntimeError, match="fell over"):
        strike("Raises")
    strike("Raises")


def test_reused_buffers_show_the_same_episode() -> None:
    env, steady = envs.make("faulty_envs:ReusesBuffers-v0", DEFAULT), envs.make("faulty_envs:Steady-v0", DEFAULT)
    assert play(env, 3, steps=100) == play(steady, 3, steps=100)
    observation, _, _, _, info = env.step(0)
    env.reset(4)
    assert observation[3] == 0.0
    assert info == {}
