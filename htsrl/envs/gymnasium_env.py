"""Any environment that is registered with Gymnasium: ``CartPole-v1``, ``module:Id-v0`` (the module is imported first).

Gymnasium's outermost wrappers (PassiveEnvChecker, OrderEnforcing, TimeLimit) aren't applied: the executor checks what
it stores, resets in order and counts steps itself. Wrappers of the environment's own registration stay, and an
environment that returns ``truncated`` itself is believed. Every episode starts with ``reset(seed=...)``. One that has
methods ``snapshot`` and ``restore`` lets long episodes be resumed without replaying them, see
`htsrl.envs.spec.Restorable`.

Where ``info`` of the first reset holds an ``action_mask``, and the observation does not, every observation is packed
with the mask of its ``info``, see `htsrl.envs.packing`. A mask may allow nothing only where the episode is over.
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
from gymnasium import spaces

from htsrl.config import GymnasiumOptions
from htsrl.envs import checks
from htsrl.envs.checks import ACTION_MASK
from htsrl.envs.packing import refuse_unfit_mask
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
        self,
        env: gymnasium.Env,
        observations: Observations,
        actions: Actions,
        reward_scale: float = 1.0,
        masked: bool = False,
    ) -> None:
        self._env = env
        self._encode = observations.encode
        self._decode = actions.decode
        self._masked = masked
        self._mask = observations.mask
        self._choices = np.cumsum([0, *actions.spec.nvec[:-1]])  # where each component's begin in a mask
        self._reward_scale = reward_scale
        converts = self._encode is not None or self._decode is not None or reward_scale != 1.0
        self.step = self._converting_step if converts else env.step  # type: ignore[assignment]
        if callable(getattr(env, "snapshot", None)) and callable(getattr(env, "restore", None)):
            self.snapshot, self.restore = env.snapshot, env.restore  # type: ignore[attr-defined]

    def reset(self, seed: int) -> np.ndarray:
        observation, info = self._env.reset(seed=seed31(seed))
        if self._mask is None:
            checks.no_mask(info)
        return observation if self._encode is None else self._encoded(observation, info, over=False)

    def _converting_step(self, action: Any) -> StepResult:
        if self._decode is not None:
            action = self._decode(action)
        observation, reward, terminated, truncated, info = self._env.step(action)
        if self._encode is not None:
            observation = self._encoded(observation, info, over=bool(terminated or truncated))
        if self._reward_scale != 1.0:
            info = {**info, "raw_reward": reward}
            reward = float(reward) * self._reward_scale
        return observation, reward, terminated, truncated, info  # type: ignore[return-value]

    def _encoded(self, observation: Any, info: Any, over: bool) -> np.ndarray:
        """``observation`` as it is stored, with its mask; a mask may allow nothing only where the episode is over."""
        assert self._encode is not None
        if self._masked:
            if ACTION_MASK not in info:
                raise ValueError(f"the environment returned no info[{ACTION_MASK!r}], which came with its first reset")
            observation = {"observation": observation, ACTION_MASK: info[ACTION_MASK]}
        row = self._encode(observation)
        if self._mask is not None and not over:
            checks.some_action(row[self._mask.bytes], self._choices)
        return row

    def render(self) -> np.ndarray | None:
        """What the environment draws, if it was made to."""
        return self._env.render()  # type: ignore[return-value]

    def close(self) -> None:
        self._env.close()


def describe(env: str, options: GymnasiumOptions) -> EnvSpec:
    """Builds the environment once, resets it and plays one step to see that it keeps its own promises, and closes it.

    Raises:
      ConfigError: unknown id, module that can't be imported, environment that can't be built or doesn't return what its
        spaces say, space that isn't supported.
    """
    registered = _registered(env)
    built = _build(env, registered)
    try:
        actions = encode_actions(built.action_space, env)
        observations = _observations(env, built, actions)
        masked = observations.mask is None and _mask_in_info(env, built)
        if masked:
            observations = _observations(env, built, actions, masked)
        _try_out(env, GymnasiumEnvironment(built, observations, actions, masked=masked), observations, actions)
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
        parts=observations.parts,
        mask_in_info=masked,
    )


def make(env: str, options: GymnasiumOptions, *, render: bool = False, masked: bool = False) -> GymnasiumEnvironment:
    """An environment for an executor; ``masked`` is its spec's ``mask_in_info``. Raises what `describe` raises."""
    with warnings.catch_warnings():
        # `describe` has shown them, in the process that talks to a person.
        warnings.simplefilter("ignore")
        built = _build(env, _registered(env), render)
    actions = encode_actions(built.action_space, env)
    observations = _observations(env, built, actions, masked)
    return GymnasiumEnvironment(built, observations, actions, options.reward_scale, masked)


def _observations(env: str, built: gymnasium.Env, actions: Actions, masked: bool = False) -> Observations:
    """The stored form of its observations; ``masked`` ones are packed with the mask that ``info`` holds."""
    space = built.observation_space
    if masked:
        space = spaces.Dict({"observation": space, ACTION_MASK: spaces.MultiBinary(max(sum(actions.spec.nvec), 1))})
    observations = encode_observations(space, env)
    refuse_unfit_mask(observations.mask, actions.spec, env)
    return observations


def _mask_in_info(env: str, built: gymnasium.Env) -> bool:
    """Whether ``info`` of a reset holds an action mask."""
    with _refused_where_it_fails(env):
        _, info = built.reset(seed=0)
        return bool(info) and ACTION_MASK in info


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
    with _refused_where_it_fails(env):
        first = checks.observation(environment.reset(0), observations.shape, observations.dtype)
        observation, reward, terminated, truncated, info = environment.step(_any_action(actions, observations, first))
        checks.observation(observation, observations.shape, observations.dtype)
        checks.number("reward", reward)
        checks.flag("terminated", terminated)
        checks.flag("truncated", truncated)
        dict(info)
        if observations.mask is None:
            checks.no_mask(info)
        if isinstance(environment, Restorable) and not isinstance(snapshot := environment.snapshot(), bytes):
            raise TypeError(f"snapshot() must return bytes, got {type(snapshot).__name__}")


@contextlib.contextmanager
def _refused_where_it_fails(env: str) -> Iterator[None]:
    """ConfigError with whatever the environment raises."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"{env}: a reset and a step with Gymnasium's API failed: {type(error).__name__}: {error}"
        ) from error


def _any_action(actions: Actions, observations: Observations, first: np.ndarray) -> Any:
    """Some action that is allowed after the ``first`` observation, in the form in which an executor passes it."""
    spec = actions.spec
    if spec.nvec:
        mask = np.ones(sum(spec.nvec)) if observations.mask is None else first[observations.mask.bytes]
        chosen = [int(choices.argmax()) for choices in np.split(mask, np.cumsum(spec.nvec)[:-1])]
        return chosen[0] + spec.start if spec.kind == "discrete" else np.array(chosen).reshape(spec.shape)
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
