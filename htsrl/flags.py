"""The flags of ``htsrl train``, made from the configuration's models: every setting is a flag without a prefix."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, get_origin

from htsrl.config import AnyConfig
from htsrl.errors import ConfigError
from htsrl.settings import Layer, every_setting


@dataclass
class Flags:
    """What a command line says."""

    values: dict[str, Any] = field(default_factory=dict)
    """Settings by name, as text (True or False for switches, a list of texts for lists)."""
    config_file: Path | None = None
    help: bool = False

    def layer(self) -> Layer:
        """These settings, spelt as flags."""
        return Layer(self.values, lambda name: f"--{name.replace('_', '-')}")


def parse(arguments: Sequence[str]) -> Flags:
    """Read ``--name value``, ``--name=value``, ``--switch``, ``--no-switch`` and ``--list 1 2``; the last one counts.

    Values stay text and unknown names stay in: what they may be depends on the algorithm and environment, which only
    the whole line tells.

    Raises:
        ConfigError: an argument that belongs to no flag, or a flag without its value.
    """
    flags = Flags()
    switches, lists = _names_of(bool), _names_of(tuple)
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if token in ("-h", "--help"):
            flags.help = True
            continue
        if not token.startswith("--") or token == "--":
            raise ConfigError(f"unexpected argument {token}: options look like --env CartPole-v1")
        text, given, value = token[2:].partition("=")
        name = text.replace("-", "_")
        if name.removeprefix("no_") in switches and not given:
            flags.values[name.removeprefix("no_")] = not name.startswith("no_")
            if rest and rest[0].lower() in ("true", "false"):
                raise ConfigError(f"--{text} takes no value: write --{text} or --no-{text}")
        elif name in lists:
            values = [value] if given else _take_while_values(rest)
            flags.values[name] = [each for item in values for each in item.split(",") if each] or _needs_value(text)
        else:
            if not given and rest and not rest[0].startswith("--"):
                value, given = rest.pop(0), "="
            if name == "config":
                flags.config_file = Path(value) if given else _needs_value(text)
            else:  # an unknown flag is refused later, with or without a value
                flags.values[name] = value if given or name not in every_setting() else _needs_value(text)
    return flags


def show_help(config: AnyConfig, description: str) -> None:
    """Print all options of ``config``'s algorithm and environment, with its values as the defaults."""
    import tyro
    from pydantic import Field, create_model

    # A model without type parameters, and with the one flag that is no setting, put where it is seen.
    fields: dict[str, Any] = {
        name: (field.annotation, Field(getattr(config, name), description=field.description))
        for name, field in type(config).model_fields.items()
    }
    fields["config"] = (Path | None, Field(None, description="TOML file with settings; flags override it."))
    with contextlib.suppress(SystemExit):
        tyro.cli(
            create_model("Settings", **fields),
            prog="htsrl train",
            description=description,
            args=["--help"],
            config=(tyro.conf.OmitArgPrefixes,),
        )


@cache
def _names_of(kind: type) -> frozenset[str]:
    """Names of the settings whose type is ``kind``."""
    settings = every_setting().items()
    return frozenset(name for name, each in settings if (get_origin(each.annotation) or each.annotation) is kind)


def _take_while_values(rest: list[str]) -> list[str]:
    taken = []
    while rest and not rest[0].startswith("--"):
        taken.append(rest.pop(0))
    return taken


def _needs_value(flag: str) -> NoReturn:
    raise ConfigError(f"--{flag} needs a value")
