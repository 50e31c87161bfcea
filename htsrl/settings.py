"""From names and values, wherever a person wrote them, to one validated configuration.

Layers are laid over each other: preset, TOML file, flags (or keyword arguments). Setting names are unique over all
sections, so a layer is a flat mapping. Whatever is wrong becomes a :class:`ConfigError` of plain sentences that spell a
setting as its layer does: ``--num-envs`` for a flag, ``runtime.num_envs in exp.toml`` for a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from htsrl.config import ALGORITHMS, FAMILIES, AnyConfig, Config
from htsrl.errors import ConfigError
from htsrl.presets import preset

SECTIONS = ("algorithm", "environment", "network", "runtime", "output")
"""Tables of a TOML file, in the order in which they are written."""
TOP = ("algo", "env", "total_steps", "seed")
"""Keys above the tables."""

FAMILY_WORDS = {
    "gymnasium": ("Gymnasium", "CartPole-v1"),
    "atari": ("Atari", "atari:Pong"),
    "football": ("football", "gfootball"),
    "synthetic": ("synthetic", "synthetic:sleep"),
}
"""How messages call a family, and an example."""


@dataclass(frozen=True)
class Layer:
    """Settings by name from one place, and how that place spells a name."""

    values: Mapping[str, Any]
    spell: Callable[[str], str]


def configure(env: str = "gfootball", algo: str = "ppo", **settings: Any) -> AnyConfig:
    """The configuration of a run, from the preset of ``algo`` on ``env`` and any setting by name.

    Names are those of ``htsrl train``: ``configure("CartPole-v1", num_envs=8, learning_rate=1e-3)``.

    Raises:
        ConfigError: a setting is unknown or has a value that it can't have.
    """
    return resolve([Layer({"env": env, "algo": algo, **settings}, lambda name: name)])


def resolve(layers: Sequence[Layer]) -> AnyConfig:
    """Lay ``layers`` over the preset of the algorithm and environment they name, later ones on top, and validate.

    Raises:
        ConfigError: as many sentences as there are faults.
    """
    from htsrl.envs import family_of

    algo, env = (_named(name, layers) for name in ("algo", "env"))
    if algo not in ALGORITHMS:
        spelled = next(layer.spell("algo") for layer in reversed(layers) if "algo" in layer.values)
        raise ConfigError(f"{spelled} must be one of {', '.join(ALGORITHMS)}, got {algo}")
    family = family_of(env)
    config_class = Config[FAMILIES[family], ALGORITHMS[algo]]  # type: ignore[valid-type]
    where = catalogue(config_class)
    for layer in layers:
        for name in layer.values:
            if name not in where:
                raise ConfigError(_unknown(name, layer.spell, where, algo, env, family))

    merged: dict[str, Any] = {"algo": algo, "env": env, **preset(family, algo, env)}
    spelling: dict[str, Callable[[str], str]] = {}
    for layer in layers:
        merged |= layer.values
        spelling |= dict.fromkeys(layer.values, layer.spell)

    nested: dict[str, Any] = {section: {} for section in SECTIONS}
    for name, value in merged.items():
        section = where[name]
        (nested[section] if section else nested)[name] = value
    try:
        return config_class(**nested)
    except ValidationError as error:
        fallback = layers[-1].spell
        faults = _sentences(error, config_class, lambda name: spelling.get(name, fallback)(name))
        raise ConfigError("\n".join(faults)) from None


def overlay(config: AnyConfig, changes: Layer) -> AnyConfig:
    """``config`` with ``changes`` on top, validated.

    Raises:
        ConfigError: a change is unknown or has a value that it can't have.
    """
    return resolve([Layer(flat(config), lambda name: name), changes])


def flat(config: AnyConfig) -> dict[str, Any]:
    """Every setting of ``config`` by name."""
    places = catalogue(type(config)).items()
    return {name: getattr(getattr(config, section) if section else config, name) for name, section in places}


def catalogue(config_class: type[Config[Any, Any]]) -> dict[str, str | None]:
    """Every setting of ``config_class`` by name, with its section; None for the keys above all sections."""
    names: dict[str, str | None] = dict.fromkeys(TOP)
    for section in SECTIONS:
        names |= dict.fromkeys(section_class(config_class, section).model_fields, section)
    return names


@dataclass(frozen=True)
class Setting:
    """A setting of some algorithm or family."""

    section: str | None
    """Its table in a TOML file; None above all tables."""
    annotation: Any


@cache
def every_setting() -> dict[str, Setting]:
    """Every setting of every algorithm and family, by name."""
    sections: list[tuple[str, type[BaseModel]]] = [
        *(("algorithm", each) for each in ALGORITHMS.values()),
        *(("environment", each) for each in FAMILIES.values()),
        *((shared, section_class(Config, shared)) for shared in ("network", "runtime", "output")),
    ]
    settings = {name: Setting(None, Config.model_fields[name].annotation) for name in TOP}
    for section, options in sections:
        settings |= {name: Setting(section, field.annotation) for name, field in options.model_fields.items()}
    return settings


def near(word: str, known: Iterable[str]) -> str | None:
    """The member of ``known`` that ``word`` is most likely a misspelling of."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


# ---------------------------------------------------------------------------------------------------------- messages


def _named(name: str, layers: Sequence[Layer]) -> str:
    found = [layer.values[name] for layer in layers if name in layer.values]
    return str(found[-1] if found else Config.model_fields[name].default)


def _unknown(
    name: str, spell: Callable[[str], str], where: Mapping[str, str | None], algo: str, env: str, family: str
) -> str:
    """Why ``name`` is refused: it belongs to another algorithm or family, is misspelt, or means nothing."""
    spelled = spell(name)
    algorithms = [each for each, options in ALGORITHMS.items() if name in options.model_fields]
    if algorithms:
        return f"{spelled} is a setting of {' and '.join(algorithms)}, and this run uses {algo}"
    families = [FAMILY_WORDS[each][0] for each, options in FAMILIES.items() if name in options.model_fields]
    if families:
        return f"{spelled} is a setting of {' and '.join(families)} environments, and {env} is a {_word(family)} one"
    guess = near(name, where)
    if guess:
        return f"{spelled} is not known; did you mean {spell(guess).partition(' in ')[0]}?"
    return f"{spelled} is not known; `htsrl train --help` lists all settings"


def _word(family: str) -> str:
    return FAMILY_WORDS[family][0]


def _sentences(error: ValidationError, config_class: type[Config[Any, Any]], spell: Callable[[str], str]) -> list[str]:
    """One sentence per setting that ``error`` complains about."""
    faults: dict[str, list[Any]] = {}
    sentences = []
    for fault in error.errors(include_url=False):
        if fault["type"] == "refused":  # by a validator of ours: it names the settings in backticks
            sentences.append(re.sub(r"`(\w+)`", lambda found: spell(found[1]), fault["msg"]))
        else:
            path = [str(part) for part in fault["loc"]]
            faults.setdefault(path[1] if path[0] in SECTIONS and len(path) > 1 else path[0], []).append(fault)
    for name, found in faults.items():
        section = catalogue(config_class)[name]
        owner = section_class(config_class, section) if section else config_class
        field = owner.model_fields[name]
        out_of_range = any(fault["type"].startswith(("greater_than", "less_than")) for fault in found)
        allowed = _allowed_number(field.annotation, field.metadata, out_of_range) or _allowed(
            field.annotation, out_of_range
        )
        sentences.append(f"{spell(name)} must be {allowed}, got {shown(found[0]['input'])}")
    return sentences


def section_class(config_class: type[BaseModel], section: str) -> type[BaseModel]:
    """The options class of one section; of an unparametrised ``Config``, only the shared sections have one."""
    annotation = config_class.model_fields[section].annotation
    assert isinstance(annotation, type), (config_class, section)
    return annotation


def _allowed(annotation: Any, brief: bool = False) -> str:
    """What a value of type ``annotation`` may be, in words; ``brief`` leaves out that numbers are numbers."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed_number(arguments[0], arguments[1:], brief) or _allowed(arguments[0], brief)
    if origin in (Union, UnionType):
        return " or ".join(_allowed(each, brief) for each in arguments)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin is tuple:
        return f"a list, each {_allowed(arguments[0])}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    return "none" if annotation is type(None) else words.get(annotation, "something else")


def _allowed_number(kind: Any, constraints: Iterable[Any], brief: bool) -> str | None:
    bounds: dict[str, Any] = {}
    for constraint in constraints:
        for each in (constraint, *getattr(constraint, "metadata", ())):  # nested in unions, pydantic keeps a FieldInfo
            for bound in ("gt", "ge", "lt", "le"):
                value = getattr(each, bound, None)
                if value is not None:
                    bounds[bound] = value
    if not bounds:
        return None
    if kind is int and "gt" in bounds:
        bounds["ge"] = bounds.pop("gt") + 1
    if {"ge", "le"} <= bounds.keys():
        limits = f"between {bounds['ge']:g} and {bounds['le']:g}"
    else:
        words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
        limits = " and ".join(f"{words[bound]} {value:g}" for bound, value in bounds.items())
    if brief:
        return limits
    noun = "a whole number" if kind is int else "a number"
    return f"{noun} {limits}" if limits.startswith(("between", "greater")) else f"{noun} of {limits}"


def shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return (text if len(text) <= 60 else text[:57] + "...") or "nothing"
