"""scripts/setup.py: the choices it makes and the messages it gives. What it installs is seen by running it."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, with its log and its settings out of the way."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("EXTRAS", "FOOTBALL", "PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "LOG", tmp_path / "setup.log")
    return module


def fake_python(release: tuple[int, int], headers: bool = True) -> Any:
    """What the script learns from asking an interpreter."""
    tag = f"{release[0]}{release[1]}"
    return SimpleNamespace(release=release, tag=tag, name=f"{release[0]}.{release[1]}", headers=headers)


# ------------------------------------------------------------------------------------------------------------- extras


@pytest.mark.parametrize(
    ("settings", "before", "extras"),
    [
        ({}, None, "atari dev football mujoco plot video"),
        ({}, ["atari", "dev"], "atari dev"),  # the choice is kept
        ({"EXTRAS": "all"}, ["atari", "dev"], "atari dev football mujoco plot video"),
        ({"EXTRAS": "atari, plot"}, None, "atari dev plot"),
        ({"FOOTBALL": "0"}, None, "atari dev mujoco plot video"),
        ({"FOOTBALL": "1"}, ["dev"], "dev football"),
        ({"FOOTBALL": "0", "EXTRAS": "all"}, ["dev"], "atari dev mujoco plot video"),
    ],
)
def test_extras(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], before: list[str] | None, extras: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert setup.wanted_extras(before) == extras.split()


@pytest.mark.parametrize(("name", "value"), [("EXTRAS", "atari,chess"), ("FOOTBALL", "yes")])
def test_settings_that_mean_nothing(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(setup.SetupFailed, match=name):
        setup.wanted_extras(None)


# ------------------------------------------------------------------------------------------------------------- python


def choose(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, pythons: dict[str, Any], football: bool = True) -> Any:
    """Which of ``pythons`` (by file name) the script takes, where Boost.Python is for 3.12."""
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(setup.shutil, "which", lambda name, path: name if name in pythons and path == "/bin" else None)
    monkeypatch.setattr(setup, "ask", pythons.get)
    monkeypatch.setattr(setup, "boost_tags", lambda: {"312"})
    return setup.find_python(football)


def test_football_takes_the_python_that_boost_is_for(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pythons = {"python3.11": fake_python((3, 11)), "python3.12": fake_python((3, 12)), "python3": fake_python((3, 9))}
    assert choose(setup, monkeypatch, pythons).name == "3.12"
    assert choose(setup, monkeypatch, pythons, football=False).name == "3.11"


def test_a_python_without_headers_comes_last(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pythons = {"python3.12": fake_python((3, 12), headers=False), "python3": fake_python((3, 12))}
    assert choose(setup, monkeypatch, pythons) is pythons["python3"]


def test_no_python_is_new_enough(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(setup.SetupFailed, match=r"3\.11 or newer is needed"):
        choose(setup, monkeypatch, {"python3": fake_python((3, 10))})
    monkeypatch.setenv("PYTHON", "python3")
    with pytest.raises(setup.SetupFailed, match=r"PYTHON=python3 is Python 3\.10"):
        setup.find_python(True)


def test_another_boost_is_said_in_one_sentence(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(setup, "boost_tags", lambda: {"312"})
    message = setup.set_up_football(fake_python((3, 11)), None)
    assert "Python 3.11" in message
    assert "PYTHON=python3.12" in message
    assert "\n" not in message


# ---------------------------------------------------------------------------------------------------- system packages


def test_without_root_and_sudo_one_message_has_it_all(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(setup.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    message = setup.install_packages(["cmake", "libsdl2-dev"])
    assert "sudo apt-get update && sudo apt-get install -y cmake libsdl2-dev" in message


def test_sudo_without_a_terminal_must_not_ask(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(setup.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(setup.sys, "stdin", SimpleNamespace(isatty=lambda: False))
    for status, prefix in ((0, ["sudo", "-n"]), (1, None)):
        monkeypatch.setattr(setup.subprocess, "run", lambda *_, status=status, **__: SimpleNamespace(returncode=status))
        assert setup.apt_prefix() == prefix


# -------------------------------------------------------------------------------------------------- steps, stamp, build


def test_a_failing_step_names_itself_its_log_and_the_remedy(setup: ModuleType) -> None:
    with pytest.raises(setup.SetupFailed) as failure, setup.step("engine", "install a compiler"):
        setup.run([sys.executable, "-c", "import sys; sys.exit('no compiler')"])
    message = str(failure.value)
    assert "'engine' failed" in message
    assert str(setup.LOG) in message
    assert "    no compiler" in message
    assert message.endswith("install a compiler")


def test_a_program_that_is_not_there(setup: ModuleType) -> None:
    with pytest.raises(setup.CommandFailed, match="no-such-program"):
        setup.run(["no-such-program"])


def test_the_fingerprint_covers_files_and_interpreter(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = setup.fingerprint("3.11.7")
    assert setup.fingerprint("3.11.7") == before
    assert setup.fingerprint("3.11.8") != before
    (tmp_path / "constraints.txt").write_text("torch==1\n")
    monkeypatch.setattr(setup, "CONSTRAINTS", tmp_path / "constraints.txt")
    assert setup.fingerprint("3.11.7") != before


def test_a_virtual_environment_of_another_folder_is_not_ours(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(setup, "VENV", tmp_path)
    monkeypatch.setattr(setup, "VENV_PYTHON", Path(sys.executable))
    assert setup.own_interpreter() is None
    (tmp_path / "bin" / "pip").write_text("#!/home/else/.venv/bin/python\n")
    assert setup.own_interpreter() is None
    (tmp_path / "bin" / "pip").write_text(f"#!{tmp_path}/bin/python\n")
    assert setup.own_interpreter().release == sys.version_info[:2]


def test_a_second_set_up_waits_for_the_first(
    setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []

    def second() -> None:
        with setup.locked(tmp_path / "lock"):
            order.append("second")

    thread = threading.Thread(target=second)
    with setup.locked(tmp_path / "lock"):
        thread.start()
        shown = ""
        while "waiting for another set-up" not in shown:  # or for ever
            thread.join(timeout=0.05)
            shown += capsys.readouterr().out
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.parametrize("text", ["", "[1]", "{", json.dumps({"extras": ["dev"]})])
def test_a_damaged_stamp_is_no_stamp(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setattr(setup, "STAMP", tmp_path / "stamp")
    assert setup.read_stamp() == {}
    (tmp_path / "stamp").write_text(text)
    assert setup.read_stamp() == ({"extras": ["dev"]} if "dev" in text else {})


def test_each_python_and_machine_has_its_own_engine(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    folders = {setup.wheel_folder(fake_python((3, minor))) for minor in (11, 12)}
    monkeypatch.setattr(setup.platform, "machine", lambda: "aarch64")
    folders.add(setup.wheel_folder(fake_python((3, 11))))
    assert len(folders) == 3
    for folder in folders:
        assert folder.parent == Path("/cache/htsrl/wheels")
        assert folder.name.startswith("gfootball-2.10.2-cp31")


def test_the_source_package_must_be_as_expected(setup: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "setup.py"
    file.write_text("requires = ['opencv-python']\n")
    setup.change(file, "'opencv-python'", "'opencv-python-headless'")
    assert file.read_text() == "requires = ['opencv-python-headless']\n"
    with pytest.raises(setup.CommandFailed, match="not as expected"):
        setup.change(file, "'opencv-python'", "'opencv-python-headless'")


class Engine:
    """Stands for building and installing: what was done, and whether the wheel loads."""

    def __init__(self, setup: ModuleType, monkeypatch: pytest.MonkeyPatch, loads: list[bool]) -> None:
        self.done: list[str] = []
        self.loads = loads
        monkeypatch.setattr(setup, "build_football", self.build)
        monkeypatch.setattr(setup, "use_wheel", self.use)
        self.failure = setup.CommandFailed

    def build(self, _: Any, folder: Path) -> None:
        self.done.append("build")
        (folder / "gfootball.whl").write_text("")

    def use(self, folder: Path) -> None:
        assert (folder / "gfootball.whl").exists()
        self.done.append("use")
        if not self.loads.pop(0):
            raise self.failure("it does not load")


def test_the_engine_is_built_once(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = Engine(setup, monkeypatch, loads=[True, True])
    setup.install_football(fake_python((3, 11)))
    setup.install_football(fake_python((3, 11)))
    assert engine.done == ["build", "use", "use"]


def test_a_cached_engine_that_does_not_load_is_built_anew(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = Engine(setup, monkeypatch, loads=[True, False, True, False, False])
    setup.install_football(fake_python((3, 11)))
    setup.install_football(fake_python((3, 11)))
    assert engine.done == ["build", "use", "use", "build", "use"]
    with pytest.raises(setup.CommandFailed):
        setup.install_football(fake_python((3, 11)))
