"""Google Research Football, one player of the left team: ``gfootball`` (an empty goal), ``gfootball:SCENARIO``.

The adapter stands directly on gfootball's core: what an agent would see through ``gfootball.env.create_environment`` is
computed once from the engine's observation, instead of from deep copies that several wrappers take. Observations,
rewards and ends are the same bit for bit.

Every episode has its own engine seed, drawn from the episode's seed; gfootball itself would play the same episode again
after every reset. What gfootball carries from one episode to the next is set anew too: which team is processed first
(it follows the seed) and the episode's number (full games change the side of the kick-off by its parity).

A snapshot (`htsrl.envs.spec.Restorable`) is the engine's own state, without the pickled Python objects that gfootball
would wrap in it, and the few numbers that gfootball and this adapter keep beside the engine.

An episode that runs out of its scenario's time is a termination, as in gfootball and in the paper's experiments: time
is part of the game. ``max_episode_steps`` truncates.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import importlib.metadata
import io
import pkgutil
import warnings

import numpy as np

from htsrl.config import FootballOptions
from htsrl.envs.football_views import HEIGHT, LAYERS, WIDTH, Minimap, Simple115, View, checkpoint_reward, picture
from htsrl.envs.snapshots import pack, unpack
from htsrl.envs.spec import ActionSpec, EnvSpec
from htsrl.errors import ConfigError
from htsrl.rng import Stream, generator

# gym, which gfootball imports for its base class, tells everybody to use Gymnasium.
with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from gfootball import scenarios
    from gfootball.env.config import Config
    from gfootball.env.football_action_set import get_action_set
    from gfootball.env.football_env_core import FootballEnvCore

DEFAULT_SCENARIO = "academy_empty_goal_close"
STACK = 4
MEMORIES = 3


class FootballEnvironment:
    """One engine. The array that ``reset`` and ``step`` return is the same each time."""

    def __init__(self, scenario: str, options: FootballOptions) -> None:
        self._config = _config(scenario)
        self._core = FootballEnvCore(self._config)
        self._core.reset()
        _trim_heap()
        stack = STACK if options.stacked else 1
        self._view: View = Minimap(stack) if options.representation == "extracted" else Simple115(stack)
        self._pays_checkpoints = "checkpoints" in options.rewards
        self._checkpoints = 0
        self._score = 0

    def reset(self, seed: int) -> np.ndarray:
        """A new episode: [72, 96, 4 * stack] uint8 or [115 * stack] float32."""
        rng = generator(seed, Stream.ENVIRONMENT)
        values = self._config._values
        values["game_engine_random_seed"] = int(rng.integers(1 << 31))
        values["episode_number"] = int(rng.integers(2))
        # gfootball derives it from the seed where it is missing, and keeps what is there.
        values.pop("reverse_team_processing", None)
        self._core.reset()
        self._checkpoints = 0
        self._score = 0
        return self._view.fill(self._core._observation)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """One of the 19 default actions; ``info['score']`` is goals scored minus goals conceded so far."""
        observation, goal, done, _ = self._core.step([action])
        self._score += goal
        reward = np.float32(goal)
        if self._pays_checkpoints:
            reward, self._checkpoints = checkpoint_reward(reward, observation, self._checkpoints)
        return self._view.push(observation), float(reward), done, False, {"score": self._score}

    def snapshot(self) -> bytes:
        """35 to 115 KB, more for more players, in 0.3 ms."""
        rules = self._core._state
        facts = {
            "previous_score_diff": rules.previous_score_diff,
            "previous_game_mode": rules.previous_game_mode,
            "prev_ball_owned_team": rules.prev_ball_owned_team,
            "checkpoints": self._checkpoints,
            "score": self._score,
            "view": self._view.save(),
        }
        return pack(facts, self._core._env.get_state(b""))

    def restore(self, snapshot: bytes) -> None:
        facts, engine = unpack(snapshot)
        # Its players remember the last three tenths of a second, each with a mark of the side it is seen from. The
        # engine's state lacks those marks: they are right where there are three memories already.
        for _ in range(MEMORIES):
            self._core._env.step()
        self._core._env.set_state(engine)
        self._core._retrieve_observation()
        rules = self._core._state
        rules.previous_score_diff = facts["previous_score_diff"]
        rules.previous_game_mode = facts["previous_game_mode"]
        rules.prev_ball_owned_team = facts["prev_ball_owned_team"]
        self._checkpoints = facts["checkpoints"]
        self._score = facts["score"]
        self._view.load(facts["view"])

    def render(self) -> np.ndarray:
        """The minimap as [576, 768, 3] uint8 RGB."""
        return picture(self._core._observation)

    def close(self) -> None:
        """Gives the engine back to gfootball, which reuses it for the next environment of this process."""
        self._core.close()


def describe(env: str, options: FootballOptions) -> EnvSpec:
    """Reads the scenario without starting an engine.

    Raises:
      ConfigError: no such scenario, or one in which an agent must control a whole team.
    """
    scenario = find_scenario(env)
    config = _config(scenario)
    if config.ScenarioConfig().control_all_players:
        raise ConfigError(f"gfootball:{scenario} wants all players of a team controlled; htsrl controls one.")
    stack = STACK if options.stacked else 1
    image = options.representation == "extracted"
    return EnvSpec(
        env_id=f"gfootball:{scenario}",
        family="football",
        observation_shape=(HEIGHT, WIDTH, LAYERS * stack) if image else (Simple115.SIZE * stack,),
        observation_dtype=np.dtype(np.uint8 if image else np.float32),
        observation_kind="image" if image else "vector",
        action=ActionSpec("discrete", nvec=(len(get_action_set(config)),)),
        max_episode_steps=options.max_episode_steps,
        has_score=True,
        stack=stack if image else 1,
        sparse=image,
        versions={"gfootball": importlib.metadata.version("gfootball")},
    )


def make(env: str, options: FootballOptions, *, render: bool = False) -> FootballEnvironment:
    """An environment for an executor, with an engine of its own; it can always draw. Raises what `describe` raises."""
    return FootballEnvironment(find_scenario(env), options)


def find_scenario(env: str) -> str:
    """The scenario in ``gfootball`` or ``gfootball:SCENARIO``."""
    scenario = env.partition(":")[2] or DEFAULT_SCENARIO
    known = [module.name for module in pkgutil.iter_modules(scenarios.__path__) if not module.ispkg]
    if scenario not in known:
        matches = difflib.get_close_matches(scenario, known, n=3)
        hint = f"Did you mean {' or '.join(matches)}?" if matches else f"It has {', '.join(known)}."
        raise ConfigError(f"gfootball has no scenario {scenario!r}. {hint}")
    return scenario


def _trim_heap() -> None:
    """Gives what an engine's start and first reset have freed back to the operating system: 10 to 20 of 55 MiB."""
    with contextlib.suppress(AttributeError):  # other C libraries than glibc don't have it
        ctypes.CDLL(None).malloc_trim(0)


def _config(scenario: str) -> Config:
    """gfootball's configuration of one agent on the left, without dumps."""
    return Config(
        {
            "level": scenario,
            "players": ["agent:left_players=1,right_players=0"],
            # With a seed present gfootball draws none from Python's global generator.
            "game_engine_random_seed": 0,
        }
    )
