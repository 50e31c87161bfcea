"""Train a policy: start a run, or resume one so that it is the same run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from htsrl import determinism, envs
from htsrl.async_run import AsyncRun
from htsrl.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, newest_checkpoint, write_checkpoint
from htsrl.config import AnyConfig, OutputOptions
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError, NonFinite
from htsrl.failure import save_failure
from htsrl.learner import make_algorithm
from htsrl.logfiles import rewind
from htsrl.models import FlatParameters, build_model
from htsrl.processes import RUN_SIGNALS
from htsrl.report import Reporter
from htsrl.resolve import resolve
from htsrl.restoring import load_run_checkpoint, refuse_unfit
from htsrl.run import Result, Run
from htsrl.rundir import (
    CHECKPOINTS,
    CONFIG,
    INITIAL,
    RESULT,
    alone_in,
    create_run_dir,
    plain,
    require_run,
    result_of,
    update_result,
    writing,
)
from htsrl.settings import Layer, flat, overlay
from htsrl.tomlfile import load_config, save_config
from htsrl.tracefile import refuse_unwritable
from htsrl.usercode import refuse_code_in

# Settings that no bit of a run's results depends on: a resumed run may change them.
FREE_SETTINGS = frozenset(
    {
        "layout", "num_executors", "num_actors", "envs_per_group", "max_restarts", "step_timeout", "start_timeout",
        "checkpoint_every", "keep_checkpoints", "eval_every", "eval_episodes", "eval_stochastic",
        "tensorboard", "record_digests", "progress", "trace", "trace_after", "trace_intervals",
    }
)  # fmt: skip
# What a forked run goes on from: weights, and the statistics by which they want their observations normalised.
CARRIED = ("parameters", "moments")
NO_CHANGES = Layer({}, str)
# A timeline is of one command: a resumed run makes another only if it is told to.
NO_TRACE = {name: OutputOptions.model_fields[name].default for name in ("trace", "trace_after", "trace_intervals")}


def train(config: AnyConfig) -> Result:
    """Train a policy; returns when the step budget is spent, or after an interrupt with a clean checkpoint.

    Raises:
        ConfigError: a setting, the environment or the run's folder is refused; no process was started.
        RunFailed: a child process, an environment or the update failed; all processes have ended.
    """
    spec = envs.describe(config.env, config.environment)
    config = resolve(config, spec)
    trainable_parameters(config, spec)  # what doesn't fit is refused before anything is written
    refuse_unwritable(config.output.trace, config.output.run_dir)
    run_dir = create_run_dir(config)
    with writing(run_dir / CONFIG):
        save_config(config, run_dir / CONFIG)
    return _execute(config, spec, run_dir, None)


def resume(run_dir: Path, changes: Layer = NO_CHANGES) -> Result | None:
    """Continue a run to its end, bit for bit as if it had never stopped; None if it has already finished.

    A run with schedule 'async' is continued with new trajectories.

    Args:
        run_dir: folder of a run that was interrupted, that failed, or whose machine went down.
        changes: settings that may differ from the run's own, see FREE_SETTINGS.

    Raises:
        ConfigError: the folder is not a run's, or a change would change results.
        RunFailed: as :func:`train`.
    """
    require_run(run_dir)
    before = load_config(run_dir / CONFIG)
    refuse_code_in(run_dir, before.env, before.network.network)
    config = overlay(before, Layer({**NO_TRACE, **changes.values}, changes.spell))
    refuse_changed_results(before, config, changes)
    refuse_unwritable(config.output.trace, run_dir)
    spec = envs.describe(config.env, config.environment)
    config = resolve(config, spec)
    checkpoint, damaged = last_good_checkpoint(run_dir)
    notes = [f"{reason}; it is set aside, going on from the one before it" for _, reason in damaged]
    if checkpoint is None and damaged:
        raise ConfigError(
            f"{damaged[0][1]}, and no other of this run is sound; delete {run_dir / CHECKPOINTS} to start over"
        )
    if checkpoint is None:
        notes.append("there is no checkpoint yet: starting over")
    else:
        if checkpoint.state["finished"]:
            finished = plain(checkpoint.state["result"] | {"interrupted": False})
            if not finished.items() <= result_of(run_dir).items():  # it went down before it had written this file
                with writing(run_dir / RESULT):
                    update_result(run_dir, finished | {"checkpoint": str(newest_checkpoint(run_dir))})
            return None
        refuse_changed_environment(checkpoint, spec)
        refuse_unfit(run_dir, checkpoint, config, spec)
        differences = changed_fingerprint(checkpoint, config)
        if differences:
            notes.append(f"not the same machine or packages as before ({differences}): bits may differ from here on")
            checkpoint = replace(checkpoint, state=checkpoint.state | {"reproducible": False})
        if checkpoint.state.get("snapshots") and not checkpoint.sealed:
            notes.append(
                "snapshots of environments are not used, this user's runs didn't make them: replaying episodes"
            )
    with alone_in(run_dir), writing(run_dir):
        for path, _ in damaged:
            path.rename(path.with_suffix(".damaged"))
        for unfinished in (*run_dir.glob(".*.tmp"), *(run_dir / CHECKPOINTS).glob(".*.tmp")):
            unfinished.unlink()
        if checkpoint is None:
            rewind(run_dir, 0, 0, frozenset())
        else:
            repeated = {int(name.split("/")[0]) for name in checkpoint.group("evaluation")}
            rewind(run_dir, checkpoint.state["interval"], checkpoint.state["steps"], repeated)
    return _execute(config, spec, run_dir, checkpoint, notes)


def fork(source: Path, changes: Layer = NO_CHANGES) -> Result:
    """Start a new run, with any settings, from the newest weights of another run.

    Raises:
        ConfigError: as :func:`resume`, or the weights don't fit the new run's network.
    """
    require_run(source)
    config = overlay(
        load_config(source / CONFIG), Layer({"run_dir": None, **NO_TRACE, **changes.values}, changes.spell)
    )
    refuse_code_in(source, config.env, config.network.network)
    spec = envs.describe(config.env, config.environment)
    config = resolve(config, spec)
    checkpoint = load_checkpoint(newest_checkpoint(source))
    weights = checkpoint.group("parameters")
    try:
        trainable_parameters(config, spec).load(weights)
    except ValueError as error:
        raise ConfigError(f"the weights of {source} don't fit the new run's network: {error}") from None
    refuse_unwritable(config.output.trace, config.output.run_dir)
    run_dir = create_run_dir(config)
    named = {f"{group}/{name}": each for group in CARRIED for name, each in checkpoint.group(group).items()}
    with writing(run_dir):
        write_checkpoint(run_dir / INITIAL, Checkpoint(named, {"forked_from": str(source)}))
        try:
            save_config(config, run_dir / CONFIG)
        except OSError:
            (run_dir / INITIAL).unlink()  # without it, this folder is as unused as before
            raise
    return _execute(config, spec, run_dir, None)


def trainable_parameters(config: AnyConfig, spec: EnvSpec) -> FlatParameters:
    """The initial parameters of the run's network; ConfigError where it doesn't fit environment or algorithm."""
    model = build_model(spec, config.network, config.seed)
    parameters = FlatParameters(model)
    make_algorithm(config, model, parameters)
    return parameters


def _execute(
    config: AnyConfig, spec: EnvSpec, run_dir: Path, checkpoint: Checkpoint | None, notes: list[str] | None = None
) -> Result:
    """Run from ``checkpoint``, or from the beginning, to the end."""
    determinism.enable()
    with alone_in(run_dir), closing(Reporter(config, spec, run_dir)) as reporter:
        for note in notes or ():
            reporter.note(note)
        kind = AsyncRun if config.runtime.schedule == "async" else Run
        try:
            with interrupts() as stop, kind(config, spec, run_dir, reporter, checkpoint) as run:
                run.train(stop)
                return run.result
        except NonFinite as failure:
            raise save_failure(run_dir, failure) from None


def last_good_checkpoint(run_dir: Path) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest checkpoint that can be read, and what is wrong with the newer ones."""
    damaged: list[tuple[Path, str]] = []
    for path in reversed(list_checkpoints(run_dir / CHECKPOINTS)):
        try:
            return load_run_checkpoint(path), damaged
        except ConfigError as error:
            damaged.append((path, str(error)))
    return None, damaged


def refuse_changed_results(before: AnyConfig, after: AnyConfig, changes: Layer) -> None:
    """Refuse changes of settings that results depend on."""
    old, new = flat(before), flat(after)
    changed = [changes.spell(name) for name in old if name not in FREE_SETTINGS and old[name] != new[name]]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} would change the results of this run; leave it out, or start a new run from these "
            "weights with --fork"
        )


def refuse_changed_environment(checkpoint: Checkpoint, spec: EnvSpec) -> None:
    """Refuse an environment whose package is not the one that the run began with."""
    changed = changed_environment(checkpoint, spec)
    if changed:
        raise ConfigError(
            f"the environment is not the same as when the run was stopped ({changed}): install that version "
            "again, or start a new run from these weights with --fork"
        )


def changed_environment(checkpoint: Checkpoint, spec: EnvSpec) -> str:
    """Which of the environment's packages are not those of when ``checkpoint`` was written."""
    before, now = checkpoint.state["versions"], spec.versions
    return "; ".join(
        f"{name} {before.get(name, 'none')} then, {now.get(name, 'none')} now"
        for name in sorted(before | now)
        if before.get(name) != now.get(name)
    )


def changed_fingerprint(checkpoint: Checkpoint, config: AnyConfig) -> str:
    """What of the machine and the numerical packages differs from when ``checkpoint`` was written."""
    before = checkpoint.state["fingerprint"]
    now = determinism.fingerprint(int(config.runtime.learner_threads), config.runtime.device)
    return ", ".join(
        f"{name} {before.get(name)} then, {now[name]} now" for name in now if before.get(name) != now[name]
    )


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C, SIGTERM or SIGHUP sets; the second ends the run at once.

    A SIGHUP never does that: when a terminal is closed, the system sends one, and often the shell another. One that was
    ignored from the start stays ignored, as nohup wants it.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set() and number != signal.SIGHUP:
            raise KeyboardInterrupt
        stop.set()
        with suppress(OSError):  # there is no terminal any more
            os.write(2, b"\nstopping after this interval; once more to end at once\n")

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    before = {number: signal.signal(number, handle) for number in RUN_SIGNALS if number != signal.SIGHUP or not ignored}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
