"""Other systems beside which a workload is measured: installed packages, each in a virtual environment of its own.

A peer's environment is laid over the one that this script runs in: packages that the peer pins stand in front,
everything else (torch, the games, htsrl's environments) is the same installation, so that both run the same code where
they can.
"""

from __future__ import annotations

import site
import subprocess
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from facts import ROOT

from htsrl.errors import ConfigError, RunFailed

FOLDER = ROOT / "benchmarks" / ".peers"


@dataclass(frozen=True)
class Peer:
    """An installable system and the script beside this one that drives it."""

    name: str
    package: str
    requirements: tuple[str, ...]
    driver: str
    variants: tuple[str, ...]
    """Ways to run it."""
    light_variants: tuple[str, ...] = ()
    """More of them, for light environments."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Workloads that it can't run, and why."""


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "sb3",
            "stable_baselines3",
            ("stable-baselines3==2.9.2",),
            "peer_sb3.py",
            ("subprocesses",),
            light_variants=("one process",),
        ),
        Peer(
            "sample-factory",
            "sample_factory",
            ("sample-factory==2.1.1", "gymnasium==0.29.1", "numpy==1.26.4"),
            "peer_sample_factory.py",
            ("async", "sync"),
            lacks={"mujoco": "the Gymnasium 0.29 that it needs has no HalfCheetah-v5"},
        ),
    )
}


def python_of(peer: str, folder: Path | None = None) -> Path:
    """The interpreter of ``peer``'s environment, ``folder`` or the default one.

    Raises:
        ConfigError: the peer is not installed there.
    """
    home = folder or FOLDER / peer
    python = home / "bin" / "python"
    if not any(home.glob(f"lib/python*/site-packages/{PEERS[peer].package}")):
        where = f" in {folder}" if folder else ""
        raise ConfigError(
            f"{peer} is not installed{where}: run `python benchmarks/throughput.py --setup-peers {peer}`"
            + (f" and leave out --peer-python, or install {' '.join(PEERS[peer].requirements)} there" if folder else "")
        )
    return python


def refuse_unfit(peer: str, workload: str) -> None:
    """ConfigError where ``peer`` can't run ``workload``."""
    if workload in PEERS[peer].lacks:
        raise ConfigError(f"{peer} can't run {workload}: {PEERS[peer].lacks[workload]}; leave one of them out")


def set_up(peer: str) -> None:
    """Make ``peer``'s environment over this one and install its pinned packages there.

    Raises:
        RunFailed: pip failed; it has said why.
    """
    home = FOLDER / peer
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    print(f"{peer}: {home}", flush=True)
    venv.create(home, with_pip=True, clear=True)
    below = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages())
    (next(home.glob("lib/python*/site-packages")) / "zz_below.pth").write_text(below)
    command = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *PEERS[peer].requirements]
    if subprocess.run(command).returncode:
        raise RunFailed(f"{peer} could not be installed")


def command(peer: str, python: Path, variant: str, workload: str, progress: Path) -> list[str]:
    """The command that runs ``workload`` on ``peer`` until it is ended, with a line in ``progress`` per iteration."""
    return [str(python), str(Path(__file__).with_name(PEERS[peer].driver)), workload, variant, str(progress)]


def version_of(peer: str, python: Path) -> str:
    """The installed version of ``peer``."""
    code = f"from importlib.metadata import version; print(version({PEERS[peer].package.replace('_', '-')!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
