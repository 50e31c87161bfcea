"""Atari: preprocessing against a slow reference, whole games, and games that depend on seed and actions alone."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from htsrl import envs
from htsrl.config import AtariOptions
from htsrl.errors import ConfigError
from htsrl.rng import Stream, generator

atari = pytest.importorskip("htsrl.envs.atari", reason="needs ale-py and OpenCV", exc_type=ImportError)
pytestmark = pytest.mark.atari

PLAIN = AtariOptions()
STICKY = AtariOptions(sticky_actions=0.25)
LIVES = AtariOptions(terminal_on_life_loss=True)


def actions(seed: int, choices: int) -> Iterator[int]:
    random = np.random.Generator(np.random.Philox(seed))
    while True:
        yield int(random.integers(choices))


def digest(env: envs.Environment, seed: int, steps: int = 120, choices: int = 6) -> str:
    """Of everything that a game shows, for the same actions whatever the seed."""
    sha = hashlib.sha256(env.reset(seed).tobytes())
    chosen = actions(0, choices)
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(next(chosen))
        sha.update(observation.tobytes() + repr((reward, terminated, truncated, sorted(info.items()))).encode())
        if terminated:
            break
    return sha.hexdigest()


def reference_frames(options: AtariOptions, seed: int, chosen: list[int]) -> list[np.ndarray]:
    """Single images [84, 84] of Pong, written plainly: no buffers, no snapshot, a fresh emulator."""
    import ale_py
    import cv2
    from ale_py import roms

    ale = ale_py.ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    path = roms.get_rom_path("pong")
    assert path is not None
    ale.loadROM(path)
    ale.reset_game()
    rng = generator(seed, Stream.ENVIRONMENT)
    minimal = ale.getMinimalActionSet()
    last = minimal[0]
    if options.noop_max:
        for _ in range(rng.integers(1, options.noop_max + 1)):
            ale.act(minimal[0])

    def image(frames: list[np.ndarray]) -> np.ndarray:
        return cv2.resize(np.max(frames, axis=0), (84, 84), interpolation=cv2.INTER_AREA)

    images = [image([ale.getScreenGrayscale()])]
    for action in chosen:
        frames = []
        for _ in range(options.frame_skip):
            if not options.sticky_actions or rng.random() >= options.sticky_actions:
                last = minimal[action]
            ale.act(last)
            frames.append(ale.getScreenGrayscale())
        images.append(image(frames[-2:]))
    return images


@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        STICKY,
        AtariOptions(frame_skip=1, frame_stack=1, noop_max=0),
        AtariOptions(frame_skip=2, frame_stack=3),
        AtariOptions(frame_stack=2),
    ],
)
def test_observations_equal_a_plain_reference(options: AtariOptions) -> None:
    chosen = [action for action, _ in zip(actions(1, 6), range(40), strict=False)]
    images = reference_frames(options, 11, chosen)
    history = [images[0]] * options.frame_stack
    env = envs.make("atari:Pong", options)
    observation = env.reset(11)
    for action, image in zip([*chosen, 0], [*images[1:], None], strict=True):
        assert observation.shape == (84, 84, options.frame_stack)
        assert np.array_equal(observation, np.stack(history, axis=-1))
        if image is not None:
            observation = env.step(action)[0]
            history = [*history[1:], image]


@pytest.mark.parametrize(
    # Berzerk and Assault remember the game before a reset, Qbert what was on the screen.
    ("game", "options", "choices"),
    [
        ("Pong", PLAIN, 6),
        ("Breakout", STICKY, 4),
        ("Berzerk", PLAIN, 18),
        ("Assault", PLAIN, 7),
        ("Qbert", STICKY, 6),
    ],
)
def test_games_depend_on_seed_and_actions_alone(game: str, options: AtariOptions, choices: int) -> None:
    env = envs.make(f"atari:{game}", options)
    alone = digest(env, 5, choices=choices)
    assert digest(env, 6, choices=choices) != alone
    env.reset(9)
    for action, _ in zip(actions(3, 3), range(77), strict=False):
        env.step(action)  # a game that is abandoned in the middle
    assert digest(env, 5, choices=choices) == alone
    assert digest(envs.make(f"atari:{game}", options), 5, choices=choices) == alone


def test_games_are_the_same_in_another_process() -> None:
    code = (
        "from test_atari import *; env = envs.make('atari:Pong', STICKY); digest(env, 6); print(digest(env, 5));"
        "assert 'torch' not in sys.modules"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    env = envs.make("atari:Pong", STICKY)
    assert fresh.stdout.split() == [digest(env, 5)]
    assert fresh.stderr == ""
    assert digest(env, 5) != digest(envs.make("atari:Pong", PLAIN), 5)


def rest_of_a_game(env: envs.Environment, choices: int, steps: int = 150) -> str:
    """Digest of everything that a game shows from here on, and of where it ends."""
    sha = hashlib.sha256()
    chosen = actions(1, choices)
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(next(chosen))
        sha.update(observation.tobytes() + repr((reward, terminated, truncated, sorted(info.items()))).encode())
        if terminated:
            sha.update(env.reset(8).tobytes())
    assert isinstance(env, envs.Restorable)
    return sha.hexdigest() + hashlib.sha256(env.snapshot()).hexdigest()


LEFT = {
    "Pong": (AtariOptions(sticky_actions=0.95), 6),  # the last action before goes on after
    "Breakout": (LIVES, 4),
    "MontezumaRevenge": (STICKY, 18),
    "Qbert": (PLAIN, 6),
}


def test_games_go_on_from_a_snapshot_in_another_process(tmp_path: Path) -> None:
    expected = []
    for game, (options, choices) in LEFT.items():
        env = envs.make(f"atari:{game}", options)
        env.reset(5)
        for action, _ in zip(actions(0, choices), range(180), strict=False):
            env.step(action)
        (tmp_path / game).write_bytes(env.snapshot())
        left = env.snapshot()
        expected.append(rest_of_a_game(env, choices))
        env.reset(5)
        assert rest_of_a_game(env, choices) != expected[-1]
        # An emulator that has played other things
        env.reset(5)
        env.restore(left)
        assert rest_of_a_game(env, choices) == expected[-1]
    code = (
        "from test_atari import *\n"
        "for game, (options, choices) in LEFT.items():\n"
        "    env = envs.make(f'atari:{game}', options); env.reset(5)\n"
        "    env.restore((Path(sys.argv[1]) / game).read_bytes()); print(rest_of_a_game(env, choices))"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert fresh.stdout.split() == expected


def test_a_cartridge_that_tells_too_little_is_found_out() -> None:
    """Pitfall II's has a chip of its own, part of which the emulator's state lacks."""
    played, restored = (envs.make("atari:Pitfall2", PLAIN) for _ in range(2))
    for env in (played, restored):
        env.reset(5)
    chosen = list(zip(actions(0, 18), range(60 + 128), strict=False))
    for action, _ in chosen[:60]:
        played.step(action)
    restored.restore(played.snapshot())
    for action, _ in chosen[60:]:
        played.step(action)
        restored.step(action)
    assert played.snapshot() != restored.snapshot()


def test_a_lost_life_is_told_and_the_game_goes_on() -> None:
    env = envs.make("atari:Breakout", AtariOptions(terminal_on_life_loss=True, reward_clip=False))
    silent = envs.make("atari:Breakout", AtariOptions(reward_clip=False))
    assert np.array_equal(env.reset(4), silent.reset(4))
    lost, total, terminated = 0, 0.0, False
    for action, _ in zip(actions(1, 4), range(2000), strict=False):
        observation, _, terminated, truncated, info = env.step(action)
        expected, _, over, _, other = silent.step(action)
        assert np.array_equal(observation, expected)
        assert (terminated, truncated) == (over, False)
        assert "life_lost" not in other
        lost += info["life_lost"]
        total += info["raw_reward"]
        if terminated:
            break
    assert terminated
    assert lost == 4  # of five lives; the last one is the game's end
    assert total > 0.0


def test_rewards_are_clipped_and_kept() -> None:
    env = envs.make("atari:MsPacman", PLAIN)
    env.reset(0)
    rewards = set()
    for action, _ in zip(actions(0, 9), range(80), strict=False):
        _, reward, _, _, info = env.step(action)
        assert reward == np.sign(info["raw_reward"])
        rewards.add(info["raw_reward"])
    assert 10.0 in rewards


def test_no_ops_vary_the_start() -> None:
    env = envs.make("atari:MsPacman", PLAIN)
    assert len({env.reset(seed).tobytes() for seed in range(8)}) > 1
    still = envs.make("atari:MsPacman", AtariOptions(noop_max=0))
    assert len({still.reset(seed).tobytes() for seed in range(4)}) == 1


def test_no_ops_that_end_a_game_start_another(monkeypatch: pytest.MonkeyPatch) -> None:
    env = envs.make("atari:Pong", AtariOptions(noop_max=30))
    begun = []
    begin = env._begin_game  # type: ignore[attr-defined]
    monkeypatch.setattr(env, "_begin_game", lambda: begun.append(begin()))
    monkeypatch.setattr(env, "_over", lambda: len(begun) < 3)
    env.reset(1)
    assert len(begun) == 3


@pytest.mark.parametrize("name", ["atari:MsPacman", "atari:ms_pacman", "atari:mspacman", "ALE/MsPacman-v5"])
def test_names_are_tolerated(name: str) -> None:
    spec = envs.describe(name, PLAIN)
    assert spec.env_id == "atari:MsPacman"
    assert spec.action.nvec == (9,)
    assert (spec.frame_skip, spec.max_episode_steps, spec.has_raw_reward) == (4, 27_000, True)
    assert set(spec.versions) == {"ale-py", "opencv"}


def test_describe_says_what_make_does(capfd: pytest.CaptureFixture[str]) -> None:
    options = AtariOptions(frame_stack=3, frame_skip=2, full_action_space=True, terminal_on_life_loss=True)
    spec = envs.describe("atari:Pong", options)
    assert (spec.action.nvec, spec.frame_skip, spec.has_life_loss) == ((18,), 2, True)
    observation = envs.make("atari:Pong", options).reset(0)
    assert (observation.shape, observation.dtype) == (spec.observation_shape, spec.observation_dtype)
    frame = envs.make("atari:Pong", options, render=True).render()
    assert frame is not None
    assert (frame.shape, frame.dtype) == ((210, 160, 3), np.uint8)
    assert capfd.readouterr() == ("", "")


def test_unknown_games_name_their_neighbours() -> None:
    with pytest.raises(ConfigError, match=r"no single-player game 'Pongg'\. Did you mean atari:Pong"):
        envs.describe("atari:Pongg", PLAIN)
    with pytest.raises(ConfigError, match="single-player game 'Warlords'"):
        envs.make("ALE/Warlords-v5", PLAIN)


def test_missing_ale_py_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.delitem(sys.modules, "htsrl.envs.atari")
    with pytest.raises(ConfigError, match=r"htsrl\[atari\]"):
        envs.describe("atari:Pong", PLAIN)
