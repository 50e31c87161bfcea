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
from dataclasses import dataclass, field
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
from htsrl.errors import RunFailed
from htsrl.evaluation import Evaluator
from htsrl.learner.learner import Learner
from htsrl.limits import gib
from htsrl.report import Reporter
from htsrl.resolve import layout_for
from htsrl.rundir import CHECKPOINTS, INITIAL, reason_of
from htsrl.storage.digest import parameters_digest, trajectory_digest
from htsrl.storage.episodes import EpisodeLog, EpisodeLogs
from htsrl.storage.fields import control_fields, rollout_fields
from htsrl.storage.memory import Arena, total_bytes

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
            RunFailed: the system refuses memory, a file or a process.
        """
        self.config, self.spec, self.run_dir, self.reporter = config, spec, run_dir, reporter
        self.T, self.N = config.runtime.sync_interval, config.runtime.num_envs
        self.progress = Progress()
        self.reproducible, self.recovered_before = True, 0
        self.pause = random_pauses(delay_ms)
        self.saved_at = -math.inf  # the first checkpoint comes after the first interval
        self.long_logs = LONG_LOGS_BYTES
        no_actions = np.empty((0, *spec.action.stored_shape), spec.action.stored_dtype)
        logs = [EpisodeLog(episode=0, pieces=(no_actions,)) for _ in range(self.N)]
        self.learner = Learner(config, spec, torch.device(config.runtime.device))
        self.layout = layout_for(config, spec)
        if checkpoint is None and (run_dir / INITIAL).exists():
            self.learner.start_from(load_checkpoint(run_dir / INITIAL).group("parameters"))
        if checkpoint is not None:
            self.progress = Progress.restored(checkpoint)
            self.reproducible = checkpoint.state["reproducible"]
            self.recovered_before = checkpoint.state["recovered"]
            self.learner.restore(checkpoint.group, checkpoint.state["version"])
            logs = restored_logs(checkpoint, self.N)
        processes.launch(envs.module_of(config.env))
        fields = rollout_fields(spec, self.T, self.N, self.learner.model.head.noise_size)
        size = len(self.learner.parameters)
        control = control_fields(len(self.layout.groups), self.layout.num_executors, size)
        self.arena = Arena.create({"control": control, "even": fields, "odd": fields})
        self.storages = [self.arena.views("even"), self.arena.views("odd")]
        self.control = self.arena.views("control")
        self.control.interval[0] = self.progress.interval - 1
        self.control.finished[:] = self.progress.interval
        for counter in (self.control.posted, self.control.answered, self.control.stepped):
            counter[:] = self.progress.interval * self.T
        self.episode_logs = EpisodeLogs(logs, self.progress.interval)
        self.result: Result
        with ExitStack() as opened:
            opened.callback(self.arena.close)
            self.evaluator = Evaluator(config, spec) if config.output.eval_every else None
            if self.evaluator is not None:
                opened.callback(self.evaluator.stop)
                self.evaluator.restore(checkpoint.group("evaluation") if checkpoint is not None else {})
            self.crew = Crew(config, spec, self.layout, self.arena, self.episode_logs, delay_ms)
            opened.callback(self.crew.stop)
            self._opened = opened.pop_all()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        with self._opened:
            self.hear_crew()

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
            waiting = time.perf_counter()
            self.crew.await_barrier()
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
            j += 1
            self.begin(j, self.learner.newest, self.learner.version)

        # Drain: the last storage is learned from, too
        if full is not None:
            self.consume(j, full)
        self.finish(stop)

    def begin(self, j: int, behaviour: torch.Tensor, version: int) -> None:
        """Publish the behaviour parameters of interval j and let the executors begin."""
        with self.crew.changes:
            self.control.parameters[:] = behaviour.cpu().numpy()
            self.control.version[0] = version
            self.storages[j % 2].behaviour_version[0] = version
            self.control.interval[0] = j
            self.begun = time.perf_counter()
            self.crew.begin_interval()

    def write_noise(self, j: int) -> None:
        """Draw the action noise of interval j, each replica's from its own generator. Only actors read it."""
        draw = rng.gumbel if self.learner.model.head.noise_kind == "gumbel" else rng.normal
        noise = self.storages[j % 2].noise
        for n in range(self.N):
            generator = rng.generator(self.config.seed, rng.Stream.ACTION_NOISE, n, j)
            noise[:, n] = draw(generator, noise.shape[::2])

    def count(self, j: int, waiting: float) -> dict[str, float]:
        """Account for interval j, which has just been completed; returns the beginning of its record.

        Args:
            j: the interval.
            waiting: when the learner began to wait at the barrier, by ``time.perf_counter``.
        """
        now = time.perf_counter()
        storage, progress = self.storages[j % 2], self.progress
        with self.crew.changes:
            self.episode_logs.advance(storage)
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
        return record

    def consume(self, j: int, record: dict[str, float]) -> None:
        """Learn from storage j, and do everything else that needs it."""
        storage = self.storages[j % 2]
        self.pause()
        started = time.perf_counter()
        metrics = self.learner.learn(storage, record["progress"])
        record["time/learn"] = time.perf_counter() - started
        self.progress.trajectory = trajectory_digest(self.progress.trajectory, storage)
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
        self.saved_at = time.monotonic()
        self.reporter.sync()  # who resumes from it needs the records before it
        progress, learner, logs = self.progress, self.learner, self.episode_logs.logs
        tensors = {
            **learner.tensors(),
            **{f"episodes/{n}": log.actions for n, log in enumerate(logs)},
            **(self.evaluator.pending() if self.evaluator is not None else {}),
            "last_obs": np.stack([log.last_obs for log in logs if log.last_obs is not None]),
        }
        self.say_if_long(sum(tensors[f"episodes/{n}"].nbytes for n in range(self.N)))
        state = {
            "finished": result is not None,
            "result": result,
            "reproducible": self.reproducible,
            "recovered": self.recovered_before + self.crew.recovered,
            "interval": progress.interval,
            "version": learner.version,
            "steps": progress.steps,
            "episodes": progress.episodes,
            "seconds": progress.seconds,
            "trajectory": progress.trajectory.hex(),
            "returns": list(progress.returns),
            "scores": list(progress.scores),
            "replicas": [{"episode": log.episode, "reset_pending": log.reset_pending} for log in logs],
            "config": self.config.model_dump(mode="json"),
            "versions": self.spec.versions,
            "htsrl": version("htsrl"),
            "fingerprint": determinism.fingerprint(
                int(self.config.runtime.learner_threads), self.config.runtime.device
            ),
        }
        checkpoint = Checkpoint(tensors, state)
        return save_checkpoint(self.run_dir / CHECKPOINTS, checkpoint, self.config.output.keep_checkpoints)

    def finish(self, stop: threading.Event) -> None:
        """Wait for the last evaluations, unless interrupted; write the last checkpoint and the result."""
        progress = self.progress
        while self.evaluator is not None and self.evaluator.busy and not stop.is_set():
            self.hear_evaluator(wait_s=1.0)
        interrupted = progress.steps < self.config.total_steps or bool(self.evaluator and self.evaluator.busy)
        progress.seconds = time.perf_counter() - self.clock
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
        try:
            path = self.save_checkpoint(None if interrupted else values)
        except OSError as error:
            raise RunFailed(
                f"the last checkpoint can't be written to {self.run_dir}: {reason_of(error)}; make room, then "
                f"`htsrl resume {shlex.quote(str(self.run_dir))}` goes on from the one before it"
            ) from None
        self.result = Result(self.run_dir, interrupted, values)
        self.reporter.finish(values | {"checkpoint": str(path), "interrupted": interrupted})

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
        self.reproducible = self.reproducible and self.crew.reproducible

    def facts(self) -> dict[str, str]:
        """What to show once at the start."""
        layout = self.layout
        return {
            "executors": f"{layout.num_executors} with {len(layout.groups)} groups",
            "actors": str(layout.num_actors),
            "device": self.config.runtime.device,
            "learner threads": str(self.config.runtime.learner_threads),
            "parameters": f"{len(self.learner.parameters):,}",
            "shared memory": f"{total_bytes(self.arena.fields) / 2**20:.0f} MiB",
        }


def restored_logs(checkpoint: Checkpoint, N: int) -> list[EpisodeLog]:
    """The episode logs of all replicas, as a checkpoint holds them."""
    replicas, actions = checkpoint.state["replicas"], checkpoint.group("episodes")
    return [
        EpisodeLog(
            episode=replicas[n]["episode"],
            pieces=(actions[str(n)],),
            reset_pending=replicas[n]["reset_pending"],
            last_obs=checkpoint.tensors["last_obs"][n],
        )
        for n in range(N)
    ]


def crossed(every: int | None, before: int, after: int) -> bool:
    """True if a multiple of ``every`` lies in (before, after]."""
    return every is not None and after // every > before // every


def mean(values: deque[float]) -> float:
    """The mean, NaN where nothing has been seen."""
    return float(np.mean(values)) if values else math.nan
