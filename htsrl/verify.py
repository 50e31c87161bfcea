"""``htsrl verify``: a configuration gives the same bits in any layout, with any delays; another seed gives others."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from htsrl import determinism, envs, rng
from htsrl.checkpoint import Checkpoint
from htsrl.config import AnyConfig, OutputOptions
from htsrl.digests import DIGESTED, Digests, Place, RowChecksums, Trail, first_difference, read_digests, row_checksums
from htsrl.envs.spec import EnvSpec
from htsrl.report import Reporter
from htsrl.resolve import resolve
from htsrl.run import Run
from htsrl.rundir import CONFIG, INITIAL, require_run
from htsrl.tomlfile import load_config
from htsrl.training import changed_environment, changed_fingerprint, last_good_checkpoint
from htsrl.trials import Trial, with_layout, with_other_seed
from htsrl.usercode import refuse_code_in

# With --kills: the longest time between two strikes, and the time after which a stopped process counts as hung.
LONGEST_PEACE_S = 1.0
STOPPED_TOO_LONG_S = 5.0


@dataclass(frozen=True)
class Row:
    """What one trial came to, beside the reference."""

    layout: str
    disturbed: str
    seed: int
    trajectory: str
    parameters: str
    losses: str
    """Digests over the whole run."""
    bits: str
    """'reference', 'same' or 'different'."""
    first_difference: Place | None
    steps_per_second: float
    ok: bool
    """Whether that is as it must be: the same, or for another seed different."""


# -------------------------------------------------------------------------------------------------------- comparing


def verify(trials: Sequence[Trial]) -> Iterator[Row]:
    """Run every trial, and the first one once more with another seed; yields each outcome as soon as it is known.

    A trial is as it must be if every row's checksum and every interval's digests are those of the first trial. With
    another seed trajectory and parameters must both differ: a check that can't tell two runs apart shows nothing.

    Raises:
        ConfigError: the environment or the device is refused; nothing was started.
        RunFailed: a trial failed.
    """
    reference = trials[0]
    spec = envs.describe(reference.config.env, reference.config.environment)
    first: Trail | None = None
    for trial in trials:
        trail, speed = watch(trial, spec)
        place = None if first is None else first_difference(first, trail)
        bits = "reference" if first is None else "same" if place is None else "different"
        first = first or trail
        yield Row(
            trial.layout, trial.disturbed, trial.config.seed, **trail.summary(),
            bits=bits, first_difference=place, steps_per_second=speed, ok=place is None,
        )  # fmt: skip

    assert first is not None
    other = replace(reference, config=with_other_seed(reference.config))
    trail, speed = watch(other, spec)
    ours, theirs = first.summary(), trail.summary()
    ok = ours["trajectory"] != theirs["trajectory"] and ours["parameters"] != theirs["parameters"]
    place = first_difference(first, trail)
    yield Row(
        other.layout, other.disturbed, other.config.seed, **theirs,
        bits="different" if ok else "same", first_difference=place, steps_per_second=speed, ok=ok,
    )  # fmt: skip


def watch(trial: Trial, spec: EnvSpec) -> tuple[Trail, float]:
    """Run ``trial`` to its end in a temporary folder; returns its trail and steps/s."""
    config = prepare(trial.config, spec)
    if trial.kills:
        forgiving = {"step_timeout": STOPPED_TOO_LONG_S, "max_restarts": 1000}
        config = config.model_copy(update={"runtime": config.runtime.model_copy(update=forgiving)})
    with temporary_run_dir() as run_dir, closing(WatchedReporter(config, spec, run_dir)) as reporter:
        run = WatchedRun(config, spec, run_dir, reporter, delay_ms=trial.delay_ms)
        with run, killing(run) if trial.kills else nullcontext():
            run.train(threading.Event())
        return Trail(reporter.records, run.rows), run.result.values["steps_per_second"]


@contextmanager
def killing(run: Run) -> Iterator[None]:
    """Kill or stop a random executor or actor of ``run``, again and again, at random moments of its work."""
    done = threading.Event()
    generator = rng.unseeded()

    def strike() -> None:
        answered_before = 0
        while not done.wait(generator.random() * LONGEST_PEACE_S):
            crew, answered = list(run.crew.children), int(run.control.answered.sum())
            # A process that has just been replaced may finish a step first: progress is what a run recovers with
            if not all(child.ready for child in crew) or answered == answered_before:
                continue
            answered_before = answered
            child = crew[int(generator.integers(len(crew)))]
            with suppress(OSError):  # it was being replaced
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL if generator.random() < 0.7 else signal.SIGSTOP)

    thread = threading.Thread(target=strike, name="killer")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class WatchedRun(Run):
    """A run that keeps a checksum of every row."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.rows: list[RowChecksums] = []
        super().__init__(*arguments, **options)

    def consume(self, j: int, record: dict[str, float]) -> None:
        self.rows.append(row_checksums(self.storages[j % 2]))
        super().consume(j, record)


class PassingReporter(Reporter):
    """The reporter of a run that is gone when it ends: there is no result to write or to announce."""

    def finish(self, result: Mapping[str, Any]) -> None:
        pass


class WatchedReporter(PassingReporter):
    """Keeps the digests, too. What is done to the processes on purpose is not news."""

    def note(self, message: str) -> None:
        pass

    def __init__(self, config: AnyConfig, spec: EnvSpec, run_dir: Path) -> None:
        self.records: list[Digests] = []
        super().__init__(config, spec, run_dir)

    def digests(self, record: Mapping[str, int | str]) -> None:
        self.records.append(record)
        super().digests(record)


# --------------------------------------------------------------------------------------------------------- replaying


@dataclass(frozen=True)
class Replay:
    """What came of a recorded run that was replayed."""

    run_dir: str
    layout: str
    intervals: int
    """How many were compared."""
    first_difference: int | None
    """The first interval that differs, after which the replay stopped."""
    different: tuple[str, ...]
    """Which of DIGESTED differ there."""
    notes: tuple[str, ...]
    """What may explain a difference."""

    @property
    def ok(self) -> bool:
        return self.first_difference is None


def replay(run_dir: Path, layout: str | None = None, delay_ms: float = 0.0) -> Replay:
    """Run the configuration of ``run_dir`` again from the beginning, up to the first interval that differs.

    Args:
        run_dir: a run that was trained with ``--record-digests``; nothing in it is changed.
        layout: executors x actors; by default the run's own.
        delay_ms: as in a :class:`Trial`.

    Raises:
        ConfigError: there is no such run, it has recorded no digests, its environment is not installed.
        RunFailed: the replay failed.
    """
    require_run(run_dir)
    recorded = read_digests(run_dir)
    config = load_config(run_dir / CONFIG)
    refuse_code_in(run_dir, config.env, config.network.network)
    if layout is not None:
        config = with_layout(config, layout)
    spec = envs.describe(config.env, config.environment)
    config = prepare(config, spec)
    checkpoint, _ = last_good_checkpoint(run_dir)
    notes = () if checkpoint is None else tuple(reservations(checkpoint, config, spec))
    stop = threading.Event()
    with (
        temporary_run_dir(run_dir / INITIAL) as folder,
        closing(ComparingReporter(config, spec, folder, recorded, stop)) as reporter,
        Run(config, spec, folder, reporter, delay_ms=delay_ms) as run,
    ):
        run.train(stop)
    return Replay(
        run_dir=str(run_dir),
        layout=layout or "the run's own",
        intervals=reporter.compared,
        first_difference=reporter.interval_different,
        different=reporter.different,
        notes=notes,
    )


class ComparingReporter(PassingReporter):
    """Compares digests with recorded ones, and stops the run where they differ or end."""

    def __init__(
        self, config: AnyConfig, spec: EnvSpec, run_dir: Path, recorded: Mapping[int, Digests], stop: threading.Event
    ) -> None:
        self._recorded, self._stop = recorded, stop
        self.compared = 0
        self.interval_different: int | None = None
        self.different: tuple[str, ...] = ()
        super().__init__(config, spec, run_dir)

    def digests(self, record: Mapping[str, int | str]) -> None:
        super().digests(record)
        j = int(record["interval"])
        if self.interval_different is None and j in self._recorded:
            self.compared += 1
            self.different = tuple(name for name in DIGESTED if record[name] != self._recorded[j][name])
            if self.different:
                self.interval_different = j
        if self.different or j >= max(self._recorded):
            self._stop.set()


def reservations(checkpoint: Checkpoint, config: AnyConfig, spec: EnvSpec) -> Iterator[str]:
    """Reasons for which a replay may rightly differ from the run of ``checkpoint``."""
    if not checkpoint.state["reproducible"]:
        yield "the run is marked as not reproducible"
    machine = changed_fingerprint(checkpoint, config)
    if machine:
        yield f"not the same machine or packages ({machine})"
    environment = changed_environment(checkpoint, spec)
    if environment:
        yield f"not the same environment ({environment})"


# ------------------------------------------------------------------------------------------------------------- shared


def prepare(config: AnyConfig, spec: EnvSpec) -> AnyConfig:
    """``config`` with all that is left to the machine, writing nothing but digests; puts torch in order for it."""
    config = resolve(config, spec)
    determinism.enable()
    output = OutputOptions(progress="none", tensorboard=False, record_digests=True, keep_checkpoints=1)
    return config.model_copy(update={"output": output})


@contextmanager
def temporary_run_dir(initial: Path | None = None) -> Iterator[Path]:
    """A folder that is gone afterwards; with the initial weights of a forked run, if there are any."""
    with tempfile.TemporaryDirectory(prefix="htsrl-verify-") as folder:
        if initial is not None and initial.is_file():
            shutil.copy(initial, Path(folder) / INITIAL)
        yield Path(folder)


# ------------------------------------------------------------------------------------------------------------- tables


def heading(config: AnyConfig) -> str:
    """What is run, in one line."""
    runtime = config.runtime
    rows = runtime.num_envs * runtime.sync_interval
    return (
        f"{config.env}, {config.algo}, {runtime.schedule}, seed {config.seed}: {config.total_steps:,} steps in "
        f"{-(-config.total_steps // rows)} intervals of {runtime.num_envs} replicas x {runtime.sync_interval} steps"
    )


def head_line() -> str:
    """The head of the table."""
    return _line(("layout", "disturbed", "trajectory", "parameters", "losses", "bits", "steps/s"))


def row_lines(row: Row, reference: Row) -> list[str]:
    """A row of the table, and below it where it differs if it must not."""
    bits = row.bits
    if row.seed != reference.seed:
        bits = f"{bits} (seed {row.seed})"
    digests = (row.trajectory[:10], row.parameters[:10], row.losses[:10])
    lines = [_line((row.layout, row.disturbed, *digests, bits, f"{row.steps_per_second:,.0f}"))]
    if not row.ok and row.seed == reference.seed:
        lines.append(f"  first difference: {row.first_difference}")
    return lines


def verdict(rows: Sequence[Row]) -> str:
    """The last line."""
    reference, *others, other_seed = rows
    different = [row for row in others if not row.ok]
    if different:
        return f"{len(different)} of {len(others)} runs differ from the first: the determinism contract is broken"
    if not other_seed.ok:
        return (
            f"seed {other_seed.seed} gives the trajectory or parameters of seed {reference.seed}, so this check can't "
            "tell runs apart: it shows nothing"
        )
    return "the same bits in every run; another seed gives others"


def replay_line(outcome: Replay) -> str:
    """What came of a replay, in one line."""
    where = f"{outcome.run_dir} (layout: {outcome.layout})"
    if outcome.first_difference is None:
        line = f"{where}: the same bits in all {outcome.intervals} recorded intervals"
    else:
        line = f"{where}: interval {outcome.first_difference} is the first that differs: {', '.join(outcome.different)}"
    return "\n".join([line, *(f"  note: {note}" for note in outcome.notes)])


def as_json(config: AnyConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything about a verification, for programs."""
    spec = envs.describe(config.env, config.environment)
    config = resolve(config, spec)
    runtime = config.runtime
    return {
        "ok": all(row.ok for row in rows),
        "env": config.env,
        "algo": config.algo,
        "schedule": runtime.schedule,
        "total_steps": config.total_steps,
        "num_envs": runtime.num_envs,
        "sync_interval": runtime.sync_interval,
        "fingerprint": determinism.fingerprint(int(runtime.learner_threads), runtime.device) | spec.versions,
        "runs": [asdict(row) for row in rows],
    }


def _line(cells: Sequence[str]) -> str:
    widths = (9, 14, 11, 11, 11, 18)
    return " ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + f" {cells[-1]:>9}"
