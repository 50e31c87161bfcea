"""Modules of the user's own, named on the command line: ``module:Id-v0``, ``module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_module(name: str) -> ModuleType:
    """Import ``name``, from the current folder where it isn't installed. Raises whatever the module raises."""
    folder = str(Path.cwd())
    if name not in sys.modules and folder not in sys.path and importlib.util.find_spec(name.partition(".")[0]) is None:
        sys.path.append(folder)
    return importlib.import_module(name)
