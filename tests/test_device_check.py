"""The check of a GPU, tried without one: its parts and limits, what it refuses, what it does where a part breaks."""

from __future__ import annotations

import contextlib
import json
import sys
import time

import psutil
import pytest
import torch

from htsrl import envs
from htsrl.errors import RunFailed
from htsrl.models import build_model

SMALL = {"hidden_sizes": (16,), "num_envs": 8, "sync_interval": 32, "epochs": 1, "minibatches": 2}


@pytest.fixture
def check(monkeypatch):
    """The script as a module."""
    from test_benchmarks import BENCHMARKS

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import device_check

    return device_check


@pytest.fixture
def small(check):
    """A check of ``part`` on a workload that is done in seconds."""
    from workloads import Workload

    def of(part, **settings):
        return check.Check(part, Workload("small", "CartPole-v1", "ppo", SMALL | settings), "cpu", 0.2)

    return of


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a command of that name into the path: says that each process of this machine holds 100 MiB."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        """#!/bin/sh
case "$1" in
  *gpu=name*) echo "NVIDIA X100, 570.1, 81559"; echo "NVIDIA X100, 570.1, [N/A]" ;;
  *gpu=memory.used) echo 1000; echo 24 ;;
  *) echo "999999999, [N/A]"; for p in /proc/[0-9]*; do echo "${p#/proc/}, 60"; echo "${p#/proc/}, 40"; done ;;
esac
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return script


# -------------------------------------------------------------------------------------------------------- the limits


def test_a_gpu_works_beside_the_cores(check):
    from limits import Costs, steps_limit
    from throughput import limit_lines, limit_of
    from workloads import workload

    parts = {"environment": 0.002, "inference": 0.001, "learning": 0.004}
    assert steps_limit(Costs(**parts), cores=4) == pytest.approx(4 / 0.007)
    assert steps_limit(Costs(**parts, device="cuda"), cores=1) == pytest.approx(200)  # 500 by the core
    assert steps_limit(Costs(**parts | {"environment": 0.02}, device="cuda:1"), cores=2) == pytest.approx(100)

    limit = limit_of(workload("cartpole"), workload("cartpole").config(), [Costs(**parts, device="cuda")] * 3)
    assert limit["kind"] == "cores or GPU"
    assert limit["steps_per_second"] == pytest.approx(200)
    assert limit["rollout_steps_per_second"] == pytest.approx(min(limit["cores"] / 0.002, 1000))
    assert limit["cpu_seconds_per_1000_steps"] == {"environment": 2.0}
    assert limit["gpu_seconds_per_1000_steps"] == {"inference": 1.0, "learning": 4.0}
    (line,) = limit_lines(limit)
    assert "GPU / (s per 1000 steps alone: inference 1.00, learning 4.00)" in line


def test_a_part_is_timed_by_the_clock_that_is_given(check):
    from limits import seconds_per_step

    now = 0.0

    def part():
        nonlocal now
        now += 5.0 if now == 0.0 else 0.5  # the first call warms up
        time.sleep(0.001)
        return 10

    assert seconds_per_step(part, 0.02, lambda: now) == pytest.approx(0.05)
    assert seconds_per_step(part, 0.0, lambda: now) == pytest.approx(0.05)
    now = 0.0
    assert seconds_per_step(part, 0.0, lambda: now) == pytest.approx(0.5)


# -------------------------------------------------------------------------------------------------------- nvidia-smi


def test_what_nvidia_smi_says(check, nvidia_smi):
    from facts import machine
    from gpus import used_by_process, used_mib

    boards = [{"name": "NVIDIA X100", "driver": "570.1", "memory_mib": memory} for memory in (81559.0, 0.0)]
    assert machine()["gpus"] == boards
    assert used_mib() == 1024.0
    held = used_by_process()
    assert held[psutil.Process().pid] == 100.0
    assert held[999999999] == 0.0
    for broken in ("echo 1, 2, 3\nexit 9", ""):
        nvidia_smi.write_text(f"#!/bin/sh\n{broken}\n")
        assert "gpus" not in machine()
        assert used_mib() is None
        assert used_by_process() == {}


# --------------------------------------------------------------------------------------------------------- the parts


@pytest.mark.atari
def test_the_probe_knows_pong_s_shapes(check):
    from workloads import workload

    config = workload("pong").config()
    spec = envs.describe(config.env, config.environment)
    for name in ("env_id", "observation_shape", "observation_dtype", "observation_kind", "action", "stack"):
        assert getattr(check.PONG, name) == getattr(spec, name)


def test_answers_are_compared_with_the_cpu_s(check):
    """TF32 rounds factors to ten bits of fraction: that must be found, and another order of sums must not."""
    from workloads import workload

    config = workload("pong").config()
    models = [build_model(check.PONG, config.network, seed) for seed in (0, 0, 0, 1)]
    exact, reordered, rounded, other = models
    with torch.no_grad():
        reordered.double()
        for parameter in rounded.parameters():
            bits = parameter.view(torch.int32)
            parameter.copy_(((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32))
    assert check.difference(exact, exact, check.PONG, 8) == 0.0
    assert check.difference(other, exact, check.PONG, 8) > 0.1
    assert check.difference(rounded, exact, check.PONG, 8) > check.TOLERANCE
    reordered.trunk[0].dtype = torch.float64
    assert 0.0 < check.difference(reordered, exact, check.PONG, 8) < check.TOLERANCE / 5


def test_the_probe_fails_where_answers_are_off(check, monkeypatch, small):
    monkeypatch.setattr(check, "TIMED_S", 0.01)
    outcome = check.probe(small("probe"))
    assert outcome["ok"]
    assert [size["rows"] for size in outcome["sizes"]][-1] >= check.REPLICAS
    assert outcome["sizes"][-1]["invariant"]
    assert all(0 < size["milliseconds"] < 1000 for size in outcome["sizes"])
    monkeypatch.setattr(check, "difference", lambda *_: 1e-3)
    outcome = check.probe(small("probe"))
    assert not outcome["ok"]
    assert "1.0e-03" in outcome["error"]


def test_bits_are_those_of_every_layout(check, monkeypatch, small, capsys):
    monkeypatch.setattr(check, "BITS", {"total_steps": 8 * 32 * 2})
    monkeypatch.setattr(check, "LAYOUTS", {"hts": "1x1,2x2x1"})
    outcome = check.bits(small("bits"))
    assert outcome["ok"], capsys.readouterr().out
    first, second, other_seed = outcome["runs"]
    for digest in ("trajectory", "parameters"):
        assert first[digest] == second[digest] != other_seed[digest]
    json.dumps(outcome)


def test_bits_that_differ_are_a_failure(check, monkeypatch, small):
    from htsrl.digests import Place
    from htsrl.verify import Row

    def verify(trials):
        for k in range(4):
            place = Place(1, "action", 3, 2) if k == 1 else None
            yield Row(f"{k}x1", "-", k // 3, "a", "b", "c", "same", place, 1.0, ok=k != 1)

    monkeypatch.setattr(check, "verify", verify)
    outcome = check.bits(small("bits", num_envs=16))
    assert not outcome["ok"]
    assert "the determinism contract is broken" in outcome["error"]
    assert outcome["runs"][1]["first_difference"] == "interval 1, replica 3, step 2: action"


def test_speed_stands_beside_the_limit_and_memory_beside_the_gpu_s(check, monkeypatch, small, nvidia_smi):
    import throughput
    from limits import Costs

    costs = Costs(environment=1e-5, inference=1e-5, learning=2e-5)
    monkeypatch.setattr(throughput, "costs_alone", lambda *_: costs)  # which other tests measure
    outcome = check.speed(small("speed"))
    figures = outcome["medians"]["hts"]
    limit = outcome["limit"]["cores"] / 4e-5
    assert figures["of_limit"] == pytest.approx(figures["steps_per_second"] / limit)

    outcome = check.memory(small("memory", num_executors=2))
    roles = outcome["roles"]
    assert {role: each["processes"] for role, each in roles.items()} == {
        "run": 1, "fork server": 1, "resource tracker": 1, "executor": 2, "actor": 1
    }  # fmt: skip
    assert all(each["gpu_mib"] == 100.0 * each["processes"] for each in roles.values())
    assert roles["actor"]["peak_rss_mib"] > 50  # it has torch
    assert outcome["gpu_taken_mib"] == 0.0

    nvidia_smi.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(RunFailed, match=r"ended with status 2: .*--no-such is not known"):
        check.memory(small("memory", no_such=3))


# -------------------------------------------------------------------------------------------------------- all of it


def test_a_broken_part_hides_no_other(check, monkeypatch, capsys, tmp_path):
    command = check.Check.command
    broken = "import os, sys\nprint('warm', 'it broke', sep='\\n', file=sys.stderr)\nos.kill(os.getpid(), 9)"

    def command_of(self, path):
        return [sys.executable, "-c", broken] if self.part == "bits" else command(self, path)

    from workloads import FIXED, Workload

    missing = Workload("missing", "module_that_is_not_there:Nothing-v0", "ppo")
    monkeypatch.setitem(FIXED, "missing", missing)
    monkeypatch.setattr(check.Check, "command", command_of)
    monkeypatch.setitem(check.PARTS, "bits", check.Part(check.bits, ("missing", "football-synthetic")))
    monkeypatch.setitem(check.PARTS, "probe", check.Part(check.probe, ("pong",), plays=False))
    path = tmp_path / "check.json"
    arguments = ["--device", "cpu", "--parts", "bits,probe", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["device_check.py", *arguments])
    assert check.main() == 1
    record = json.loads(path.read_text())
    assert {"command", "date", "commit", "machine", "versions", "device", "cuda", "cudnn"} <= record.keys()
    left_out, failed, well = record["checks"]
    assert left_out["ok"] is None
    assert failed["ok"] is False
    assert failed["error"] == "it was ended by SIGKILL: it broke"
    assert well["ok"] is True
    assert (well["part"], well["workload"], well["device"]) == ("probe", "pong", "cpu")
    assert well["sizes"][-1]["rows"] == 8
    assert well["check_seconds"] > 0
    said = capsys.readouterr().out
    assert "bits football-synthetic on cpu: FAILED: it was ended by SIGKILL: it broke, " in said
    assert "probe pong on cpu: well, " in said


def test_a_check_that_hangs_is_ended_with_its_processes(check, monkeypatch, small, tmp_path):
    started = tmp_path / "started"
    child = "import time; time.sleep(600)"
    hangs = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
pathlib.Path({str(started)!r}).write_text(str(child.pid))
time.sleep(600)
"""
    monkeypatch.setattr(check.Check, "command", lambda self, path: [sys.executable, "-c", hangs])
    outcome = check.asked_elsewhere(small("bits"), 2.0)
    assert outcome["ok"] is False
    assert outcome["error"].startswith("it was not done after 2 s")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(started.read_text())).wait(10)  # which fails where it lives on


def test_speed_is_compared_with_the_cpu_s(check):
    asked = [str(each) for each in check.checks(["bits", "speed"], "cuda", 1.0)]
    assert asked == [
        "bits football-synthetic on cuda",
        "bits pong on cuda",
        "speed pong on cuda",
        "speed pong on cpu",
        "speed football-synthetic on cuda",
        "speed football-synthetic on cpu",
    ]
    assert len(list(check.checks(["speed"], "cpu", 1.0))) == 2

    def outcome(device, speed):
        medians = {"hts": {"steps_per_second": speed, "of_limit": 0.5}}
        about = {"part": "speed", "workload": "pong", "device": device, "check_seconds": 30.0}
        return about | ({"ok": True, "medians": medians} if speed else {"ok": False, "error": "no"})

    lines = list(check.summary([outcome("cuda", 3000.0), outcome("cpu", 1200.0)]))
    assert lines[1:] == ["pong: 2.50 times as fast on cuda as on the CPU alone", "60 s in all"]
    assert list(check.summary([outcome("cuda", 3000.0), outcome("cpu", None)]))[1:] == ["60 s in all"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "torch sees no GPU here; `--device cpu` tries the check itself without one"),
        (["--device", "cuda:1"], "torch sees no GPU here"),
        (["--device", "auto"], "--device must be cuda, cuda:NUMBER or cpu"),
        (["--device", "tpu"], "--device must be"),
        (["--device", "cpu", "--parts", "probe,taste"], "taste is not a part"),
        (["--device", "cpu", "--seconds", "0"], "--seconds"),
        (["--device", "cpu", "--only", "chess"], "chess is not a workload"),
    ],
)
def test_what_is_refused(check, monkeypatch, capsys, arguments, words):
    from facts import run_main

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["device_check.py", *arguments])
    assert run_main(check.main) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("device_check.py: error: ")
    assert words in said.err
    assert said.err.count("\n") == 1
