"""``htsrl doctor``: what works here, what is missing, and the command that gets it.

Every environment family is tried for real (make, reset, one step) and every optional package is loaded, each in a
process of its own: an installation that is broken, however badly, is a row of the table and never the end of it. This
process imports neither torch nor an environment.
"""

from __future__ import annotations

import importlib.metadata
import json as json_module
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

PACKAGE = "htsrl"
PROBE_SECONDS = 120
ENOUGH_FILES = 1024

Status = Literal["ok", "missing", "broken", "note"]


@dataclass(frozen=True)
class Check:
    """One row: what was looked at and what came of it."""

    name: str
    group: Literal["core", "environments", "features", "machine"]
    status: Status
    """'missing' is not installed, 'broken' is installed and does not work, 'note' works but deserves a look."""
    version: str = ""
    detail: str = ""
    fix: str = ""
    """The command, or the advice, that makes it 'ok'."""


@dataclass(frozen=True)
class Probe:
    """Code that shows whether a thing works. The last line that it prints becomes the row's detail."""

    name: str
    group: Literal["core", "environments", "features"]
    extra: str
    """The extra of the package that it belongs to; '' is the core."""
    requirement: str
    """The distribution whose version is shown."""
    code: str


def _try_environment(env: str) -> str:
    """Code that makes ``env`` as an executor does, resets it and takes one step."""
    return f"""
import numpy as np
from htsrl.envs import describe, make, options_class
options = options_class({env!r})()
spec = describe({env!r}, options)
environment = make({env!r}, options)
observation = environment.reset(0)
action = np.zeros(spec.action.stored_shape, spec.action.stored_dtype)
environment.step(0 if spec.action.kind == "discrete" else action)
environment.close()
print("e.g. {env}: observations", " x ".join(map(str, spec.observation_shape)), spec.observation_dtype)
"""


_TRY_TORCH = """
import torch
torch.ones(64, 64) @ torch.ones(64, 64)
devices = [f"cpu ({torch.get_num_threads()} threads)"]
for index in range(torch.cuda.device_count()):
    (torch.ones(64, 64, device=f"cuda:{index}") @ torch.ones(64, 64, device=f"cuda:{index}")).cpu()
    properties = torch.cuda.get_device_properties(index)
    devices.append(f"cuda:{index} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)")
print(", ".join(devices))
"""

PROBES = (
    Probe("torch", "core", "", "torch", _TRY_TORCH),
    Probe("Gymnasium", "environments", "", "gymnasium", _try_environment("CartPole-v1")),
    Probe("atari", "environments", "atari", "ale-py", _try_environment("atari:Pong")),
    Probe("football", "environments", "football", "gfootball", _try_environment("gfootball")),
    Probe("mujoco", "environments", "mujoco", "mujoco", _try_environment("HalfCheetah-v5")),
    Probe(
        "plot",
        "features",
        "plot",
        "matplotlib",
        "import matplotlib; matplotlib.use('Agg'); import matplotlib.pyplot\nprint('htsrl plot')",
    ),
    Probe(
        "video",
        "features",
        "video",
        "imageio",
        "import imageio, imageio_ffmpeg\nprint('htsrl eval --video, ffmpeg', imageio_ffmpeg.get_ffmpeg_version())",
    ),
)


# ---------------------------------------------------------------------------------------------------------- installed?


def requirements(extra: str, package: str = PACKAGE) -> list[Requirement]:
    """What an installed package asks for under ``extra`` ('' is the core), from its own metadata."""
    wanted = []
    for line in (importlib.metadata.requires(package) if installed_version(package) else None) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        of_core = marker is None or marker.evaluate({"extra": ""})
        if of_core if extra == "" else not of_core and marker is not None and marker.evaluate({"extra": extra}):
            wanted.append(requirement)
    return wanted


def unmet(wanted: Iterable[Requirement]) -> list[str]:
    """The requirements that aren't installed, or not in a version that serves, as pip would be given them.

    Extras are followed: ``imageio[ffmpeg]`` without ``imageio-ffmpeg`` is unmet, and that is what gets named.
    """
    lacking = []
    for requirement in wanted:
        version = installed_version(requirement.name)
        if not version or not requirement.specifier.contains(version, prereleases=True):
            extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            lacking.append(f"{requirement.name}{extras}{requirement.specifier}")
        else:
            for extra in sorted(requirement.extras):
                lacking += unmet(requirements(extra, requirement.name))
    return lacking


def installed_version(package: str) -> str:
    """The version of an installed distribution, '' where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def checkout() -> Path | None:
    """The checkout whose own ``.venv`` this is, where it is one: there ``make setup`` gets everything."""
    folder = Path(__file__).resolve().parent.parent
    ours = (folder / "scripts" / "setup.py").is_file() and Path(sys.prefix).resolve() == folder / ".venv"
    return folder if ours else None


def command_for(extra: str, lacking: list[str]) -> str:
    """The command that gets the ``lacking`` requirements of an extra ('' is the core), or repairs it where none are."""
    folder = checkout()
    if folder:
        make = "make" if Path.cwd() == folder else f"make -C {folder}"
        return f"{make} setup EXTRAS=all" if extra not in _set_up(folder) else f"rm -rf {folder}/.venv && {make} setup"
    if extra == "football":
        return "make setup (in a checkout: the engine has to be built from source)"
    packages = lacking or sorted({requirement.name for requirement in requirements(extra)})
    return f"pip install {'' if lacking else '--force-reinstall '}" + " ".join(f"'{package}'" for package in packages)


def _set_up(folder: Path) -> list[str]:
    """The extras that a finished set-up of this checkout has installed ('' is the core): it won't do so again."""
    try:
        stamp = json_module.loads((folder / ".venv" / "htsrl-setup.json").read_text())
        return [] if stamp["fingerprint"] == "unfinished" else ["", *stamp["extras"]]
    except (OSError, ValueError, KeyError):
        return []


# ------------------------------------------------------------------------------------------------------------- works?


def run_probe(code: str, timeout: float = PROBE_SECONDS) -> tuple[bool, str]:
    """Run ``code`` in another process. Returns whether it worked, and its last line or what went wrong."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "SDL_VIDEODRIVER": "dummy"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout:g} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1].strip().removeprefix("htsrl.errors.ConfigError: ") if lines else ""
    if done.returncode < 0:
        return False, f"killed by signal {-done.returncode}"
    return done.returncode == 0, last or (f"exit status {done.returncode}" if done.returncode else "")


def _check(probe: Probe) -> Check:
    """The row of one probe."""
    lacking = unmet(requirements(probe.extra)) if probe.extra else unmet([Requirement(probe.requirement)])
    version = installed_version(probe.requirement)
    if lacking:
        detail = f"lacks {', '.join(lacking)}" if version else ""
        return Check(probe.name, probe.group, "missing", version, detail, command_for(probe.extra, lacking))
    works, detail = run_probe(probe.code)
    status: Status = "ok" if works else "broken"
    return Check(probe.name, probe.group, status, version, detail, "" if works else command_for(probe.extra, []))


# ------------------------------------------------------------------------------------------------------------ machine


def cpu_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """Cores that the container may use, None where there is no limit."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _machine() -> list[Check]:
    """Rows about the machine itself."""
    import psutil

    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    cores = f"{allowed} usable of {os.cpu_count()}" + (f", limited to the time of {quota:g}" if quota else "")
    memory = psutil.virtual_memory()
    free = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < ENOUGH_FILES
    return [
        Check("cores", "machine", "ok", detail=cores),
        Check("memory", "machine", "ok", detail=free),
        Check(
            "open files",
            "machine",
            "note" if few else "ok",
            detail=f"a process may have {soft} (up to {hard} on request)",
            fix=f"ulimit -n {ENOUGH_FILES if hard < 0 else min(hard, 65_536)}" if few else "",
        ),
    ]


def _gpu_without_torch(torch: Check) -> list[Check]:
    """A row where an NVIDIA GPU is there and torch doesn't see it."""
    if torch.status != "ok" or "cuda" in torch.detail or not Path("/dev/nvidia0").exists():
        return []
    kind = "built for CPUs only" if "+cpu" in torch.version else "too new or too old for the driver"
    advice = "install the torch that fits the driver (nvidia-smi shows its CUDA version); --device cpu works meanwhile"
    return [Check("GPU", "machine", "note", detail=f"an NVIDIA GPU is there, but torch {kind}", fix=advice)]


# ------------------------------------------------------------------------------------------------------------- report


def diagnose() -> list[Check]:
    """Look at everything. Takes a few seconds, most of them in processes of their own."""
    lacking = unmet(requirements(""))
    detail = f"lacks {', '.join(lacking)}" if lacking else f"Python {platform.python_version()}, {sys.prefix}"
    fix = command_for("", lacking) if lacking else ""
    core = Check("htsrl", "core", "missing" if lacking else "ok", installed_version(PACKAGE), detail, fix)
    with ThreadPoolExecutor(max_workers=2) as pool:
        probed = list(pool.map(_check, PROBES))
    return [core, *probed, *_machine(), *_gpu_without_torch(probed[0])]


def core_works(checks: Iterable[Check]) -> bool:
    """Whether training works at all: the core packages, torch, and Gymnasium's own environments."""
    return all(check.status == "ok" for check in checks if check.group == "core" or check.name == "Gymnasium")


def summary(checks: list[Check]) -> list[str]:
    """The closing lines: whether the core works, and which optional things don't."""
    lines = ["The core works." if core_works(checks) else "The core does NOT work: see the rows above."]
    optional = [check for check in checks if check.group in ("environments", "features") and check.name != "Gymnasium"]
    for status, words in (("missing", "Not installed (optional)"), ("broken", "Installed but not working")):
        names = [check.name for check in optional if check.status == status]
        if names:
            lines.append(f"{words}: {', '.join(names)}.")
    if all(check.status == "ok" for check in optional):
        lines.append("Every optional environment and feature works, too.")
    return lines


def _print_table(checks: list[Check]) -> None:
    """The table for a person; commands stand below it, where a narrow terminal can't cut them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {
        "ok": Text("ok", "green"),
        "missing": Text("not installed", "yellow"),
        "broken": Text("broken", "bold red"),
        "note": Text("look at this", "yellow"),
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("name", "status", "version", "detail"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "status"))
    group = ""
    for check in checks:
        if check.group != group:
            table.add_row(Text(check.group, "bold"))
            group = check.group
        table.add_row(Text(f"  {check.name}"), marks[check.status], Text(check.version), Text(check.detail))
    console = Console()
    console.print(table)
    console.print()
    fixes: dict[str, list[str]] = {}
    for check in checks:
        if check.fix:
            fixes.setdefault(check.fix, []).append(check.name)
    for fix, names in fixes.items():
        console.print(Text.assemble(f"For {', '.join(names)}: ", (fix, "bold")), soft_wrap=True)
    for line in summary(checks):
        console.print(Text(line))


def run_doctor(json: bool = False) -> int:
    """Print the diagnosis, as a table or as JSON. Returns 0 when the core works, else 1."""
    checks = diagnose()
    if json:
        print(json_module.dumps({"ok": core_works(checks), "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print_table(checks)
    return 0 if core_works(checks) else 1
