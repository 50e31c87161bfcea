"""Atari games straight on the Arcade Learning Environment: ``atari:Pong``, ``ALE/Pong-v5``, ``atari:ms_pacman``.

An agent step repeats one action for ``frame_skip`` frames. The observation is the pixel-wise maximum of the last two
frames in grayscale, resized to 84x84 by area, and stacked with its predecessors on the last axis, newest last
(Mnih et al. 2015; grayscale before the maximum as in Castro et al. 2018). Nothing else skips or repeats frames: the
emulator itself runs with a frame skip of one and without sticky actions. ``ALE/Pong-v5`` is just another name: what
decides is `AtariOptions`, not what Gymnasium registered under that id (sticky actions among it).

Every game starts from one snapshot of the freshly started emulator. A mere ``reset_game`` leaves memory behind that a
quarter of the games (Assault, Berzerk, Freeway, ...) turn into another game, so that an episode would depend on those
before it; seeding the emulator instead would reload the ROM, which takes ten times as long. All randomness (no-op
starts, sticky actions: Machado et al. 2018) comes from a generator keyed by the episode's seed.

A lost life never ends an episode: reports are about whole games, and a game can be replayed from its seed and actions.
A snapshot (`htsrl.envs.spec.Restorable`) is the emulator's own, and the state of generator and stack. The emulator's
lacks where missiles and ball are drawn until the game places them again, and a part of Pitfall II's cartridge. Where
that matters (in Pitfall II, now and then in Miniature Golf) the run notices, and replays the episode.

With ``terminal_on_life_loss`` ``info['life_lost']`` says that a step cost one, and the executor marks the step as a
termination for the learner without resetting.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import ale_py
import cv2
import numpy as np
from ale_py import roms

from htsrl.config import AtariOptions
from htsrl.envs.snapshots import pack, unpack
from htsrl.envs.spec import ActionSpec, EnvSpec
from htsrl.errors import ConfigError
from htsrl.rng import Stream, continue_from, generator, saved_state

SIZE = 84
MULTIPLAYER_ONLY = frozenset({"combat", "joust", "maze_craze", "warlords"})


class AtariEnvironment:
    """One emulator. The array that ``reset`` and ``step`` return is the same each time."""

    def __init__(self, game: str, options: AtariOptions) -> None:
        """Starts the emulator with ``game``, a name that ale-py knows in snake_case."""
        self._ale = _start_emulator(game)
        self._actions = _action_set(self._ale, options)
        self._frame_skip = options.frame_skip
        self._noop_max = options.noop_max
        self._sticky = options.sticky_actions
        self._clip = options.reward_clip
        self._life_loss = options.terminal_on_life_loss
        self._ale.reset_game()
        self._beginning = self._ale.cloneState(include_rng=True)
        height, width = self._ale.getScreenDims()
        self._frames = np.zeros((2, height, width), np.uint8)
        self._stack = FrameStack(options.frame_stack)
        self._rng = generator(0, Stream.ENVIRONMENT)
        self._last_action = self._actions[0]

    def reset(self, seed: int) -> np.ndarray:
        """A new game after 1 to ``noop_max`` no-op frames: [84, 84, frame_stack] uint8, full of its first frame."""
        self._rng = generator(seed, Stream.ENVIRONMENT)
        self._begin_game()
        if self._noop_max:
            for _ in range(self._rng.integers(1, self._noop_max + 1)):
                self._ale.act(self._actions[0])
                if self._over():
                    self._begin_game()
        self._last_action = self._actions[0]
        self._ale.getScreenGrayscale(self._frames[1])
        return self._stack.fill(_resize(self._frames[1]))

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Up to ``frame_skip`` frames of ``action``; fewer where the game ends in between."""
        lives = self._ale.lives()
        reward = 0.0
        newest, previous = self._frames[1], None
        for frame in range(self._frame_skip):
            if not self._sticky or self._rng.random() >= self._sticky:
                self._last_action = self._actions[action]
            reward += self._ale.act(self._last_action)
            if self._over():
                break
            if frame == self._frame_skip - 2:
                previous = self._frames[0]
                self._ale.getScreenGrayscale(previous)
        self._ale.getScreenGrayscale(newest)
        if previous is not None:
            np.maximum(newest, previous, out=newest)
        observation = self._stack.push(_resize(newest))
        over = self._over()
        info: dict[str, Any] = {"raw_reward": reward}
        if self._life_loss:
            info["life_lost"] = self._ale.lives() < lives and not over
        if self._clip:
            reward = float((reward > 0) - (reward < 0))
        return observation, reward, over, False, info

    def snapshot(self) -> bytes:
        """About 43 KB, in 0.1 ms."""
        facts = {"generator": saved_state(self._rng), "last_action": self._actions.index(self._last_action)}
        emulator = self._ale.cloneState(include_rng=True).serialize()
        return pack(facts, self._stack.save() + emulator)

    def restore(self, snapshot: bytes) -> None:
        facts, engine = unpack(snapshot)
        emulator = self._stack.load(engine)
        self._ale.restoreState(ale_py.ALEState(emulator))
        continue_from(self._rng, facts["generator"])
        self._last_action = self._actions[facts["last_action"]]

    def render(self) -> np.ndarray:
        """The screen as [210, 160, 3] uint8 RGB."""
        return self._ale.getScreenRGB()

    def close(self) -> None:
        """Nothing to do: the emulator's memory is freed with the object."""

    def _begin_game(self) -> None:
        # The snapshot lacks some of the display's state, which reset_game clears.
        self._ale.reset_game()
        self._ale.restoreState(self._beginning)

    def _over(self) -> bool:
        return self._ale.game_over(with_truncation=False)


class FrameStack:
    """The last S images of 84x84 on the last axis, newest last, in one array that is updated in place."""

    def __init__(self, size: int) -> None:
        self._stack = np.zeros((SIZE, SIZE, size), np.uint8)
        # A pixel's stack seen as one little-endian number moves up by a shift: much cheaper than moving strided bytes.
        self._words = self._stack.view(f"<u{size}") if size in (2, 4, 8) else None

    def fill(self, image: np.ndarray) -> np.ndarray:
        """All places hold ``image`` [84, 84]."""
        self._stack[...] = image[..., np.newaxis]
        return self._stack

    def push(self, image: np.ndarray) -> np.ndarray:
        """``image`` [84, 84] takes the newest place."""
        if self._words is not None:
            np.right_shift(self._words, 8, out=self._words)
        else:
            self._stack[..., :-1] = self._stack[..., 1:]
        self._stack[..., -1] = image
        return self._stack

    def save(self) -> bytes:
        """All images."""
        return self._stack.tobytes()

    def load(self, data: bytes) -> bytes:
        """The reverse of `save`; returns what follows in ``data``. Raises ValueError where there is too little."""
        size = self._stack.nbytes
        self._stack[...] = np.frombuffer(data[:size], np.uint8).reshape(self._stack.shape)
        return data[size:]


def describe(env: str, options: AtariOptions) -> EnvSpec:
    """Starts the emulator once to ask for the game's actions.

    Raises:
      ConfigError: ale-py isn't installed, or has no such game.
    """
    game = find_game(env)
    actions = _action_set(_start_emulator(game), options)
    return EnvSpec(
        env_id=f"atari:{camel(game)}",
        family="atari",
        observation_shape=(SIZE, SIZE, options.frame_stack),
        observation_dtype=np.dtype(np.uint8),
        observation_kind="image",
        action=ActionSpec("discrete", nvec=(len(actions),)),
        frame_skip=options.frame_skip,
        max_episode_steps=options.max_episode_steps,
        has_raw_reward=True,
        has_life_loss=options.terminal_on_life_loss,
        stack=options.frame_stack,
        versions={"ale-py": ale_py.__version__, "opencv": cv2.__version__},
    )


def make(env: str, options: AtariOptions, *, render: bool = False) -> AtariEnvironment:
    """An environment for an executor; it can always draw. Raises what `describe` raises."""
    return AtariEnvironment(find_game(env), options)


def find_game(env: str) -> str:
    """The snake_case name of the game in ``atari:NAME`` or ``ALE/NAME-v5``; case and underscores don't matter."""
    name = re.sub(r"^(atari:|ALE/)|-v\d+$", "", env)
    games = sorted(set(roms.get_all_rom_ids()) - MULTIPLAYER_ONLY)
    by_letters = {game.replace("_", ""): game for game in games}
    letters = name.replace("_", "").replace(" ", "").lower()
    if letters in by_letters:
        return by_letters[letters]
    matches = difflib.get_close_matches(letters, by_letters, n=3)
    hint = f" Did you mean {' or '.join('atari:' + camel(by_letters[match]) for match in matches)}?" if matches else ""
    raise ConfigError(f"ale-py has no single-player game {name!r}.{hint}")


def camel(game: str) -> str:
    """'ms_pacman' as 'MsPacman', the way in which Gymnasium names games."""
    return game.title().replace("_", "")


def _start_emulator(game: str) -> ale_py.ALEInterface:
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", 0)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.setInt("frame_skip", 1)
    path = roms.get_rom_path(game)
    assert path is not None  # `find_game` knows ale-py's games only
    ale.loadROM(path)
    return ale


def _action_set(ale: ale_py.ALEInterface, options: AtariOptions) -> list[ale_py.Action]:
    """The emulator's actions by number; the first is to do nothing."""
    return ale.getLegalActionSet() if options.full_action_space else ale.getMinimalActionSet()


def _resize(frame: np.ndarray) -> np.ndarray:
    return cv2.resize(frame, (SIZE, SIZE), interpolation=cv2.INTER_AREA)
