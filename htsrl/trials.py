"""The runs that ``htsrl verify`` compares, from what a person asks for. Needs no torch: refusals come at once."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from htsrl.config import AnyConfig
from htsrl.errors import ConfigError
from htsrl.settings import Layer, every_setting, flat, near, resolve, shown

DEFAULT_LAYOUTS = ((1, 1), (2, 2), (4, 1))
"""Executors x actors; fewer where the configuration has fewer replicas or a single actor."""
DEFAULT_INTERVALS = 4
"""Without --total-steps. Under 'hts' an interval is collected with what was learned two intervals before it."""
DEFAULT_DELAY_MS = 2.0
LONGEST_DELAY_MS = 10_000.0


@dataclass(frozen=True)
class Trial:
    """One way to run a configuration, on which no bit may depend."""

    layout: str
    """Executors x actors, as a person wrote it: '2x2', '2x2x1'."""
    config: AnyConfig
    """With that layout."""
    delay_ms: float = 0.0
    """The longest of the random pauses in executors, actors and learner."""
    kills: bool = False
    """Executors and actors are killed or stopped at random moments."""

    @property
    def disturbed(self) -> str:
        """What disturbs this run, in a word or two."""
        delays = [f"delays to {self.delay_ms:g} ms"] if self.delay_ms else []
        return ", ".join([*delays, *(["kills"] if self.kills else [])]) or "-"


@dataclass(frozen=True)
class VerifyOptions:
    """The options of ``htsrl verify`` that are no settings of a run."""

    layouts: str | None
    delay_ms: float
    kills: bool
    against: Path | None
    json: bool


def take_options(values: dict[str, Any]) -> VerifyOptions:
    """Take the options of ``htsrl verify`` out of ``values``, which the command line gave as text.

    Raises:
        ConfigError: one has no value, or one that it can't have; or something left over is a misspelling of one.
    """
    options = ("layouts", "delays", "kills", "against", "json")
    found = {name: values.pop(name, None) for name in options}
    for name in ("layouts", "against"):
        if found[name] == "":
            raise ConfigError(f"--{name} needs a value")
    for name in ("kills", "json"):
        if found[name]:
            raise ConfigError(f"--{name} takes no value, got {found[name]}")
    if "layout" in values:
        raise ConfigError("--layout is for `htsrl train`: here every layout stays as it is; did you mean --layouts?")
    for name in values.keys() - every_setting().keys():
        guess = near(name, options)
        if guess:
            raise ConfigError(f"--{name.replace('_', '-')} is not known; did you mean --{guess}?")
    delays, against = found["delays"], found["against"]
    return VerifyOptions(
        layouts=found["layouts"],
        delay_ms=0.0 if delays is None else delay(delays) if delays else DEFAULT_DELAY_MS,
        kills=found["kills"] is not None,
        against=None if against is None else Path(against),
        json=found["json"] is not None,
    )


def delay(text: str) -> float:
    """Milliseconds.

    Raises:
        ConfigError: not a number that makes sense.
    """
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0.0 < milliseconds <= LONGEST_DELAY_MS:
        raise ConfigError(
            f"--delays must be a number of milliseconds above 0, at most {LONGEST_DELAY_MS:g}, got {text}"
        )
    return milliseconds


def plan(config: AnyConfig, layouts: str | None, delay_ms: float, kills: bool = False) -> list[Trial]:
    """The trials of ``config``; the first is the reference: the first layout, undisturbed.

    With delays or kills, every layout runs with them, the first one, too. ``layouts`` None stands for DEFAULT_LAYOUTS.

    Raises:
        ConfigError: a layout is not one, or does not fit the configuration; or there is nothing to compare.
    """
    if config.runtime.schedule == "async":
        raise ConfigError("htsrl verify is for --schedule hts and sync: an async run never repeats itself")
    names = [default_layout(config, *each) for each in DEFAULT_LAYOUTS] if layouts is None else layouts.split(",")
    if layouts is None:
        names = list(dict.fromkeys(names))
    trials = [Trial(name, with_layout(config, name)) for name in names]
    if delay_ms or kills:
        trials = [trials[0], *(Trial(each.layout, each.config, delay_ms, kills) for each in trials)]
    if len(trials) < 2:
        raise ConfigError(
            "--layouts needs two layouts to compare, as in --layouts 1x1,2x2, or --delays or --kills beside one"
        )
    return trials


def with_layout(config: AnyConfig, name: str) -> AnyConfig:
    """``config`` with the layout ``name``: executors x actors, or executors x actors x replicas per group.

    Raises:
        ConfigError: that is not a layout, or it does not fit.
    """
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*)?", name):
        raise ConfigError(
            f"--layouts must be executors x actors, as in 1x1,2x2, or with replicas per group as in 2x2x1, "
            f"got {shown(name)}"
        )
    numbers = name.split("x")
    changes = dict(zip(("num_executors", "num_actors", "envs_per_group"), [*numbers, "auto"])) | {"layout": "rule"}

    def spell(setting: str) -> str:
        return f"--{setting.replace('_', '-')}"

    try:
        return resolve([Layer(flat(config), spell), Layer(changes, spell)])
    except ConfigError as error:
        raise ConfigError(f"--layouts {name}: {error}") from None


def default_layout(config: AnyConfig, executors: int, actors: int) -> str:
    """The nearest layout that fits ``config``."""
    most = config.runtime.num_envs
    return f"{min(executors, most)}x{1 if config.runtime.schedule == 'sync' else min(actors, most)}"


def with_total_steps(config: AnyConfig, layers: Sequence[Layer]) -> AnyConfig:
    """``config``, with a budget of DEFAULT_INTERVALS intervals if none of ``layers`` names one."""
    if any("total_steps" in layer.values for layer in layers):
        return config
    steps = DEFAULT_INTERVALS * config.runtime.num_envs * config.runtime.sync_interval
    return config.model_copy(update={"total_steps": steps})


def with_other_seed(config: AnyConfig) -> AnyConfig:
    """``config`` with the seed after its own."""
    return config.model_copy(update={"seed": config.seed + 1})
