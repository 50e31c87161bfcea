#!/usr/bin/env python3
"""Does a run survive? Kills and stops its processes from outside, again and again, and compares the bits.

    python benchmarks/faults.py --minutes 5
    python benchmarks/faults.py --minutes 1 --workloads cartpole,football --json faults.json

Small runs of `htsrl train`, one workload after the other, until the time is over. Executors and actors are killed
(SIGKILL) or stopped (SIGSTOP: found out after --step-timeout, or --start-timeout while they come up) at random moments,
up to three in a row, then left in peace until two more intervals are recorded. The run's own process is killed, too,
and resumed. A run survives its faults if it ends with the trajectory, parameters and losses of an undisturbed one,
interval by interval; that another seed gives others is checked first. Environments that aren't installed are left out.
Exit status: 0 every fault survived, 1 not.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import psutil
from facts import ROOT, chosen, circumstances, number, run_main, save_json, table
from workloads import Workload, flags

from htsrl import envs, rng
from htsrl.digests import DIGESTED
from htsrl.errors import ConfigError
from htsrl.logfiles import read_json_lines
from htsrl.rundir import DIGESTS, METRICS

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
STEP_TIMEOUT_S = 3.0
# Of a process that is stopped while it comes up.
START_TIMEOUT_S = 20.0
# Nothing of a run takes as long as this; a figure for "never".
NEVER_S = 120.0
LOOK_EVERY_S = 0.005
MOST_IN_A_ROW = 3
# A run goes on between two faults for up to this long.
LONGEST_PEACE_S = 1.0

WORKLOADS = {
    each.name: each
    for each in (
        Workload("cartpole", "CartPole-v1", "ppo", {"num_envs": 8, "sync_interval": 64, "total_steps": 8 * 64 * 80}),
        Workload("pong", "atari:Pong", "ppo", {"num_envs": 4, "sync_interval": 16, "total_steps": 4 * 16 * 30}),
        Workload("football", "gfootball", "ppo", {"num_envs": 4, "sync_interval": 16, "total_steps": 4 * 16 * 30}),
        Workload(
            "sleep", "synthetic:sleep", "a2c",
            {"num_envs": 8, "sync_interval": 32, "total_steps": 8 * 32 * 40, "step_ms": 2.0},
        ),
    )
}  # fmt: skip
LAYOUT = {"num_executors": 2, "num_actors": 2}
FAULTS = {
    ("executor", SIGKILL): 0.3,
    ("actor", SIGKILL): 0.3,
    ("executor", SIGSTOP): 0.15,
    ("actor", SIGSTOP): 0.15,
    ("run", SIGKILL): 0.1,
}
"""How often each is chosen."""


@dataclass(frozen=True)
class Fault:
    """What was done to a process."""

    victim: str
    number: Signals
    seconds: float
    """Until another was there in its place; for the run's own process, until all of its processes were gone."""

    @property
    def kind(self) -> str:
        return f"{self.victim} {self.number.name}"


@dataclass
class Outcome:
    """What came of a disturbed run."""

    workload: str
    seconds: float
    faults: list[Fault] = field(default_factory=list)
    survived: bool = False
    why_not: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M", help="begin no further run after this long")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), metavar="W,W", help=", ".join(WORKLOADS))
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="where to keep what was found")
    given = parser.parse_args()
    if given.minutes <= 0:
        raise ConfigError(f"--minutes must be above 0, got {given.minutes:g}")
    workloads = list(installed(chosen(given.workloads, tuple(WORKLOADS), "workload")))
    if not workloads:
        raise ConfigError("none of these workloads is installed; `htsrl doctor` says what is missing")

    undisturbed = {}
    for workload in workloads:
        print(f"{workload.name}: undisturbed, and with another seed ...", flush=True)
        undisturbed[workload.name] = digests_of(workload, seed=0)
        other = digests_of(workload, seed=1)
        if any(one == another for one, another in zip(undisturbed[workload.name][-1], other[-1])):
            print(f"{workload.name}: another seed gives the same bits, so this check shows nothing")
            return 1

    outcomes: list[Outcome] = []
    end = time.monotonic() + 60 * given.minutes
    while time.monotonic() < end:
        workload = workloads[len(outcomes) % len(workloads)]
        outcome = disturb(workload, undisturbed[workload.name])
        outcomes.append(outcome)
        verdict = "the same bits" if outcome.survived else f"NOT SURVIVED: {outcome.why_not}"
        print(f"{workload.name}: {len(outcome.faults)} faults in {outcome.seconds:.0f} s, {verdict}", flush=True)
        save_json(given.json, circumstances() | as_record(outcomes))
    print("\n" + table(lines(outcomes)))
    return 0 if all(outcome.survived for outcome in outcomes) else 1


def installed(names: Iterable[str]) -> Iterator[Workload]:
    """The workloads whose environments can be made here."""
    for name in names:
        config = WORKLOADS[name].config()
        try:
            envs.describe(config.env, config.environment)
            yield WORKLOADS[name]
        except ConfigError as error:
            print(f"left out: {name}: {error}", flush=True)


# ----------------------------------------------------------------------------------------------------------- one run


class Training:
    """A run of ``htsrl train``, or ``htsrl resume``, in ``run_dir``, and its processes as seen from outside."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        command = [sys.executable, "-m", "htsrl", *arguments, "--progress", "none"]
        with self._said.open("w") as said:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)

    @property
    def _said(self) -> Path:
        return self.run_dir.with_suffix(".said")

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def children(self) -> dict[str, list[psutil.Process]]:
        """Its executors and actors, by the names that they give themselves."""
        found: dict[str, list[psutil.Process]] = {"executor": [], "actor": []}
        for server in self.process_tree(recursive=False):
            with suppress(psutil.Error):
                for child in server.children():
                    role = child.name().partition("-")[0]
                    if role in found:
                        found[role].append(child)
        return found

    def process_tree(self, recursive: bool = True) -> list[psutil.Process]:
        """All that it has started."""
        try:
            return psutil.Process(self.process.pid).children(recursive)
        except psutil.NoSuchProcess:
            return []

    def intervals(self) -> int:
        """How many it has recorded."""
        metrics = self.run_dir / METRICS
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def words(self) -> str:
        """What it has said."""
        return self._said.read_text().strip()


@contextmanager
def run_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="htsrl-faults-") as folder:
        yield Path(folder) / "run"


def command_of(workload: Workload, run_dir: Path, seed: int) -> list[str]:
    """What trains ``workload``, with checkpoints in most intervals."""
    config = workload.config()
    rows = config.runtime.num_envs * config.runtime.sync_interval
    settings = {**workload.settings, **LAYOUT, "checkpoint_every": 2 * rows, "step_timeout": STEP_TIMEOUT_S}
    settings |= {"start_timeout": START_TIMEOUT_S, "seed": seed, "max_restarts": 100_000, "run_dir": run_dir}
    switches = ["--record-digests", "--no-tensorboard"]
    return ["train", "--env", workload.env, "--algo", workload.algo, *flags(settings), *switches]


def read_digests(run_dir: Path) -> list[tuple[str, ...]]:
    """The DIGESTED of every interval."""
    return [tuple(record[name] for name in DIGESTED) for record in read_json_lines(run_dir / DIGESTS)]


def digests_of(workload: Workload, seed: int) -> list[tuple[str, ...]]:
    """What an undisturbed run does."""
    with run_folder() as run_dir:
        training = Training(run_dir, *command_of(workload, run_dir, seed))
        if training.process.wait() != 0:
            raise ConfigError(f"{workload.name} doesn't even run undisturbed: {training.words()}")
        return read_digests(run_dir)


def disturb(workload: Workload, undisturbed: Sequence[tuple[str, ...]]) -> Outcome:
    """Train under faults and compare."""
    started, generator = time.monotonic(), rng.unseeded()
    outcome = Outcome(workload.name, 0.0)
    with run_folder() as run_dir:
        training = Training(run_dir, *command_of(workload, run_dir, seed=0))
        while wait_for_intervals(training, 2):
            for _ in range(generator.integers(1, MOST_IN_A_ROW + 1)):
                time.sleep(generator.random() * LONGEST_PEACE_S)
                victim, signal = list(FAULTS)[generator.choice(len(FAULTS), p=list(FAULTS.values()))]
                fault = kill_run(training) if victim == "run" else strike(training, victim, signal, generator.random())
                if fault is None:  # the run was over, or busy with its start
                    break
                outcome.faults.append(fault)
                if fault.seconds >= NEVER_S:
                    break
                if victim == "run":
                    training = Training(run_dir, "resume", str(run_dir))
                    break
        outcome.seconds = time.monotonic() - started
        outcome.why_not = judge(training, outcome, read_digests(run_dir), undisturbed)
    outcome.survived = not outcome.why_not
    return outcome


def judge(training: Training, outcome: Outcome, digests: list, undisturbed: Sequence) -> str:
    """Why the run has not survived; nothing if it has."""
    if not training.over:
        for process in [*training.process_tree(), psutil.Process(training.process.pid)]:
            with suppress(psutil.Error):
                process.kill()
        training.process.wait()
        return f"it stood still for {NEVER_S:.0f} s after {outcome.faults[-1].kind if outcome.faults else 'its start'}"
    if training.process.returncode != 0:
        return f"exit status {training.process.returncode}: {training.words()}"
    if any(fault.seconds >= NEVER_S for fault in outcome.faults):
        return "processes stayed behind"
    for j, (one, other) in enumerate(zip(digests, undisturbed)):
        different = [name for name, mine, its in zip(DIGESTED, one, other) if mine != its]
        if different:
            return f"interval {j} differs: {', '.join(different)}"
    return "" if len(digests) == len(undisturbed) else f"{len(digests)} intervals instead of {len(undisturbed)}"


def wait_for_intervals(training: Training, count: int) -> bool:
    """Wait until ``count`` more intervals are recorded; False if the run ended, or stood still for NEVER_S."""
    wanted, deadline = training.intervals() + count, time.monotonic() + NEVER_S
    while training.intervals() < wanted:
        if training.over or time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return not training.over


def strike(training: Training, victim: str, signal: Signals, which: float) -> Fault | None:
    """Send ``signal`` to one of the run's children and wait until another has taken its place."""
    before = training.children()
    if not before[victim]:
        return None
    child = before[victim][int(which * len(before[victim]))]
    known = {each.pid for role in before.values() for each in role}
    with suppress(psutil.NoSuchProcess):
        child.send_signal(signal)
    struck = time.monotonic()
    while time.monotonic() < struck + NEVER_S:
        if training.over:
            return None
        now = {each.pid for role in training.children().values() for each in role}
        if child.pid not in now and now - known:
            return Fault(victim, signal, time.monotonic() - struck)
        time.sleep(LOOK_EVERY_S)
    return Fault(victim, signal, NEVER_S)


def kill_run(training: Training) -> Fault | None:
    """Kill the run's own process and wait until all of its processes are gone."""
    tree = training.process_tree()
    if training.over:
        return None
    training.process.kill()
    struck = time.monotonic()
    training.process.wait()
    _, alive = psutil.wait_procs(tree, timeout=NEVER_S)
    return Fault("run", SIGKILL, NEVER_S if alive else time.monotonic() - struck)


# ------------------------------------------------------------------------------------------------------------- results


def as_record(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What to keep of the runs."""
    return {
        "injected": sum(len(outcome.faults) for outcome in outcomes),
        "survived": sum(len(outcome.faults) for outcome in outcomes if outcome.survived),
        "step_timeout": STEP_TIMEOUT_S,
        "faults": {
            kind: {
                "injected": len(seconds),
                "survived": survived,
                "seconds_to_react": {"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)},
            }
            for kind, survived, seconds in by_kind(outcomes)
        },
        "workloads": {
            name: {"env": WORKLOADS[name].env, "algo": WORKLOADS[name].algo} | dict(WORKLOADS[name].settings) | LAYOUT
            for name in dict.fromkeys(outcome.workload for outcome in outcomes)
        },
        "runs": [
            {
                "workload": outcome.workload,
                "seconds": round(outcome.seconds, 1),
                "faults": [fault.kind for fault in outcome.faults],
                "same_bits": outcome.survived,
                "why_not": outcome.why_not or None,
            }
            for outcome in outcomes
        ],
    }


def by_kind(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, int, list[float]]]:
    """Each kind of fault: how many were survived, and the seconds until each was reacted to."""
    for victim, signal in FAULTS:
        kind = f"{victim} {signal.name}"
        found = [(fault, outcome) for outcome in outcomes for fault in outcome.faults if fault.kind == kind]
        if found:
            yield kind, sum(outcome.survived for _, outcome in found), [fault.seconds for fault, _ in found]


def lines(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The final table."""
    rows = [
        [kind, str(len(seconds)), str(survived), number(statistics.median(seconds)), number(max(seconds))]
        for kind, survived, seconds in by_kind(outcomes)
    ]
    injected = sum(len(outcome.faults) for outcome in outcomes)
    survived = sum(len(outcome.faults) for outcome in outcomes if outcome.survived)
    head = ["fault", "injected", "survived", "seconds to react", "at most"]
    return [head, *rows, ["all", str(injected), str(survived), "", ""]]


if __name__ == "__main__":
    raise SystemExit(run_main(main))
