"""What the machine lacks is refused in one sentence, with needed and available, before anything starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest

from htsrl import envs, limits
from htsrl.errors import ConfigError
from htsrl.limits import Left, cgroup_folders, memory_left, tasks_left, tasks_of_user
from htsrl.resolve import resolve
from htsrl.settings import configure
from htsrl.storage.fields import Field
from htsrl.storage.memory import total_bytes


def refused(env="CartPole-v1", **settings):
    """The sentence with which a configuration is refused on this machine."""
    config = configure(env, **settings)
    with pytest.raises(ConfigError) as refusal:
        resolve(config, envs.describe(config.env, config.environment))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


# One process for all of these, which may lower its own limits; ``main`` is the command line.
IN_A_CHILD = """
import re, resource, sys
from htsrl.cli import main
from htsrl.resolve import resolve  # loads torch, which takes address space

def limited(kind, number):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (number, before[1]))
    return kind, before

def train(folder, *flags):
    sys.stderr.flush()
    status = main(["train", "--env", "CartPole-v1", "--run-dir", folder, "--num-envs", "8", "--minibatches", "1",
                   "--progress", "none", *flags])
    print(status, flush=True)
"""


def in_a_child(tmp_path, script):
    """Run ``script`` behind IN_A_CHILD; returns its lines on standard output and on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD + script], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_limits_of_the_shell_are_refused_before_anything_is_written(tmp_path):
    statuses, messages = in_a_child(
        tmp_path,
        """
before = limited(resource.RLIMIT_NOFILE, 256)
train("run", "--num-envs", "100", "--num-executors", "100", "--num-actors", "3")
resource.setrlimit(*before)
before = limited(resource.RLIMIT_AS, 40 << 30)
train("run", "--sync-interval", "100000000")
resource.setrlimit(*before)
before = limited(resource.RLIMIT_FSIZE, 1 << 20)
train("run", "--sync-interval", "10000")
""",
    )
    assert statuses == ["2", "2", "2"]
    assert not (tmp_path / "run").exists()
    handles, space, size = messages
    found = re.fullmatch(
        r"htsrl: error: 100 executors and 3 actors need (\d+) file handles, and 256 are allowed here \(ulimit -n\): "
        r"run `ulimit -n (\d+)` first, or lower --num-executors or --num-actors",
        handles,
    )
    assert found, handles
    assert found[1] == found[2]
    assert 7 * 103 < int(found[1]) < 7 * 103 + 100
    shape = r"storages of 8 replicas x 100,000,000 steps need \d+\.\d GiB of memory, and \d+\.\d GiB are"
    assert re.search(f"{shape} (left of the address space|available on this machine)", space), space
    assert "need 10 MiB of memory, and 1 MiB are allowed for one file" in size
    assert "lower --num-envs or --sync-interval" in space


def test_as_many_handles_as_are_asked_for_are_enough(tmp_path):
    """A run with evaluator, checkpoints and TensorBoard, at the very limit that the refusal of one less names."""
    statuses, messages = in_a_child(
        tmp_path,
        """
import io, contextlib
flags = ("--num-executors", "8", "--num-actors", "2", "--sync-interval", "8", "--total-steps", "400",
         "--eval-every", "100", "--checkpoint-every", "100")
before = limited(resource.RLIMIT_NOFILE, 64)
with contextlib.redirect_stderr(io.StringIO()) as message:
    train("run", *flags)
resource.setrlimit(*before)
needed = int(re.search(r"need (\\d+)", message.getvalue())[1])
limited(resource.RLIMIT_NOFILE, needed)
train("run", *flags)
""",
    )
    assert (statuses[0], statuses[-1]) == ("2", "0"), messages
    assert messages == []


def test_a_process_that_can_not_be_started_is_one_sentence_and_leaves_nothing(tmp_path):
    """The handles run out while the crew starts: somebody else has taken them since."""
    lines, _ = in_a_child(
        tmp_path,
        """
import gc, os, psutil, time
from pathlib import Path
from htsrl import determinism, envs, processes
from htsrl.errors import RunFailed
from htsrl.report import Reporter
from htsrl.run import Run
from htsrl.settings import configure
config = configure("CartPole-v1", num_envs=8, num_executors=8, minibatches=1, progress="none", tensorboard=False)
spec = envs.describe(config.env, config.environment)
config = resolve(config, spec)
determinism.enable()
processes.launch(envs.module_of(config.env))
reporter = Reporter(config, spec, Path("."))
def held():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
before = held()
limit = limited(resource.RLIMIT_NOFILE, before + 60)
try:
    Run(config, spec, Path("."), reporter)
except RunFailed as failure:
    print(str(failure))
resource.setrlimit(*limit)
deadline = time.monotonic() + 30
names = lambda: [p.name() for p in psutil.Process().children(recursive=True) if p.name().startswith(("exec", "act"))]
while names() and time.monotonic() < deadline:
    time.sleep(0.05)
print(held() - before, names())
""",
    )
    assert re.match(r"executor-\d can't be started: .*[Tt]oo many open files.*ulimit -n", lines[0]), lines
    # Where its second pipe fails, multiprocessing itself forgets the first
    assert re.fullmatch(r"(-1|0|2) \[\]", lines[1]), lines


def test_too_many_processes_of_one_kind():
    assert "at most 200 each" in refused(num_envs=300, num_executors=250)


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_is_refused_with_what_is_needed_and_left(monkeypatch):
    monkeypatch.setattr(limits, "memory_left", lambda: Left(1 << 20, "left"))
    message = refused(num_envs=8, sync_interval=16_384)
    # obs 16, noise 8, action 8, log-probability, value and reward 12, flags 3, statistics 16 bytes
    needed = 2 * 8 * 16_384 * 63 / 2**20
    assert f"need {needed:,.0f} MiB of memory, and 1 MiB are left: lower --num-envs or --sync-interval" in message
    assert f"need {1.5 * needed:,.0f} MiB" in refused(num_envs=8, sync_interval=16_384, algo="impala", schedule="async")
    monkeypatch.setattr(limits, "memory_left", lambda: Left(1 << 30, "left"))
    config = configure("CartPole-v1", num_envs=8, sync_interval=16_384)
    resolve(config, envs.describe(config.env, config.environment))


def test_sizes_beyond_64_bits_are_refused_too():
    assert total_bytes({"a": [Field("f", (1 << 40, 1 << 40), np.dtype("f4"), "run", ())]}) == 4 << 80
    assert "of memory" in refused(num_envs=10**9, sync_interval=10**12, minibatches=1)


@pytest.fixture
def version2(tmp_path):
    """A container's cgroup of version 2: 8 GiB for the pod, 2 GiB for the container in it."""
    for folder, limit, used, cache in (("", None, None, None), ("pod", 8, 7, 3), ("pod/box", 2, 1, 0.25)):
        place = tmp_path / "mount" / folder
        place.mkdir()
        if limit:
            (place / "memory.max").write_text(f"{int(limit * 2**30)}\n")
            (place / "memory.current").write_text(f"{int(used * 2**30)}\n")
            (place / "memory.stat").write_text(f"anon 7\ninactive_file {int(cache * 2**30)}\nfile 9\n")
    (tmp_path / "mount" / "pod" / "pids.max").write_text("max\n")
    (tmp_path / "mount" / "pod" / "pids.current").write_text("40\n")
    (tmp_path / "mount" / "pod" / "box" / "pids.max").write_text("64\n")
    (tmp_path / "mount" / "pod" / "box" / "pids.current").write_text("40\n")
    (tmp_path / "cgroup").write_text("0::/pod/box\n")
    return tmp_path / "cgroup", tmp_path / "mount"


def test_a_container_s_memory_counts(version2):
    left = memory_left(*version2)
    assert left.amount == 1.25 * 2**30  # what it may still take, and what it only keeps of files
    assert "left of this container's 2.0 GiB" in left.where
    (version2[1] / "pod" / "memory.current").write_text(f"{int(10.9 * 2**30)}")
    assert memory_left(*version2).amount == pytest.approx(0.1 * 2**30, abs=2)  # its pod has less


def test_the_older_cgroups_count(tmp_path):
    place = tmp_path / "mount" / "memory"
    place.mkdir(parents=True)
    (place / "memory.limit_in_bytes").write_text(str(3 << 30))
    (place / "memory.usage_in_bytes").write_text(str(1 << 30))
    (place / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 5\n")
    # The path is the machine's, of which the container sees its own part alone
    (tmp_path / "cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/docker/0123\n")
    assert memory_left(tmp_path / "cgroup", tmp_path / "mount").amount <= (2 << 30) + 5
    (tmp_path / "cgroup").write_text("4:memory:/docker/0123\n")
    assert memory_left(tmp_path / "cgroup", tmp_path / "mount").amount == (2 << 30) + 5


def test_without_cgroups_the_machine_counts(tmp_path):
    left = memory_left(tmp_path / "nothing", tmp_path)
    assert left.where == "available on this machine"
    assert left.amount == pytest.approx(psutil.virtual_memory().available, rel=0.5)
    assert list(cgroup_folders("memory", tmp_path / "nothing", tmp_path)) == []


# ----------------------------------------------------------------------------------------------------------- processes


def test_processes_and_threads_are_refused(monkeypatch, version2):
    left = tasks_left(*version2)
    assert (left.amount, left.where) == (24, "left of this container's 64 (its cgroup's limit)")
    monkeypatch.setattr(limits, "tasks_left", lambda: left)
    message = refused(num_envs=32, num_executors=16, num_actors=1, learner_threads=1)
    assert message.startswith("16 executors and 1 actor need 26 processes and threads, and 24 more are left of")
    config = configure("CartPole-v1", num_envs=32, num_executors=14, num_actors=1, learner_threads=1)
    resolve(config, envs.describe(config.env, config.environment))


def test_a_user_s_limit_counts_threads(monkeypatch, tmp_path):
    before = tasks_of_user(os.getuid())
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(500)]
    for thread in threads:
        thread.start()
    counted = tasks_of_user(os.getuid())
    done.set()
    assert counted - before > 250  # others of this user come and go
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (counted + 1000, counted + 1000))
    monkeypatch.setattr(os, "getuid", lambda: 65_534)
    monkeypatch.setattr(limits, "tasks_of_user", lambda uid: counted)
    left = tasks_left(tmp_path / "nothing", tmp_path)
    assert (left.amount, left.where) == (1000, "allowed for this user (ulimit -u)")
