"""TOML files: ``--config`` reads them, and a run's folder holds the resolved one.

Keys ``algo``, ``env``, ``total_steps`` and ``seed`` stand above the tables ``[algorithm]``, ``[environment]``,
``[network]``, ``[runtime]`` and ``[output]``.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from htsrl.config import AnyConfig
from htsrl.errors import ConfigError
from htsrl.rundir import write_atomically
from htsrl.settings import SECTIONS, TOP, Layer, every_setting, near, resolve, shown

_MOST_BYTES = 1 << 20


def load_config(path: Path | str) -> AnyConfig:
    """Read a TOML file: one written by :func:`to_toml` comes back equal, in others presets fill the gaps.

    Raises:
        ConfigError: the file can't be read, or a key or value in it is refused.
    """
    return resolve([toml_layer(Path(path))])


def to_toml(config: AnyConfig) -> str:
    """``config`` as a TOML document. TOML has no null: a setting that is off reads ``"none"``."""
    lines = [f"{name} = {_toml_value(getattr(config, name))}" for name in TOP]
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {_toml_value(value)}" for name, value in getattr(config, section)]
    return "\n".join(lines) + "\n"


def save_config(config: AnyConfig, path: Path) -> None:
    """Write ``config`` to ``path`` as a whole or not at all."""
    write_atomically(path, to_toml(config).encode())


def toml_layer(path: Path) -> Layer:
    """The settings in a TOML file, each checked to stand in its own table.

    Raises:
        ConfigError: no such file, not TOML, an unknown table, or a key in the wrong one.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"{path} is no configuration: it is larger than {_MOST_BYTES >> 20} MiB")
        document = tomllib.loads(content.decode("utf-8"))
        json.dumps(document, default=str)  # refuses numbers of thousands of digits, which nothing could print either
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None

    values: dict[str, Any] = {}
    written_in: dict[str, str | None] = {}
    for key, value in document.items():
        if key in SECTIONS and not isinstance(value, dict):
            raise ConfigError(f"{key} in {path} must be a table, [{key}], got {shown(value)}")
        if isinstance(value, dict) and key not in SECTIONS:
            guess = near(key, SECTIONS)
            hint = f"did you mean [{guess}]?" if guess else f"the tables are {', '.join(f'[{s}]' for s in SECTIONS)}"
            raise ConfigError(f"[{key}] in {path} is not known; {hint}")
        for name, each in value.items() if isinstance(value, dict) else [(key, value)]:
            section = key if isinstance(value, dict) else None
            known = every_setting().get(name)
            if known and known.section != section:
                place = f"in [{known.section}]" if known.section else "above all tables"
                raise ConfigError(f"{name} in {path} belongs {place}")
            values[name], written_in[name] = each, section

    def spell(name: str) -> str:
        section = written_in[name] if name in written_in else every_setting()[name].section
        return f"{section}.{name} in {path}" if section else f"{name} in {path}"

    return Layer(values, spell)


def _toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml_value(each) for each in value)}]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\u{ord(found[0]):04x}", escaped) + '"'
