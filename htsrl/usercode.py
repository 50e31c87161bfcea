"""Modules of the user's own, named on the command line: ``module:Id-v0``, ``module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from htsrl.errors import ConfigError


def refuse_code_in(run_dir: Path, env: str, network: str) -> None:
    """Refuse modules, named by the configuration of ``run_dir``, that lie in that folder: a run's folder is data.

    Whoever is given a run means to look at numbers. The modules of one's own lie elsewhere: where they are installed,
    or in the current folder.

    Raises:
        ConfigError: naming the module and where it lies.
    """
    folder = run_dir.resolve()
    for named in (env, network):
        module, colon, _ = named.rpartition(":")
        top = module.partition(".")[0]
        for place in _places(top) if colon else ():
            if place.resolve().is_relative_to(folder):
                raise ConfigError(
                    f"{named} names a module that lies in the run's own folder ({place}): code that comes with a run "
                    "is never imported; if it is yours, move it to the current folder"
                )


def _places(top: str) -> list[Path]:
    """Where the top-level module or package ``top`` would be imported from; imports nothing."""
    spec = None
    with suppress(ValueError):  # a module that is loaded, and was not found by anybody
        spec = importlib.util.find_spec(top)
    spec = spec or PathFinder.find_spec(top, [str(Path.cwd())])
    if spec is None:
        return []
    return [Path(place) for place in (spec.origin, *(spec.submodule_search_locations or ())) if place is not None]


def import_module(name: str) -> ModuleType:
    """Import ``name``, from the current folder where it isn't installed. Raises whatever the module raises."""
    folder = str(Path.cwd())
    if name not in sys.modules and folder not in sys.path and importlib.util.find_spec(name.partition(".")[0]) is None:
        sys.path.append(folder)
    return importlib.import_module(name)
