"""What every recorded figure stands beside: the machine, versions, commit and command; and how records are written."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from gpus import gpus

from htsrl.errors import ConfigError, HtsrlError
from htsrl.rundir import plain, write_atomically

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("htsrl", "torch", "numpy", "gymnasium", "ale-py", "gfootball", "mujoco")


def machine() -> dict[str, Any]:
    """Processor, the cores this process may use, memory, and the GPUs, if there are any."""
    found = gpus()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **({"gpus": found} if found else {}),
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of those of ``packages`` that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checkout's commit, with ``-dirty`` where a tracked file was changed; None outside a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def circumstances() -> dict[str, Any]:
    """What a record needs to be judged later: ``command``, ``date``, ``commit``, ``machine``, ``versions``."""
    script = Path(sys.argv[0]).resolve()
    script = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    return {
        "command": " ".join(["python", str(script), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def save_json(path: Path, record: dict[str, Any]) -> None:
    """Write ``record`` as a whole or not at all: indented, with each list of numbers on one line."""
    text = json.dumps(plain(record), indent=1, allow_nan=False)
    text = re.sub(r"\[[^][{}\"]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode() + b"\n")


def table(rows: Sequence[Sequence[str]]) -> str:
    """``rows`` as aligned columns, the first row being the head; the first column is text, the others are figures."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.ljust(width) if k == 0 else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits and thousands separators; a dash for nothing."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}"


def run_main(body: Callable[[], int]) -> int:
    """Run a script's body: what is refused is one sentence and exit status 2, Ctrl-C is 130."""
    try:
        return body()
    except HtsrlError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted; what was finished is kept", file=sys.stderr)
        return 130


def chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    """The comma-separated names in ``text``.

    Raises:
        ConfigError: one of them isn't ``known``.
    """
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise ConfigError(f"{name} is not a {what}; there is {', '.join(known)}")
    if not names:
        raise ConfigError(f"name at least one {what}: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
