"""Environments by name, behind one small protocol (`htsrl.envs.spec`). Nothing here imports torch.

| name | family |
| --- | --- |
| ``gfootball``, ``gfootball:SCENARIO`` | `htsrl.envs.football` |
| ``atari:Pong``, ``ALE/Pong-v5`` | `htsrl.envs.atari` |
| ``synthetic:sleep``, ``:counting``, ``:memory``, ``:football`` | `htsrl.envs.synthetic` |
| ``CartPole-v1``, ``module:Id-v0``, any other Gymnasium id | `htsrl.envs.gymnasium_env` |
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Literal

from htsrl.config import FAMILIES, Section
from htsrl.envs.spec import ActionSpec, Environment, EnvSpec, Restorable
from htsrl.errors import ConfigError

__all__ = [
    "ActionSpec",
    "EnvSpec",
    "Environment",
    "Family",
    "Restorable",
    "describe",
    "family_of",
    "make",
    "module_of",
    "options_class",
]

Family = Literal["gymnasium", "atari", "football", "synthetic"]

_PREFIXES: dict[str, Family] = {
    "gfootball:": "football",
    "atari:": "atari",
    "ALE/": "atari",
    "synthetic:": "synthetic",
}
_MODULES: dict[Family, str] = {
    "gymnasium": "htsrl.envs.gymnasium_env",
    "atari": "htsrl.envs.atari",
    "football": "htsrl.envs.football",
    "synthetic": "htsrl.envs.synthetic",
}
_INSTALL: dict[Family, str] = {
    "atari": "Atari games need ale-py and OpenCV: run `pip install 'htsrl[atari]'`",
    "football": (
        "gfootball is not installed: run `make setup` in htsrl's source folder, "
        "which builds its engine once and keeps it"
    ),
}


def family_of(env: str) -> Family:
    """The family that ``env`` belongs to, judged by its name alone."""
    if env == "gfootball":
        return "football"
    return next((family for prefix, family in _PREFIXES.items() if env.startswith(prefix)), "gymnasium")


def options_class(env: str) -> type[Section]:
    """The section of the configuration that describes environments of this family."""
    return FAMILIES[family_of(env)]


def module_of(env: str) -> str:
    """The module that makes ``env``, with everything it imports: what a forkserver should have loaded beforehand."""
    return _MODULES[family_of(env)]


def describe(env: str, options: Any) -> EnvSpec:
    """Everything that the rest of the system needs to know about ``env``; builds it at most once, to close it again.

    Raises:
      ConfigError: unknown name, package that isn't installed, space that isn't supported, options of another family.
    """
    return _module(env, options).describe(env, options)


def make(env: str, options: Any, *, render: bool = False, masked: bool = False) -> Environment:
    """One environment for an executor; with ``render`` one that can draw. Raises what `describe` raises.

    ``masked`` is what its description says of ``mask_in_info``, which only Gymnasium's environments have.
    """
    masks = {"masked": True} if masked else {}
    return _module(env, options).make(env, options, render=render, **masks)


def _module(env: str, options: Any) -> ModuleType:
    """The family's module: imported on first use, so that a missing package matters only to those who want it."""
    family = family_of(env)
    if not isinstance(options, FAMILIES[family]):
        raise ConfigError(f"{env} takes {FAMILIES[family].__name__}, got {type(options).__name__}.")
    try:
        return importlib.import_module(_MODULES[family])
    except ImportError as error:
        if family not in _INSTALL:
            raise
        raise ConfigError(f"{_INSTALL[family]} ({error}).") from error
