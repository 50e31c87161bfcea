"""What is shipped: the wheel's contents, a plain install, imports that stay light, versions that agree."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import htsrl
from htsrl.config import ALGORITHMS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"htsrl": "htsrl", "actors": "htsrl/actors", "learner": "htsrl/learner", "storage": "htsrl/storage"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python(*arguments: str, **environment: str) -> str:
    """Run this interpreter away from the checkout and return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        cwd="/",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree."""
    try:
        modern = Version(importlib.metadata.version("setuptools")) >= Version("77")
    except importlib.metadata.PackageNotFoundError:
        modern = False
    if not modern:
        pytest.skip("building needs setuptools 77 or newer")
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, source)
    out = tmp_path_factory.mktemp("wheel")
    python("-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(out))
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_one_top_level_name(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"{package}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.suffix == ".py" or file.name == "py.typed"
    }
    assert names == expected
    assert "htsrl/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"htsrl"}


def test_a_plain_install_works(wheel: Path, tmp_path: Path) -> None:
    """Installed elsewhere, the packages come from there, and so does the command."""
    python("-m", "pip", "install", "--no-deps", "--target", str(tmp_path), str(wheel))
    code = "import htsrl.actors, htsrl.learner, htsrl.storage as last, htsrl; print(htsrl.__file__, last.__file__)"
    assert python("-c", code, PYTHONPATH=str(tmp_path)).split() == [
        str(tmp_path / "htsrl" / "__init__.py"),
        str(tmp_path / "htsrl" / "storage" / "__init__.py"),
    ]
    printed = python(str(tmp_path / "bin" / "htsrl"), "--help", PYTHONPATH=str(tmp_path))
    assert "train" in printed
    assert "doctor" in printed


@pytest.mark.parametrize(
    "module",
    [
        "htsrl",
        "htsrl.config",
        "htsrl.settings",
        "htsrl.envs",
        "htsrl.rng",
        "htsrl.doctor",
        "htsrl.cli",
        "htsrl.actors.executor",
    ],
)
def test_imports_that_stay_light(module: str) -> None:
    """Executors never load torch, and neither does anything between a person and `htsrl --help`."""
    heavy = "{'torch', 'gfootball', 'gym', 'ale_py', 'mujoco', 'matplotlib', 'tensorboard'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    assert python("-c", code).strip() == "[]"


def test_the_versions_agree() -> None:
    assert htsrl.__version__ == PROJECT["version"]


def test_the_readme_has_a_row_for_every_algorithm() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = readme.partition("| algorithm | |")[2].partition("\n\n")[0].splitlines()[2:]
    assert {row.split("`")[1] for row in rows} == ALGORITHMS.keys()


def test_the_constraints_pin_what_the_project_names() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {Requirement(line).name.lower(): Requirement(line) for line in lines if line and not line.startswith("#")}
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"football", "atari", "mujoco", "plot", "video", "dev"}
    for line in [*PROJECT["dependencies"], *(line for extra in extras.values() for line in extra)]:
        requirement = Requirement(line)
        (pin,) = pins[requirement.name.lower()].specifier
        assert pin.operator == "=="
        assert "+" not in pin.version, "no local versions: the registry decides about them"
        assert requirement.specifier.contains(pin.version), f"{line} against {pin}"
