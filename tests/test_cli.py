"""The command line: what it refuses and how, what it hands on, exit statuses, and help."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from htsrl.cli import main
from htsrl.config import ALGORITHMS, A2COptions, AnyConfig, PPOOptions
from htsrl.errors import ConfigError, RunFailed
from htsrl.rundir import CONFIG
from htsrl.settings import configure
from htsrl.tomlfile import save_config


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[AnyConfig]:
    """The configurations that reach training, which does nothing here."""
    configs: list[AnyConfig] = []
    fake: Any = ModuleType("htsrl.training")

    def train(config: AnyConfig) -> SimpleNamespace:
        configs.append(config)
        return SimpleNamespace(interrupted=config.seed == 130)

    fake.train = train
    monkeypatch.setitem(sys.modules, "htsrl.training", fake)
    return configs


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments that reach evaluation, which always comes to the same."""
    calls: list[tuple[Any, ...]] = []
    fake: Any = ModuleType("htsrl.evaluation")

    def evaluate_run(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        returns = {"return_mean": 0.94, "return_std": float("nan"), "return_min": -1.0, "return_max": 1.0}
        return {"steps": 2048, "episodes": arguments[1], "stochastic": arguments[2], "length_mean": 31.5} | returns

    fake.evaluate_run = evaluate_run
    monkeypatch.setitem(sys.modules, "htsrl.evaluation", fake)
    return calls


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message with which ``arguments`` are refused."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    head, _, message = output.err.rstrip("\n").partition("htsrl: error: ")
    assert head == ""
    return message


# ------------------------------------------------------------------------------------------------------------- train


def test_flags_become_the_configuration(trained: list[AnyConfig]) -> None:
    line = (
        "--env CartPole-v1 --num_envs=8 --hidden-sizes 32 16 --no-tensorboard --total-steps 2e3 --initial-log-std -0.5"
    )
    assert main(["train", *line.split()]) == 0
    (config,) = trained
    assert config == configure(
        "CartPole-v1", num_envs=8, hidden_sizes=(32, 16), tensorboard=False, total_steps=2000, initial_log_std=-0.5
    )


def test_defaults_come_from_the_preset(trained: list[AnyConfig]) -> None:
    assert main(["train"]) == 0
    assert main(["train", "--algo", "a2c", "--env=atari:Pong"]) == 0
    football, pong = trained
    assert (football.env, football.algorithm.learning_rate) == ("gfootball", 3.43e-4)
    assert isinstance(football.algorithm, PPOOptions)
    assert isinstance(pong.algorithm, A2COptions)


def test_flags_override_the_file_and_the_file_the_preset(trained: list[AnyConfig], tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text('env = "CartPole-v1"\nseed = 5\n[algorithm]\nepochs = 7\nminibatches = 2\n')
    assert main(["train", "--config", str(file), "--epochs", "9", "--epochs", "8"]) == 0
    (config,) = trained
    assert config == configure("CartPole-v1", seed=5, epochs=8, minibatches=2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-envs 0", "--num-envs must be at least 1, got 0"),
        ("--num-envs", "--num-envs needs a value"),
        ("--num-envs --seed 3", "--num-envs needs a value"),
        ("--config", "--config needs a value"),
        ("--hidden-sizes", "--hidden-sizes needs a value"),
        ("--num-enws 4", "--num-enws is not known; did you mean --num-envs?"),
        ("--frobnicate", "--frobnicate is not known; `htsrl train --help` lists all settings"),
        ("--algo dqn", "--algo must be one of ppo, batchppo, a2c, impala, acktr, got dqn"),
        ("--algo a2c --clip-range 0.1", "--clip-range is a setting of ppo and batchppo, and this run uses a2c"),
        ("--rmsprop-decay 0.9", "--rmsprop-decay is a setting of a2c and impala, and this run uses ppo"),
        (
            "--env CartPole-v1 --sticky-actions 0.25",
            "--sticky-actions is a setting of Atari environments, and CartPole-v1 is a Gymnasium one",
        ),
        ("--async-slots 3", "--async-slots is for --schedule async, and this run's is hts"),
        ("--schedule sync --num-actors 2", "--schedule sync needs --num-actors 1, got 2"),
        (
            "--num-envs 5 --minibatches 3",
            "--minibatches must divide --num-envs x --sync-interval = 5 x 128 = 640, got 3; nearest that fit: 2 and 4",
        ),
        ("--num-executors 99", "--num-executors must be at most --num-envs (16), got 99"),
        ("--tensorboard false", "--tensorboard takes no value: write --tensorboard or --no-tensorboard"),
        ("ppo", "unexpected argument ppo: options look like --env CartPole-v1"),
        ("-n 4", "unexpected argument -n: options look like --env CartPole-v1"),
        ("--config /nowhere.toml", "/nowhere.toml can't be read: no such file or directory"),
        ("--env CartPole-v1 --help --num-envs x", "--num-envs must be a whole number of at least 1, got x"),
    ],
)
def test_refused_training(
    capsys: pytest.CaptureFixture[str], trained: list[AnyConfig], line: str, message: str
) -> None:
    assert refused(capsys, "train", *line.split()) == message
    assert trained == []


def test_a_used_run_folder_is_refused(
    capsys: pytest.CaptureFixture[str], trained: list[AnyConfig], tmp_path: Path
) -> None:
    (tmp_path / CONFIG).write_text("")
    assert refused(capsys, "train", "--run-dir", str(tmp_path)).startswith(f"{tmp_path} already holds a run; choose")
    assert trained == []


def test_file_and_flag_are_named_in_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text("[algorithm]\nminibatches = 7\n")
    message = refused(capsys, "train", "--config", str(file), "--num-envs", "4")
    assert message.startswith(f"algorithm.minibatches in {file} must divide --num-envs x --sync-interval = 4 x 128")


# -------------------------------------------------------------------------------------------------------------- eval


def test_eval_prints_a_table(
    capsys: pytest.CaptureFixture[str], evaluations: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    save_config(configure("CartPole-v1"), tmp_path / CONFIG)
    assert main(["eval", str(tmp_path), "--episodes", "7", "--stochastic"]) == 0
    assert evaluations == [(tmp_path, 7, True, None)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(tmp_path)
    assert lines[1].split() == ["episodes", "7,", "sampled", "actions,", "checkpoint", "at", "2,048", "steps"]
    assert lines[2].split() == ["return", "0.940", "±", "-,", "from", "-1.00", "to", "1.00"]


def test_eval_prints_json(
    capsys: pytest.CaptureFixture[str], evaluations: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    save_config(configure("CartPole-v1"), tmp_path / CONFIG)
    assert main(["eval", str(tmp_path), "--json", "--video", "game.mp4"]) == 0
    assert evaluations == [(tmp_path, 100, False, Path("game.mp4"))]
    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["return_mean"], outcome["return_std"]) == (0.94, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("eval", "htsrl eval needs RUN_DIR; `htsrl eval --help` says more"),
        ("eval {}/nothing", "{}/nothing: no such folder"),
        ("eval {}/file", "{}/file is not a folder"),
        ("eval {}", "{} is not the folder of a run: it has no config.toml"),
        ("eval {} --episodes 0", "--episodes must be a whole number of at least 1, got 0"),
        ("eval {} --episodes ten", "--episodes must be a whole number of at least 1, got ten"),
        ("eval {} --episods 10", "--episods is not known; did you mean --episodes?"),
        ("eval {} --video", "--video expected one argument"),
        ("plot", "htsrl plot needs RUN_DIR; `htsrl plot --help` says more"),
        ("plot {}", "{} is not the folder of a run: it has no config.toml"),
        ("doctor please", "please is not known; `htsrl doctor --help` lists the options"),
        ("trian", "trian is not a command; did you mean `htsrl train`?"),
        ("--env CartPole-v1", "--env is not a command; the commands are train, resume, eval, verify, plot, doctor"),
    ],
)
def test_refused_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    assert refused(capsys, *line.replace("{}", str(tmp_path)).split()) == message.replace("{}", str(tmp_path))


# ----------------------------------------------------------------------------------------------------- exit statuses


def test_an_interrupted_run_exits_with_130(trained: list[AnyConfig]) -> None:
    assert main(["train", "--seed", "130"]) == 130


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RunFailed("executor 3 failed"), 1, "htsrl: error: executor 3 failed\n"),
        (ConfigError("no such environment"), 2, "htsrl: error: no such environment\n"),
        (KeyboardInterrupt(), 130, "htsrl: error: interrupted\n"),
    ],
)
def test_exit_statuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, message: str
) -> None:
    def train(config: AnyConfig) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "htsrl.training", SimpleNamespace(train=train))
    assert main(["train"]) == status
    assert capsys.readouterr().err == message


def test_the_process_exits_with_the_status() -> None:
    ended = subprocess.run([sys.executable, "-m", "htsrl", "train", "--num-envs", "0"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "htsrl: error: --num-envs must be at least 1, got 0\n"


def test_a_reader_that_leaves_is_no_traceback() -> None:
    ended = subprocess.run(
        f"{sys.executable} -m htsrl | true", shell=True, capture_output=True, text=True, executable="/bin/bash"
    )
    assert ended.stderr == ""


# -------------------------------------------------------------------------------------------------------------- help


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        assert main(arguments) == 0
        overview = capsys.readouterr().out
        assert "Try first:" in overview
        assert all(f"\n  {command} " in overview for command in ("train", "eval", "plot", "doctor"))
        assert f"\nAlgorithms: {', '.join(ALGORITHMS)}\n" in overview
        assert max(map(len, overview.splitlines())) <= 80


def test_train_help_shows_the_settings_of_env_and_algo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "--env", "atari:Pong", "--algo", "a2c", "--seed", "11", "--help"]) == 0
    output = capsys.readouterr()
    shown = " ".join(output.out.split())
    assert output.err == ""
    assert "settings of a2c on atari:Pong" in shown
    assert "--sticky-actions FLOAT" in shown
    assert "--rmsprop-decay" in shown
    assert "--config" in shown
    assert "(default: 11)" in shown
    assert "(default: 0.0007)" in shown
    assert "--clip-range" not in shown


@pytest.mark.parametrize("command", ["eval", "plot", "doctor"])
def test_help_of_commands(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as leave:
        main([command, "--help"])
    assert leave.value.code == 0
    assert f"usage: htsrl {command}" in capsys.readouterr().out


def test_help_and_refusals_answer_at_once() -> None:
    """Neither imports torch, nor an environment."""
    code = (
        "import sys; from htsrl.cli import main; main(['train', '--help']); main(['train', '--num-envs', '0']);"
        "print([m for m in ('torch', 'gymnasium', 'tensorboard', 'matplotlib') if m in sys.modules])"
    )
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - began < 30.0  # a third of a second on an idle machine
