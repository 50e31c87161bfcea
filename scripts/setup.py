#!/usr/bin/env python3
"""Set-up of a checkout: system packages, ``.venv``, the package with its extras, the football engine.

``make setup`` runs it with whatever ``python3`` there is, and ``make train``, ``make test`` and ``make lint`` run it
first: standard library only, nothing newer than Python 3.8. When nothing has changed it answers at once.

Settings, from the environment or behind ``make setup``:
    FOOTBALL=0           leave the football engine out
    EXTRAS=atari,plot    these extras only (``dev`` always comes along, since ``make test`` needs it), or ``all``
    PYTHON=python3.12    the interpreter for ``.venv``
A later set-up without settings keeps the choice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator, Sequence  # noqa: UP035 (older interpreters run this file)

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "htsrl-setup.json"
CONSTRAINTS = ROOT / "constraints.txt"
LOG = ROOT / "build" / "setup.log"

OLDEST_PYTHON = (3, 11)
EXTRAS = ("atari", "dev", "football", "mujoco", "plot", "video")
# The -dev packages bring the libraries that the finished engine loads, under whatever name the release gives them.
FOOTBALL_PACKAGES = (
    *("build-essential", "cmake", "libgl1-mesa-dev", "libegl1-mesa-dev"),
    *("libsdl2-dev", "libsdl2-image-dev", "libsdl2-ttf-dev", "libsdl2-gfx-dev"),
    *("libboost-python-dev", "libboost-thread-dev", "libboost-system-dev", "libboost-filesystem-dev"),
)
# The engine is thousands of small functions in hundreds of files, each of which could be replaced from outside, as
# libraries are usually built: linked as one program, a step takes a fifth less time. Games are the same bit for bit, as
# none of this lets the compiler change arithmetic.
ENGINE_OPTIONS = "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=ON -DCMAKE_POLICY_DEFAULT_CMP0069=NEW"
ENGINE_FLAGS = {"CXXFLAGS": "-fno-semantic-interposition -fno-plt -fno-math-errno", "LDFLAGS": "-Wl,-Bsymbolic"}


class SetupFailed(Exception):
    """Set-up can't go on. The message is for the person: what is wrong and what to do."""


class CommandFailed(Exception):
    """A command of a step failed; its output is in the log."""


# -------------------------------------------------------------------------------------------------- steps and the log


def say(text: str) -> None:
    """One line for the person."""
    print(f"setup: {text}", flush=True)


@contextlib.contextmanager
def step(title: str, remedy: str, about: str = "") -> Iterator[None]:
    """One line with its duration; a command that fails inside becomes a SetupFailed with the log's last lines."""
    started = time.monotonic()
    live = sys.stdout.isatty()
    if live or about:
        print(f"setup: {title} ...{about}", end="" if live else "\n", flush=True)
    try:
        yield
    except CommandFailed as failure:
        print("\r\033[K" if live else "", end="")
        tail = "\n".join("    " + line for line in LOG.read_text(errors="replace").splitlines()[-15:])
        raise SetupFailed(
            f"step '{title}' failed after {time.monotonic() - started:.1f} s: {failure}\n"
            f"  last lines of {LOG}:\n{tail}\n  {remedy}"
        ) from None
    print("\r\033[K" if live else "", end="")
    say(f"{title} ({time.monotonic() - started:.1f} s)")


def run(command: Sequence[object], **options: Any) -> None:
    """Run a command with its output in the log."""
    words = [str(word) for word in command]
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(words)}\n")
        log.flush()
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **options)
        except OSError as error:
            raise CommandFailed(f"{words[0]}: {error.strerror}") from None
    if done.returncode != 0:
        raise CommandFailed(f"`{' '.join(words[:6])} ...` ended with status {done.returncode}")


def pip(*arguments: object, **options: Any) -> None:
    """Run the pip of ``.venv`` under the constraints; the machine's pip configuration decides the registry."""
    environment = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    run([VENV_PYTHON, "-m", "pip", *arguments], env=environment, **options)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; another set-up that wants it waits."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up to finish")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------------------------------------------- interpreters


class Interpreter:
    """What there is to know of a Python installation."""

    def __init__(self, path: str) -> None:
        """Ask the interpreter; OSError or CalledProcessError or ValueError where it doesn't answer."""
        question = (
            "import json, os, sys, sysconfig; c = sysconfig.get_config_var; print(json.dumps({'version': sys.version, "
            "'release': sys.version_info[:2], 'prefix': sys.base_prefix, 'include': c('INCLUDEPY'),"
            "'headers': os.path.exists(os.path.join(c('INCLUDEPY') or '', 'Python.h'))}))"
        )
        answer = subprocess.run([path, "-c", question], capture_output=True, text=True, timeout=60, check=True).stdout
        facts = json.loads(answer)
        self.path = path
        self.version: str = facts["version"]
        self.release: tuple[int, int] = tuple(facts["release"])
        self.prefix: str = facts["prefix"]
        self.include: str = facts["include"]
        self.headers: bool = facts["headers"]

    @property
    def name(self) -> str:
        """'3.11'"""
        return "{}.{}".format(*self.release)

    @property
    def tag(self) -> str:
        """'311', as boost and wheels write it."""
        return "{}{}".format(*self.release)

    @property
    def of_the_system(self) -> bool:
        """Whether the distribution's packages hold its headers and its venv module."""
        return self.prefix == "/usr"


def ask(path: str) -> Interpreter | None:
    """The interpreter at ``path``, or None where it can't run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        return Interpreter(path)
    return None


def boost_tags() -> set[str]:
    """Python versions ('311') for which Boost.Python is installed, or would be by the distribution's package."""
    folders = ("/usr/lib", "/usr/lib64", "/usr/local/lib", f"/usr/lib/{platform.machine()}-linux-gnu")
    found = {
        match.group(1)
        for folder in folders
        for file in Path(folder).glob("libboost_python3*.so*")
        if (match := re.match(r"libboost_python(3\d+)\.so", file.name))
    }
    system = ask("/usr/bin/python3") if not found else None
    return {system.tag} if system else found


def find_python(football: bool) -> Interpreter:
    """The interpreter for ``.venv``: where football is wanted, rather one that Boost.Python is there for."""
    wish = os.environ.get("PYTHON")
    if wish:
        interpreter = ask(wish)
        if not interpreter or interpreter.release < OLDEST_PYTHON:
            what = f"is Python {interpreter.name}" if interpreter else "does not run"
            raise SetupFailed(f"PYTHON={wish} {what}; Python 3.11 or newer is needed.")
        return interpreter
    names = ("python3.11", "python3.12", "python3.13", "python3.14", "python3")
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    paths = dict.fromkeys(path for name in names for folder in folders if (path := shutil.which(name, path=folder)))
    usable = [found for path in paths if (found := ask(path)) and found.release >= OLDEST_PYTHON]
    if not usable:
        raise SetupFailed(
            "Python 3.11 or newer is needed and none was found. Install one (for instance `apt-get install python3.11 "
            "python3.11-venv python3.11-dev`) or say where it is: make setup PYTHON=/path/to/python3"
        )
    boost = boost_tags() if football else set()
    return min(usable, key=lambda one: (football and one.tag not in boost, football and not one.headers))


def own_interpreter() -> Interpreter | None:
    """The interpreter of a ``.venv`` that works and was made for this folder, else None."""
    with contextlib.suppress(OSError):
        first_lines = (VENV / "bin" / "pip").read_text(errors="replace")[:4096]
        if str(VENV) in first_lines:
            found = ask(str(VENV_PYTHON))
            return found if found and found.release >= OLDEST_PYTHON else None
    return None


# ---------------------------------------------------------------------------------------------------- system packages


def missing_packages(interpreter: Interpreter, football: bool) -> list[str]:
    """Debian packages that are needed and not installed; none where there is no dpkg."""
    wanted = list(FOOTBALL_PACKAGES) if football else []
    if interpreter.of_the_system:
        wanted += [f"python{interpreter.name}-venv"] + ([f"python{interpreter.name}-dev"] if football else [])
    if not wanted or not shutil.which("dpkg-query"):
        return []
    query = ["dpkg-query", "-W", "-f=${Package} ${db:Status-Status}\n", *wanted]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    installed = {line.split()[0] for line in lines if line.endswith(" installed")}
    return [name for name in wanted if name not in installed]


def apt_prefix() -> list[str] | None:
    """What stands before ``apt-get`` to run it as root, or None where this person can't."""
    if not shutil.which("apt-get"):
        return None
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo"):
        if subprocess.run(["sudo", "-n", "true"], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0:
            return ["sudo", "-n"]
        if sys.stdin.isatty():
            return ["sudo"]
    return None


def install_packages(names: list[str]) -> str | None:
    """Install Debian packages. Returns what to tell the person where that isn't possible."""
    prefix = apt_prefix()
    sudo = "" if os.geteuid() == 0 else "sudo "
    command = f"{sudo}apt-get update && {sudo}apt-get install -y {' '.join(names)}"
    if prefix is None:
        return (
            f"these system packages are missing and only an administrator can install them: {' '.join(names)}\n"
            f"  Run this as one, then the same command again:\n    {command}"
        )
    apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=300"]
    try:
        with step(
            f"system packages ({len(names)} missing)", f"See to it that this works, then run the same again: {command}"
        ):
            # A source of another vendor that is down must not keep Debian's own packages away.
            with contextlib.suppress(CommandFailed):
                run([*apt, "update"])
            run([*apt, "install", "-y", "--no-install-recommends", *names])
    except SetupFailed as failure:
        return str(failure)
    return None


# ------------------------------------------------------------------------------------------------------------ football


def football_version() -> str:
    """The version of gfootball that the constraints name."""
    return next(
        line.split("==")[1].strip() for line in CONSTRAINTS.read_text().splitlines() if line.startswith("gfootball==")
    )


def wheel_folder(interpreter: Interpreter) -> Path:
    """Where the built engine is kept: a folder for each gfootball, Python, machine type, system and way to build."""
    system = platform.machine()
    with contextlib.suppress(OSError):
        release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', Path("/etc/os-release").read_text(), re.MULTILINE))
        # The engine is linked against the release's own Boost and SDL.
        system += f"-{release.get('ID', 'linux')}{release.get('VERSION_ID', '')}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "htsrl" / "wheels"
    built = hashlib.sha256(json.dumps([ENGINE_OPTIONS, ENGINE_FLAGS]).encode()).hexdigest()[:8]
    return cache / f"gfootball-{football_version()}-cp{interpreter.tag}-{system}-{built}"


def change(path: Path, old: str, new: str) -> None:
    """Replace the one place where ``old`` stands in a file."""
    text = path.read_text()
    if text.count(old) != 1:
        raise CommandFailed(
            f"{path.name} of gfootball is not as expected: '{old}' stands there {text.count(old)} times"
        )
    path.write_text(text.replace(old, new))


def build_football(interpreter: Interpreter, folder: Path) -> None:
    """Build the wheel of gfootball from its source package and move it into ``folder``."""
    for leftover in folder.glob("build-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as name:
        work = Path(name)
        requirement = f"gfootball=={football_version()}"
        pip("download", "--no-binary", "gfootball", "--no-deps", "--no-build-isolation", "-d", work, requirement)
        (archive,) = work.glob("gfootball-*.tar.gz")
        shutil.unpack_archive(archive, work)
        source = work / archive.name[: -len(".tar.gz")]

        # The headless OpenCV serves, and needs no libraries of a desktop.
        change(source / "setup.py", "'opencv-python'", "'opencv-python-headless'")
        # Left alone, CMake takes the newest Python that it finds.
        python = f"-DPython_ROOT_DIR='{interpreter.prefix}' -DPython_INCLUDE_DIR='{interpreter.include}'"
        cmake = f"cmake . -DPython_FIND_STRATEGY=LOCATION {python} {ENGINE_OPTIONS} &&"
        change(source / "gfootball" / "build_game_engine.sh", "cmake . &&", cmake)

        environment = {
            **os.environ,
            "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses older project files without it
            **ENGINE_FLAGS,
        }
        run(
            [VENV_PYTHON, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", work / "out", source],
            env=environment,
        )
        (wheel,) = (work / "out").glob("gfootball-*.whl")
        os.replace(wheel, folder / wheel.name)


def install_football(interpreter: Interpreter) -> None:
    """Install gfootball from the wheel cache, where it is built first if it isn't there or doesn't load."""
    folder = wheel_folder(interpreter)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(f"{folder}: {error.strerror}; XDG_CACHE_HOME can name another cache folder") from None
    with locked(folder / "lock"):
        cached = any(folder.glob("*.whl"))
        if not cached:
            build_football(interpreter, folder)
        try:
            use_wheel(folder)
        except CommandFailed:
            if not cached:
                raise
            for wheel in folder.glob("*.whl"):
                wheel.unlink()
            build_football(interpreter, folder)
            use_wheel(folder)


def use_wheel(folder: Path) -> None:
    """Install gfootball from ``folder`` and load its engine once."""
    requirement = f"gfootball=={football_version()}"
    # An engine of the same version that was built in another way goes
    pip("install", "--force-reinstall", "--no-deps", *folder.glob("*.whl"))
    pip("install", "-c", CONSTRAINTS, "--no-build-isolation", "--only-binary", "gfootball", "--find-links", folder,
        requirement, "-e", f"{ROOT}[football]")  # fmt: skip
    run([VENV_PYTHON, "-c", "import gfootball_engine, gfootball.env.football_env"])


def set_up_football(interpreter: Interpreter, packages_problem: str | None) -> str | None:
    """Build or fetch the football engine. Returns what to tell the person where that isn't possible."""
    boost = boost_tags()
    built = any(wheel_folder(interpreter).glob("*.whl"))
    if packages_problem:
        # The finished engine needs the libraries alone, and those may be there without the packages to build it.
        with contextlib.suppress(CommandFailed):
            if built:
                use_wheel(wheel_folder(interpreter))
                return None
        return packages_problem
    if not built and boost and interpreter.tag not in boost:
        fitting = " or ".join(f"{tag[0]}.{tag[1:]}" for tag in sorted(boost))
        return (
            f".venv has Python {interpreter.name}, but this system's Boost.Python, which the football engine is built "
            f"with, is for Python {fitting}: choose that one with `make setup PYTHON=python{fitting.split(' ')[0]}`."
        )
    remedy = f"The engine needs a C++ compiler, cmake and these packages or their like: {' '.join(FOOTBALL_PACKAGES)}"
    about = "" if built else f" built once from source, about 3 minutes on two cores (details in {LOG})"
    try:
        with step("football engine", remedy, about):
            install_football(interpreter)
    except SetupFailed as failure:
        return str(failure)
    return None


# ---------------------------------------------------------------------------------------------------------- the set-up


def fingerprint(version: str) -> str:
    """Hash of everything that decides what ``.venv`` should hold."""
    digest = hashlib.sha256(version.encode())
    for file in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read_stamp() -> dict[str, Any]:
    """What the last finished set-up left, or nothing."""
    with contextlib.suppress(OSError, ValueError):
        stamp = json.loads(STAMP.read_text())
        return stamp if isinstance(stamp, dict) else {}
    return {}


def write_stamp(extras: list[str], state: str) -> None:
    """Leave what was chosen, and the fingerprint of what was done."""
    temporary = STAMP.with_suffix(".tmp")
    temporary.write_text(json.dumps({"fingerprint": state, "extras": extras}))
    os.replace(temporary, STAMP)


def wanted_extras(before: list[str] | None) -> list[str]:
    """The extras to install: as asked for now, else as before, else all."""
    asked = os.environ.get("EXTRAS")
    if asked == "all":
        before = asked = None
    names = set(re.split(r"[,\s]+", asked) if asked else before or EXTRAS) - {""}
    unknown = sorted(names - set(EXTRAS))
    if unknown:
        raise SetupFailed(f"EXTRAS: there is no extra {', '.join(unknown)}; there are {', '.join(EXTRAS)}.")
    football = os.environ.get("FOOTBALL")
    if football not in (None, "", "0", "1"):
        raise SetupFailed(f"FOOTBALL={football}: 0 (without the football engine) or 1.")
    if football:
        names = names | {"football"} if football == "1" else names - {"football"}
    return sorted(names | {"dev"})


def set_up() -> None:
    """Bring ``.venv`` to what pyproject.toml and constraints.txt say."""
    # Nothing to do?
    stamp = read_stamp()
    extras = wanted_extras(stamp.get("extras"))
    current = own_interpreter()
    wish = os.environ.get("PYTHON")
    if current and wish and find_python(False).release != current.release:
        current = None
    if current and stamp.get("fingerprint") == fingerprint(current.version) and stamp.get("extras") == extras:
        say("up to date")
        return

    # Interpreter and system packages
    started = time.monotonic()
    LOG.write_text(f"set-up of {ROOT} with extras {', '.join(extras)}\n")
    football = "football" in extras
    interpreter = current or find_python(football)
    missing = missing_packages(interpreter, football)
    packages_problem = install_packages(missing) if missing else None
    venv_package = f"python{interpreter.name}-venv"
    if packages_problem and not current and venv_package in missing:
        raise SetupFailed(packages_problem)

    # Virtual environment
    if not current:
        about = " the one that is there is of no use here and gets replaced" if VENV.exists() else ""
        title = f".venv with Python {interpreter.name} ({interpreter.path})"
        with step(title, f"Is {venv_package} installed?", about):
            run([interpreter.path, "-m", "venv", "--clear", VENV])

    # The package and all extras but football, which needs a build
    write_stamp(extras, "unfinished")
    ordinary = ",".join(extra for extra in extras if extra != "football")
    with step(
        f"Python packages (htsrl[{ordinary}])",
        "Often the network or the package registry: run the same again to go on. "
        "To leave an extra out: make setup EXTRAS=atari,plot",
    ):
        pip("install", "-c", CONSTRAINTS, "setuptools", "wheel", "psutil")
        pip("install", "-c", CONSTRAINTS, "--no-build-isolation", "-e", f"{ROOT}[{ordinary}]")

    # The football engine last: whatever happens to it, the rest is there
    if football:
        problem = set_up_football(interpreter, packages_problem)
        if problem:
            raise SetupFailed(
                f"football: {problem}\n  Everything else is installed. Run the same again to try once more, or go on "
                "without football: make setup FOOTBALL=0"
            )
    write_stamp(extras, fingerprint(Interpreter(str(VENV_PYTHON)).version))
    left_out = sorted(set(EXTRAS) - set(extras))
    without = f" without {', '.join(left_out)}" if left_out else ""
    say(f"done{without} in {time.monotonic() - started:.0f} s; the command is .venv/bin/htsrl")


def main() -> int:
    """Exit status: 0 done, 1 failed, 130 interrupted."""
    LOG.parent.mkdir(exist_ok=True)
    try:
        with locked(LOG.with_name("setup.lock")):
            set_up()
    except SetupFailed as failure:
        print(f"setup failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run the same again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
