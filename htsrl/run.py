"""One training run: allocate, start, run the intervals, stop.

The main thread of this process is the learner. Interval j:

    executors and actors fill storage j with the behaviour parameters θ_j,
    meanwhile the learner consumes storage j-1 and makes θ_{j+1},
    at the barrier θ_{j+1} is published and the storages change places.
"""

from __future__ import annotations

import math
import shlex
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from htsrl import determinism, envs, processes, rng
from htsrl.actors.delays import random_pauses
from htsrl.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from htsrl.config import AnyConfig
from htsrl.crew import Crew
from htsrl.digests import interval_digests
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError, RunFailed
from htsrl.evaluation import Evaluator
from htsrl.learner.learner import Learner
from htsrl.limits import gib
from htsrl.report import Reporter
from htsrl.resolve import layout_for, layout_state, tuner_for
from htsrl.rundir import CHECKPOINTS, INITIAL, reason_of
from htsrl.storage.digest import parameters_digest, trajectory_digest
from htsrl.storage.episodes import EpisodeLog, EpisodeLogs
from htsrl.storage.fields import control_fields, rollout_fields, trace_fields
from htsrl.storage.layout import Layout
from htsrl.storage.memory import Arena, total_bytes
from htsrl.storage.snapshots import Snapshot
from htsrl.storage.trace import mark, open_lane
from htsrl.tracefile import LEARNER, TraceFile, lanes

RECENT_EPISODES = 100
# Without --checkpoint-every, this often by the clock: results don't depend on when checkpoints are written.
CHECKPOINT_SECONDS = 60.0
# A log of actions grows until its episode ends: from this size on, and whenever it has doubled, the person is told.
LONG_LOGS_BYTES = 64 * 2**20


@dataclass
class Progress:
    """How far a run is. Everything here is counted at barriers, in (interval, replica, step) order."""

    interval: int = 0
    """Completed intervals."""
    steps: int = 0
    """Environment steps; rows that are not transitions don't count."""
    episodes: int = 0
    seconds: float = 0.0
    trajectory: bytes = bytes(32)
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_EPISODES))
    scores: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_EPISODES))

    @classmethod
    def restored(cls, checkpoint: Checkpoint) -> Progress:
        """The progress that a checkpoint holds."""
        state = checkpoint.state
        return cls(
            interval=state["interval"],
            steps=state["steps"],
            episodes=state["episodes"],
            seconds=state["seconds"],
            trajectory=bytes.fromhex(state["trajectory"]),
            returns=deque(state["returns"], RECENT_EPISODES),
            scores=deque(state["scores"], RECENT_EPISODES),
        )


@dataclass(frozen=True)
class Result:
    """What a run came to; the same as its result.json."""

    run_dir: Path
    interrupted: bool
    values: dict[str, Any]


class Run:
    """Opens and closes what a run needs: shared memory, the crew, the learner, the evaluator."""

    crew_class = Crew
    control: Any
    """The counters that all processes share."""
    storages: list[Any]
    """Those of even and odd intervals."""

    def __init__(
        self,
        config: AnyConfig,
        spec: EnvSpec,
        run_dir: Path,
        reporter: Reporter,
        checkpoint: Checkpoint | None = None,
        delay_ms: float = 0.0,
    ) -> None:
        """Allocate and start; with a ``checkpoint``, at the interval for which it was written.

        ``delay_ms`` injects random pauses of up to that many milliseconds everywhere.

        Raises:
            ConfigError: the initial weights don't fit.
            RunFailed: the system refuses memory, a file or a process.
        """
        self.config, self.spec, self.run_dir, self.reporter = config, spec, run_dir, reporter
        self.T, self.N = config.runtime.sync_interval, config.runtime.num_envs
        self.progress = Progress()
        self.reproducible, self.recovered_before = True, 0
        self.pause = random_pauses(delay_ms)
        self.saved_at = -math.inf  # the first checkpoint comes after the first interval
        self.long_logs = LONG_LOGS_BYTES
        self.state_size = config.network.state_size
        self.recurrent_state = np.zeros((self.N, self.state_size), np.float32)
        """[N, S] before the first row of the interval after those that are complete."""
        no_actions = np.empty((0, *spec.action.stored_shape), spec.action.stored_dtype)
        logs = [EpisodeLog(episode=0, pieces=(no_actions,)) for _ in range(self.N)]
        self.learner = Learner(config, spec, torch.device(config.runtime.device))
        self.tuner = tuner_for(config, spec, checkpoint.state.get("layout") if checkpoint is not None else None)
        self.layout = self.tuner.layout if self.tuner is not None else layout_for(config, spec)
        if checkpoint is None and (run_dir / INITIAL).exists():
            try:
                self.learner.start_from(load_checkpoint(run_dir / INITIAL).group)
            except ValueError as error:
                raise ConfigError(f"{run_dir / INITIAL} doesn't fit this run's network: {error}") from None
        if checkpoint is not None:
            self.progress = Progress.restored(checkpoint)
            self.reproducible = checkpoint.state["reproducible"]
            self.recovered_before = checkpoint.state["recovered"]
            self.learner.restore(checkpoint.group, checkpoint.state["version"])
            logs = restored_logs(checkpoint, self.N)
            if self.state_size:
                self.recurrent_state = checkpoint.tensors["recurrent_state"].copy()
        processes.launch(envs.module_of(config.env))
        self.arena = self.allocate()
        self.set_counters()
        self.episode_logs = EpisodeLogs(logs, self.progress.interval)
        self.result: Result
        with ExitStack() as opened:
            opened.callback(self.arena.close)
            self.trace: TraceFile | None = None
            if config.output.trace is not None:
                self.trace = TraceFile(config, self.layout, self.arena, self.progress.interval, reporter.note)
                opened.callback(self.trace.close)
            open_lane(self.arena, LEARNER)
            self.evaluator = Evaluator(config, spec) if config.output.eval_every else None
            if self.evaluator is not None:
                opened.callback(self.evaluator.stop)
                self.evaluator.restore(checkpoint.group("evaluation") if checkpoint is not None else {})
            _, most = self.most_groups_and_executors()
            self.crew = self.crew_class(config, spec, self.layout, self.arena, self.episode_logs, delay_ms, most)
            opened.callback(self.crew.stop)
            self.learner.interrupt_with(self.crew.check)
            self._opened = opened.pop_all()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        with self._opened:
            self.hear_crew()

    def allocate(self) -> Arena:
        """All shared memory: two storages, and the control block."""
        fields = rollout_fields(self.spec, self.T, self.N, self.learner.model.head.noise_size, self.state_size)
        size = len(self.learner.parameters)
        control = control_fields(*self.most_groups_and_executors(), size)
        traced = {"trace": trace_fields(lanes(self.layout, self.T))} if self.config.output.trace else {}
        arena = Arena.create({"control": control, "even": fields, "odd": fields, **traced})
        self.control, self.storages = arena.views("control"), [arena.views("even"), arena.views("odd")]
        return arena

    def most_groups_and_executors(self) -> tuple[int, int]:
        """In any layout that the run may change to."""
        if self.tuner is None:
            return len(self.layout.groups), self.layout.num_executors
        return self.N, self.tuner.space.most_executors

    def set_counters(self) -> None:
        """Let the counters stand as they do before the interval that comes next."""
        self.control.interval[0] = self.progress.interval - 1
        self.control.finished[:] = self.progress.interval
        for counter in (self.control.posted, self.control.answered, self.control.stepped):
            counter[:] = self.progress.interval * self.T

    # -------------------------------------------------------------------------------------------------- the intervals

    def train(self, stop: threading.Event) -> None:
        """Run intervals until the budget is spent or ``stop`` is set."""
        self.crew.await_ready()
        self.reporter.start(self.facts())
        self.clock = time.perf_counter() - self.progress.seconds
        hts = self.config.runtime.schedule == "hts"
        full: dict[str, float] | None = None  # the record of the full storage that waits for the learner

        # Warm up: before the first interval there is nothing to learn from
        j = self.progress.interval
        if j == 0:
            self.learner.warm_up()
        self.write_noise(j)
        self.begin(j, self.learner.behaviour, self.learner.version - self.learner.lag)
        while True:
            # Learn from the storage before, while this one fills
            if full is not None:
                self.consume(j - 1, full)
                self.save_if_due()
            self.write_noise(j + 1)

            # Meet at the barrier
            mark("barrier")
            waiting = time.perf_counter()
            self.crew.await_barrier()
            self.advance_logs(j)
            full = self.count(j, waiting)
            if not hts:
                self.consume(j, full)
                full = None
            self.evaluate_if_due()
            if not hts:
                self.save_if_due()
            self.hear_crew()

            # Publish θ_{j+1}, change storages, go on
            if self.progress.steps >= self.config.total_steps or stop.is_set():
                break
            self.tune()
            j += 1
            self.begin(j, self.learner.newest, self.learner.version)

        # Drain: the last storage is learned from, too
        if self.trace is not None:
            self.trace.begun(j + 1, time.perf_counter_ns())
        if full is not None:
            self.consume(j, full)
        self.finish(stop)

    def tune(self) -> None:
        """At a barrier, with ``layout`` auto: go on in the layout that the tuner wants to see."""
        tuner = self.tuner
        if tuner is None or tuner.settled:
            return
        left = math.ceil((self.config.total_steps - self.progress.steps) / (self.N * self.T))
        if self.crew.reproducible:
            tuner.completed(self.interval_seconds(), left, self.crew.start_seconds)
        else:
            tuner.settle("the environment does not repeat itself, as replicas that change hands must")
        if tuner.layout != self.layout:
            self.change_layout(tuner.layout)
        if tuner.settled:
            self.reporter.note(tuner.sentence())

    def interval_seconds(self) -> float:
        """How long the interval took that has just been completed, with all that is done at the barrier."""
        return time.perf_counter() - self.begun

    def change_layout(self, layout: Layout) -> None:
        """Have other processes go on from where all replicas stand, at a barrier: what a resumed run does, too."""
        assert self.tuner is not None
        started = time.perf_counter()
        with self.crew.changes:
            self.set_counters()  # of groups and executors that were not there before
            logs = self.episode_logs.logs
            for n, snapshot in self.snapshots().items():
                logs[int(n)] = replace(logs[int(n)], snapshot=snapshot)
        self.layout = layout
        self.crew.rearrange(layout)
        self.tuner.changed(time.perf_counter() - started)

    def begin(self, j: int, behaviour: torch.Tensor, version: int) -> None:
        """Publish the behaviour parameters of interval j and let the executors begin."""
        mark("publish", j)
        with self.crew.changes:
            self.control.parameters[:] = behaviour.cpu().numpy()
            self.control.version[0] = version
            self.storages[j % 2].behaviour_version[0] = version
            if self.state_size:
                self.storages[j % 2].state[0] = self.recurrent_state
            self.control.interval[0] = j
            self.begun = time.perf_counter()
            self.crew.begin_interval()
        if self.trace is not None:
            self.trace.begun(j, round(self.begun * 1e9))

    def write_noise(self, j: int) -> None:
        """Draw the action noise of interval j, each replica's from its own generator. Only actors read it."""
        mark("noise", j)
        noise = self.storages[j % 2].noise
        for n in range(self.N):
            noise[:, n] = self.noise(n, j)

    def noise(self, n: int, j: int) -> np.ndarray:
        """The action noise [T, K] of replica ``n`` in interval ``j``."""
        head = self.learner.model.head
        generator = rng.generator(self.config.seed, rng.Stream.ACTION_NOISE, n, j)
        return rng.action_noise(head.noise_kind, generator, (self.T, head.noise_size))

    def advance_logs(self, j: int) -> None:
        """Take the episode logs, and what the policy remembers of these episodes, to the end of interval j."""
        with self.crew.changes:
            self.episode_logs.advance(self.storages[j % 2])
        if self.state_size:
            self.recurrent_state = self.storages[j % 2].state[-1].copy()

    def count(self, j: int, waiting: float) -> dict[str, float]:
        """Account for interval j, which has just been completed; returns the beginning of its record.

        Args:
            j: the interval.
            waiting: when the learner began to wait at the barrier, by ``time.perf_counter``.
        """
        mark("count")
        now = time.perf_counter()
        storage, progress = self.storages[j % 2], self.progress
        ended = storage.episode_length.T > 0  # [N, T]: in (replica, step) order
        steps = int(storage.valid.sum())
        before, seconds_before = progress.steps, progress.seconds
        progress.interval = j + 1
        progress.steps += steps
        progress.episodes += int(ended.sum())
        progress.seconds = now - self.clock
        progress.returns.extend(storage.episode_return.T[ended].tolist())
        progress.scores.extend(storage.episode_score.T[ended].tolist() if self.spec.has_score else ())
        every = self.config.output.checkpoint_every
        self.checkpoint_due = (
            crossed(every, before, progress.steps) if every else time.monotonic() - self.saved_at > CHECKPOINT_SECONDS
        )
        self.evaluation_due = crossed(self.config.output.eval_every, before, progress.steps)
        record = {
            "interval": j,
            "progress": min(before / self.config.total_steps, 1.0),
            "steps": progress.steps,
            "frames": progress.steps * self.spec.frame_skip,
            "seconds": progress.seconds,
            "steps_per_second": steps / (progress.seconds - seconds_before),
            "episodes": progress.episodes,
            "episode_return_mean": mean(progress.returns),
            "time/rollout": now - self.begun,
            "time/wait": now - waiting,
        }
        if self.spec.has_score:
            record["score_mean"] = mean(progress.scores)
        if self.tuner is not None:
            counts = {"executors": self.layout.num_executors, "groups": len(self.layout.groups)}
            counts["actors"] = self.layout.num_actors
            record |= {f"layout/{name}": number for name, number in counts.items()}
        return record

    def consume(self, j: int, record: dict[str, float]) -> None:
        """Learn from storage j, and do everything else that needs it."""
        storage = self.storages[j % 2]
        self.pause()
        started = time.perf_counter()
        metrics = self.learner.learn(storage, record["progress"])
        record["time/learn"] = time.perf_counter() - started
        mark("digest")
        self.progress.trajectory = trajectory_digest(self.progress.trajectory, storage)
        mark("report")
        self.reporter.interval(record | self.crew.memory() | metrics)
        if self.config.output.record_digests:
            parameters = self.learner.named(self.learner.newest)
            self.reporter.digests(interval_digests(j, self.progress.trajectory, parameters, metrics))

    def save_if_due(self) -> None:
        """Write a checkpoint for the interval after the one that was consumed last, at the cadence asked for."""
        if not self.checkpoint_due:
            return
        try:
            self.save_checkpoint()
        except OSError as error:
            self.reporter.note(f"no checkpoint this time, the run goes on: {reason_of(error)}")

    def evaluate_if_due(self) -> None:
        """Hand the newest parameters to the evaluator at the first barrier at or after each --eval-every steps."""
        if self.evaluator is None:
            return
        if self.evaluation_due:
            mark("evaluation")
            self.evaluator.request(self.progress.steps, self.learner.named(self.learner.newest))
        self.hear_evaluator()

    def hear_evaluator(self, wait_s: float = 0.0) -> None:
        """Record the evaluations that have arrived, or arrive within ``wait_s`` seconds."""
        if self.evaluator is not None:
            for evaluation in self.evaluator.results(wait_s):
                self.reporter.evaluation(evaluation)
            for event in self.evaluator.take_events():
                self.reporter.note(event)

    def save_checkpoint(self, result: dict[str, Any] | None = None) -> Path:
        """Write the checkpoint for the start of the interval after the one that was consumed last.

        ``result`` is what a finished run came to.

        Raises:
            OSError: it could not be written; those before it are as they were.
        """
        mark("checkpoint")
        self.saved_at = time.monotonic()
        self.reporter.sync()  # who resumes from it needs the records before it
        logs = self.episode_logs.logs
        last_obs = [log.last_obs for log in logs if log.last_obs is not None]
        snapshots = self.snapshots() if result is None else {}
        tensors = {
            **self.learner.tensors(),
            **{f"episodes/{n}": log.actions for n, log in enumerate(logs)},
            **{f"snapshots/{n}": np.frombuffer(snapshot.data, np.uint8) for n, snapshot in snapshots.items()},
            **(self.evaluator.pending() if self.evaluator is not None else {}),
            **({"last_obs": np.stack(last_obs)} if len(last_obs) == len(logs) else {}),
            **({"recurrent_state": self.recurrent_state} if self.state_size else {}),
        }
        self.say_if_long(sum(tensors[f"episodes/{n}"].nbytes for n in range(self.N)))
        headers = {n: snapshot.header() for n, snapshot in snapshots.items()}
        state = {"finished": result is not None, "result": result, "snapshots": headers, **self.state()}
        checkpoint = Checkpoint(tensors, state)
        return save_checkpoint(self.run_dir / CHECKPOINTS, checkpoint, self.config.output.keep_checkpoints)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors and the result of a finished run."""
        progress, logs = self.progress, self.episode_logs.logs
        return {
            "reproducible": self.reproducible,
            "recovered": self.recovered_before + self.crew.recovered,
            "interval": progress.interval,
            "version": self.learner.version,
            "steps": progress.steps,
            "episodes": progress.episodes,
            "seconds": progress.seconds,
            "trajectory": progress.trajectory.hex(),
            "returns": list(progress.returns),
            "scores": list(progress.scores),
            "replicas": [{"episode": log.episode, "reset_pending": log.reset_pending} for log in logs],
            "config": self.config.model_dump(mode="json"),
            **({"layout": layout_state(self.tuner)} if self.tuner is not None else {}),
            "versions": self.spec.versions,
            "htsrl": version("htsrl"),
            "fingerprint": determinism.fingerprint(
                int(self.config.runtime.learner_threads), self.config.runtime.device
            ),
        }

    def snapshots(self) -> dict[str, Snapshot]:
        """Published snapshots of the episodes in the logs, by replica."""
        found = {n: self.crew.snapshots.read(n) for n in range(self.N)}
        logs = self.episode_logs.logs
        return {str(n): snapshot for n, snapshot in found.items() if snapshot is not None and logs[n].holds(snapshot)}

    def finish(self, stop: threading.Event) -> None:
        """Wait for the last evaluations, unless interrupted; write the last checkpoint and the result."""
        mark("evaluation")
        progress = self.progress
        while self.evaluator is not None and self.evaluator.busy and not stop.is_set():
            self.hear_evaluator(wait_s=1.0)
        interrupted = progress.steps < self.config.total_steps or bool(self.evaluator and self.evaluator.busy)
        progress.seconds = time.perf_counter() - self.clock
        if self.tuner is not None and not self.tuner.settled and not interrupted:
            self.reporter.note(self.tuner.sentence())
        values = self.summary()
        try:
            path = self.save_checkpoint(None if interrupted else values)
        except OSError as error:
            raise RunFailed(
                f"the last checkpoint can't be written to {self.run_dir}: {reason_of(error)}; make room, then "
                f"`htsrl resume {shlex.quote(str(self.run_dir))}` goes on from the one before it"
            ) from None
        self.result = Result(self.run_dir, interrupted, values)
        self.reporter.finish(values | {"checkpoint": str(path), "interrupted": interrupted})

    def summary(self) -> dict[str, Any]:
        """What the run has come to."""
        progress = self.progress
        values = {
            "steps": progress.steps,
            "frames": progress.steps * self.spec.frame_skip,
            "intervals": progress.interval,
            "episodes": progress.episodes,
            "seconds": progress.seconds,
            "steps_per_second": progress.steps / progress.seconds,
            "episode_return_mean": mean(progress.returns),
            "parameters_sha256": parameters_digest(self.learner.named(self.learner.newest).items()),
            "trajectory_sha256": progress.trajectory.hex(),
            "reproducible": self.reproducible,
            "recovered": self.recovered_before + self.crew.recovered,
        }
        if self.spec.has_score:
            values["score_mean"] = mean(progress.scores)
        if self.tuner is not None:
            values["layout"] = self.tuner.outcome()
        return values

    def say_if_long(self, size: int) -> None:
        """Say it where episodes hardly ever end: the ``size`` bytes of their logs grow as long as they last."""
        if size < self.long_logs:
            return
        self.long_logs = 2 * size
        self.reporter.note(
            f"the actions of episodes that have not ended take {gib(size)}, in memory and in each checkpoint, and a "
            "resumed run replays them: --max-episode-steps ends episodes sooner"
        )

    def hear_crew(self) -> None:
        """Pass on what happened to the crew since the last barrier."""
        for event in self.crew.take_events():
            self.reporter.note(event)
        self.reporter.recovered(self.recovered_before + self.crew.recovered)
        self.reproducible = self.reproducible and self.crew.reproducible

    def facts(self) -> dict[str, str]:
        """What to show once at the start."""
        layout = self.layout
        return {
            "executors": f"{layout.num_executors} with {len(layout.groups)} groups",
            "actors": str(layout.num_actors),
            "device": self.config.runtime.device,
            "learner threads": str(self.config.runtime.learner_threads),
            "parameters": f"{self.learner.parameters.vector.numel():,}",
            "shared memory": f"{total_bytes(self.arena.fields) / 2**20:.0f} MiB",
        }


def restored_logs(checkpoint: Checkpoint, N: int) -> list[EpisodeLog]:
    """The episode logs of all replicas, as a checkpoint holds them; with its snapshots if this user's runs wrote it."""
    replicas, actions = checkpoint.state["replicas"], checkpoint.group("episodes")
    last_obs = checkpoint.tensors.get("last_obs")
    headers = checkpoint.state.get("snapshots", {}) if checkpoint.sealed else {}
    logs = []
    for n in range(N):
        log = EpisodeLog(
            episode=replicas[n]["episode"],
            pieces=(actions[str(n)],),
            reset_pending=replicas[n]["reset_pending"],
            last_obs=None if last_obs is None else last_obs[n],
        )
        if str(n) in headers:
            log = replace(
                log, snapshot=Snapshot(**headers[str(n)], data=checkpoint.tensors[f"snapshots/{n}"].tobytes())
            )
        logs.append(log)
    return logs


def crossed(every: int | None, before: int, after: int) -> bool:
    """True if a multiple of ``every`` lies in (before, after]."""
    return every is not None and after // every > before // every


def mean(values: deque[float]) -> float:
    """The mean, NaN where nothing has been seen."""
    return float(np.mean(values)) if values else math.nan
