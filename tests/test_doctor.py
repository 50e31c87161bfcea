"""`htsrl doctor`: what it finds, what it survives, and what it tells a person to do."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from htsrl import doctor
from htsrl.doctor import Check, Probe


def test_a_whole_diagnosis_of_this_machine() -> None:
    checks = {check.name: check for check in doctor.diagnose()}
    assert doctor.core_works(checks.values()), checks
    assert checks["Gymnasium"].status == "ok"
    assert checks["torch"].version == importlib.metadata.version("torch")
    assert "cpu" in checks["torch"].detail
    assert {"atari", "football", "mujoco", "plot", "video", "cores", "memory", "open files"} <= set(checks)
    for check in checks.values():
        assert (check.status == "ok") == (check.fix == ""), f"every row that isn't ok says what to do: {check}"


# ---------------------------------------------------------------------------------------------------------- installed?


@pytest.mark.parametrize(
    ("wanted", "lacking"),
    [
        ("numpy>=1.0", []),
        ("numpy>=999", ["numpy>=999"]),
        ("no-such-distribution-at-all[fast]>=2", ["no-such-distribution-at-all[fast]>=2"]),
    ],
)
def test_unmet_requirements(wanted: str, lacking: list[str]) -> None:
    assert doctor.unmet([Requirement(wanted)]) == lacking


def test_an_extra_of_a_requirement_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"imageio": ["numpy", "no-such-ffmpeg>=1; extra == 'ffmpeg'", "no-such-other; extra == 'other'"]}
    monkeypatch.setattr(importlib.metadata, "requires", metadata.__getitem__)
    monkeypatch.setattr(doctor, "installed_version", lambda name: "" if name.startswith("no-such") else "2.0")
    assert doctor.unmet([Requirement("imageio")]) == []
    assert doctor.unmet([Requirement("imageio[ffmpeg]")]) == ["no-such-ffmpeg>=1"]


def test_requirements_come_from_the_packages_own_metadata() -> None:
    assert {"torch", "gymnasium", "numpy"} <= {requirement.name for requirement in doctor.requirements("")}
    assert "ale-py" not in {requirement.name for requirement in doctor.requirements("")}
    assert {requirement.name for requirement in doctor.requirements("atari")} == {"ale-py", "opencv-python-headless"}


# ------------------------------------------------------------------------------------------------------------- works?


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print('first'); print('last')", (True, "last")),
        ("pass", (True, "")),
        ("import no_such_module", (False, "ModuleNotFoundError: No module named 'no_such_module'")),
        ("from htsrl.errors import ConfigError; raise ConfigError('install it')", (False, "install it")),
        ("raise SystemExit(3)", (False, "exit status 3")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", (False, "killed by signal 11")),
    ],
)
def test_a_probe_survives_whatever_its_code_does(code: str, outcome: tuple[bool, str]) -> None:
    assert doctor.run_probe(code) == outcome


def test_a_probe_that_hangs_is_ended() -> None:
    assert doctor.run_probe("import time; time.sleep(60)", timeout=0.5) == (False, "no answer within 0.5 s")


def test_rows_of_missing_broken_and_working_things(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {"atari": ["ale-py>=0.10"], "football": [], "plot": []}
    monkeypatch.setattr(doctor, "requirements", lambda extra: lacking[extra])
    monkeypatch.setattr(doctor, "unmet", list)
    monkeypatch.setattr(doctor, "checkout", lambda: None)
    missing = doctor._check(Probe("atari", "environments", "atari", "no-such-distribution", "never runs"))
    broken = doctor._check(Probe("football", "environments", "football", "numpy", "raise ImportError('libSDL2.so.0')"))
    works = doctor._check(Probe("plot", "features", "plot", "numpy", "print('fine')"))
    assert (missing.status, missing.version, missing.fix) == ("missing", "", "pip install 'ale-py>=0.10'")
    assert (broken.status, broken.detail) == ("broken", "ImportError: libSDL2.so.0")
    assert "make setup" in broken.fix
    assert (works.status, works.detail, works.fix) == ("ok", "fine", "")


def test_in_a_checkout_the_command_is_make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "checkout", lambda: tmp_path)
    assert doctor.command_for("atari", ["ale-py"]) == f"make -C {tmp_path} setup EXTRAS=all"
    monkeypatch.chdir(tmp_path)
    assert doctor.command_for("atari", ["ale-py"]) == "make setup EXTRAS=all"
    # A finished set-up would not do again what it has done: then .venv was changed by hand, and goes.
    (tmp_path / ".venv").mkdir()
    stamp = tmp_path / ".venv" / "htsrl-setup.json"
    stamp.write_text(json.dumps({"fingerprint": "unfinished", "extras": ["atari"]}))
    assert doctor.command_for("atari", []) == "make setup EXTRAS=all"
    stamp.write_text(json.dumps({"fingerprint": "e3b0", "extras": ["atari"]}))
    assert doctor.command_for("atari", []) == f"rm -rf {tmp_path}/.venv && make setup"
    assert doctor.command_for("plot", ["matplotlib"]) == "make setup EXTRAS=all"


# ------------------------------------------------------------------------------------------------------------- report

CORE = [Check("htsrl", "core", "ok"), Check("torch", "core", "ok"), Check("Gymnasium", "environments", "ok")]
MISSING = Check("atari", "environments", "missing", "", "", "pip install " + "'ale-py>=0.10' " * 9)
BROKEN = Check("football", "environments", "broken", "2.10.2", "killed by signal 11", "make setup EXTRAS=all")


def test_the_core_decides_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: [*CORE, MISSING, BROKEN])
    assert doctor.run_doctor() == 0
    assert "The core works." in capsys.readouterr().out
    for row in CORE:
        broken = [Check(row.name, row.group, "broken") if check is row else check for check in CORE]
        monkeypatch.setattr(doctor, "diagnose", lambda broken=broken: broken)
        assert doctor.run_doctor() == 1
        assert "does NOT work" in capsys.readouterr().out


def test_what_is_optional_and_lacking_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: [*CORE, MISSING, BROKEN])
    monkeypatch.setenv("COLUMNS", "40")
    doctor.run_doctor()
    printed = capsys.readouterr().out
    assert MISSING.fix.strip() in printed, "a narrow terminal doesn't cut commands"
    assert "Not installed (optional): atari." in printed
    assert "Installed but not working: football." in printed


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: [*CORE, BROKEN])
    assert doctor.run_doctor(json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    assert answer["checks"][-1] == {
        "name": "football",
        "group": "environments",
        "status": "broken",
        "version": "2.10.2",
        "detail": "killed by signal 11",
        "fix": "make setup EXTRAS=all",
    }


# ------------------------------------------------------------------------------------------------------------ machine


@pytest.mark.parametrize(("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_cpu_quota(tmp_path: Path, text: str, cores: float | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert doctor.cpu_quota(file) == cores
    assert doctor.cpu_quota(tmp_path / "absent") is None


def test_few_open_files_get_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 4096))
    (row,) = [check for check in doctor._machine() if check.name == "open files"]
    assert (row.status, row.fix) == ("note", "ulimit -n 4096")


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: self == Path("/dev/nvidia0") or os.path.lexists(self))
    (row,) = doctor._gpu_without_torch(Check("torch", "core", "ok", "2.13.0+cpu", "cpu (2 threads)"))
    assert row.status == "note"
    assert "built for CPUs only" in row.detail
    assert doctor._gpu_without_torch(Check("torch", "core", "ok", "2.13.0", "cpu (2 threads), cuda:0 (H200)")) == []
