"""Any environment that is registered with Gymnasium: ``CartPole-v1``, ``module:Id-v0`` (the module is imported first).

Gymnasium's outermost wrappers (PassiveEnvChecker, OrderEnforcing, TimeLimit) aren't applied: the executor checks what
it stores, resets in order and counts steps itself. Wrappers of the environment's own registration stay, and an
environment that returns ``truncated`` itself is believed. Every episode starts with ``reset(seed=...)``. One that has
methods ``snapshot`` and ``restore`` lets long episodes be resumed without replaying them, see
`htsrl.envs.spec.Restorable`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np

from htsrl.config import GymnasiumOptions
from htsrl.envs import checks
from htsrl.envs.spaces import Actions, Observations, encode_actions, encode_observations
from htsrl.envs.spec import EnvSpec, Restorable, seed31
from htsrl.errors import ConfigError
from htsrl.usercode import import_module

StepResult = tuple[np.ndarray, float, bool, bool, dict]


class GymnasiumEnvironment:
    """A Gymnasium environment behind the executor's protocol; ``step`` is its own where nothing converts."""

    step: Callable[[Any], StepResult]
    snapshot: Callable[[], bytes]
    restore: Callable[[bytes], None]

    def __init__(
        self, env: gymnasium.Env, observations: Observations, actions: Actions, reward_scale: float = 1.0
    ) -> None:
        self._env = env
        self._encode = observations.encode
        self._decode = actions.decode
        self._reward_scale = reward_scale
        converts = self._encode is not None or self._decode is not None or reward_scale != 1.0
        self.step = self._converting_step if converts else env.step  # type: ignore[assignment]
        if callable(getattr(env, "snapshot", None)) and callable(getattr(env, "restore", None)):
            self.snapshot, self.restore = env.snapshot, env.restore  # type: ignore[attr-defined]

    def reset(self, seed: int) -> np.ndarray:
        observation, _ = self._env.reset(seed=seed31(seed))
        return observation if self._encode is None else self._encode(observation)

    def _converting_step(self, action: Any) -> StepResult:
        if self._decode is not None:
            action = self._decode(action)
        observation, reward, terminated, truncated, info = self._env.step(action)
        if self._encode is not None:
            observation = self._encode(observation)
        if self._reward_scale != 1.0:
            info = {**info, "raw_reward": reward}
            reward = float(reward) * self._reward_scale
        return observation, reward, terminated, truncated, info  # type: ignore[return-value]

    def render(self) -> np.ndarray | None:
        """What the environment draws, if it was made to."""
        return self._env.render()  # type: ignore[return-value]

    def close(self) -> None:
        self._env.close()


def describe(env: str, options: GymnasiumOptions) -> EnvSpec:
    """Builds the environment once, plays one step to see that it keeps its own promises, and closes it.

    Raises:
      ConfigError: unknown id, module that can't be imported, environment that can't be built or doesn't return what its
        spaces say, space that isn't supported.
    """
    registered = _registered(env)
    built = _build(env, registered)
    try:
        observations = encode_observations(built.observation_space, env)
        actions = encode_actions(built.action_space, env)
        _try_out(env, GymnasiumEnvironment(built, observations, actions), observations, actions)
        versions = _versions(built)
    finally:
        built.close()
    limit = options.max_episode_steps or registered.max_episode_steps
    return EnvSpec(
        env_id=env,
        family="gymnasium",
        observation_shape=observations.shape,
        observation_dtype=observations.dtype,
        observation_kind=observations.kind,
        action=actions.spec,
        max_episode_steps=limit,
        has_raw_reward=options.reward_scale != 1.0,
        versions=versions,
    )


def make(env: str, options: GymnasiumOptions, *, render: bool = False) -> GymnasiumEnvironment:
    """An environment for an executor. Raises what `describe` raises."""
    with warnings.catch_warnings():
        # `describe` has shown them, in the process that talks to a person.
        warnings.simplefilter("ignore")
        built = _build(env, _registered(env), render)
    return GymnasiumEnvironment(
        built,
        encode_observations(built.observation_space, env),
        encode_actions(built.action_space, env),
        options.reward_scale,
    )


def _registered(env: str) -> Any:
    """Gymnasium's registration of ``env``, after importing the module that it names."""
    module, _, name = env.rpartition(":")
    if module:
        _import(env, module)
    if name not in gymnasium.registry:
        matches = difflib.get_close_matches(name, gymnasium.registry, n=3)
        hint = f" Did you mean {' or '.join(matches)}?" if matches else ""
        if not module:
            hint += " Atari games are named atari:Pong; your own environment module:Id-v0, to import its module first."
        raise ConfigError(f"Gymnasium has no environment {name!r}.{hint}")
    return gymnasium.registry[name]


def _import(env: str, module: str) -> None:
    try:
        import_module(module)
    except Exception as error:
        raise ConfigError(f"{env}: the module {module!r} can't be imported: {type(error).__name__}: {error}") from error


def _build(env: str, registered: Any, render: bool = False) -> gymnasium.Env:
    """The environment under the wrappers of its registration, without Gymnasium's own."""
    bare = copy.copy(registered)
    bare.order_enforce = False
    bare.max_episode_steps = None
    try:
        with _mujoco_warnings(registered):
            if render:
                return gymnasium.make(bare, disable_env_checker=True, render_mode="rgb_array")
            return gymnasium.make(bare, disable_env_checker=True)
    except Exception as error:
        hint = " MuJoCo comes with `pip install 'htsrl[mujoco]'`." if "mujoco" in str(error).lower() else ""
        raise ConfigError(f"{env} can't be built: {type(error).__name__}: {error}{hint}") from error


@contextlib.contextmanager
def _mujoco_warnings(registered: Any) -> Iterator[None]:
    """MuJoCo's complaints about its own models as Python warnings, not as lines on stderr and a log file."""
    if "mujoco" not in str(registered.entry_point):
        yield
        return
    try:
        import mujoco
    except ImportError:
        yield  # Gymnasium says what is missing
        return
    handler = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: warnings.warn(message, stacklevel=2))
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(handler)


def _try_out(env: str, environment: GymnasiumEnvironment, observations: Observations, actions: Actions) -> None:
    """One reset and one step; an environment that breaks the API is refused with what it did."""
    try:
        checks.observation(environment.reset(0), observations.shape, observations.dtype)
        observation, reward, terminated, truncated, info = environment.step(_any_action(actions))
        checks.observation(observation, observations.shape, observations.dtype)
        checks.number("reward", reward)
        checks.flag("terminated", terminated)
        checks.flag("truncated", truncated)
        dict(info)
        if isinstance(environment, Restorable) and not isinstance(snapshot := environment.snapshot(), bytes):
            raise TypeError(f"snapshot() must return bytes, got {type(snapshot).__name__}")
    except Exception as error:
        raise ConfigError(
            f"{env}: a reset and a step with Gymnasium's API failed: {type(error).__name__}: {error}"
        ) from error


def _any_action(actions: Actions) -> Any:
    """Some action of the space, in the form in which an executor passes it."""
    spec = actions.spec
    if spec.kind == "discrete":
        return spec.start
    if spec.kind == "multi_discrete":
        return np.zeros(spec.shape, np.int64)
    return np.clip(np.zeros(len(spec.low), np.float32), spec.low, spec.high).astype(np.float32).reshape(spec.shape)


def _versions(env: gymnasium.Env) -> dict[str, str]:
    """Versions of Gymnasium, of the package that holds the environment, and of MuJoCo where it is used."""
    packages = {"gymnasium", type(env.unwrapped).__module__.partition(".")[0]}
    # Not by what is loaded: another environment may have loaded it, and a resumed run would miss it
    if any("mujoco" in base.__module__ for base in type(env.unwrapped).__mro__):
        packages.add("mujoco")
    versions = {}
    for package in sorted(packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # a module of the user's own, without a version
    return versions
