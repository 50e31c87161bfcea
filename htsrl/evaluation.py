"""Evaluation: episodes of a fixed policy, from seeds that training never uses, unbiased over parallel episodes."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from htsrl import determinism, envs, processes, rng
from htsrl.actors.executor import action_converter
from htsrl.actors.inference import InferenceBatch, invariant_buckets
from htsrl.actors.ports import Lines
from htsrl.actors.reports import Stack, reported, send_ready, signs_of_life
from htsrl.checkpoint import newest_checkpoint
from htsrl.config import AnyConfig
from htsrl.envs import checks
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError, EnvironmentFailed, RunFailed
from htsrl.models import ActorCritic, build_model
from htsrl.models.flat import FlatParameters
from htsrl.models.heads import DiagonalGaussian
from htsrl.restoring import load_run_checkpoint
from htsrl.rundir import RESULT, reason_of, require_run, update_result
from htsrl.tomlfile import load_config
from htsrl.usercode import refuse_code_in

# Episodes played side by side. Every episode that is started is counted, whatever its length.
SLOTS = 8


@dataclass
class Slot:
    """One of the parallel episodes."""

    env: Any
    obs: np.ndarray
    noise: np.random.Generator
    episode: int
    state: np.ndarray
    """[S] what a recurrent policy remembers of the episode."""
    steps: int = 0
    reward: float = 0.0


def evaluation_batch(model: ActorCritic, spec: EnvSpec) -> InferenceBatch:
    """What :func:`evaluate` asks; made once per process: it costs a probe, and torch never forgets a recording."""
    device = next(model.parameters()).device
    return InferenceBatch(model, spec, invariant_buckets(model, spec, SLOTS, device), device)


def evaluate(
    batch: InferenceBatch,
    spec: EnvSpec,
    options: Any,
    seed: int,
    episodes: int,
    stochastic: bool,
    film: Callable[[np.ndarray | None], None] | None = None,
    alive: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Play ``episodes`` episodes and return ``return``, ``length`` and ``score``, each [episodes].

    Episode k starts from ``evaluation_seed(seed, k)`` and has its own noise, so that its course depends neither on the
    number of parallel episodes nor on the order in which they end. ``stochastic`` samples actions; otherwise the most
    likely action is taken. ``film`` gets a picture [height, width, 3] uint8 of every step of episode 0; ``alive`` is
    called after every step and reset.

    Raises:
        EnvironmentFailed: the environment raised, or returned what it must not.
        RunFailed: the policy's action was NaN.
    """
    results = {name: np.full(episodes, np.nan) for name in ("return", "length", "score")}
    head = batch.model.head
    to_env = action_converter(spec.action, isinstance(head, DiagonalGaussian) and head.squashed)
    limit = spec.max_episode_steps or math.inf
    stored = spec.observation_shape, spec.observation_dtype
    waiting = list(range(episodes))[::-1]

    def begin(env: Any) -> Slot | None:
        if not waiting:
            env.close()
            return None
        episode = waiting.pop()
        with blaming(spec, episode, 0):
            obs = checks.observation(env.reset(seed=rng.evaluation_seed(seed, episode)), *stored)
        alive()
        if film is not None and episode == 0:
            film(env.render())
        noise = rng.generator(seed, rng.Stream.EVALUATION_NOISE, episode)
        return Slot(env, np.array(obs), noise, episode, np.zeros(batch.model.state_size, np.float32))

    count = min(SLOTS, episodes)
    slots = [
        begin(envs.make(spec.env_id, options, render=film is not None and k == 0, masked=spec.mask_in_info))
        for k in range(count)
    ]
    while playing := [slot for slot in slots if slot is not None]:
        # One batched forward pass for all
        for row, slot in enumerate(playing):
            batch.obs[row] = slot.obs
            batch.noise[row] = rng.action_noise(head.noise_kind, slot.noise, (head.noise_size,))
            batch.state[row] = slot.state
        answer = batch.answer(len(playing), mode=not stochastic)
        if answer.state is not None:
            for slot, state in zip(playing, answer.state):
                slot.state = state

        # Step each; an episode that ended makes room for the next
        slots = []
        for slot, action in zip(playing, to_env(answer.action)):
            with blaming(spec, slot.episode, slot.steps):
                obs, reward, terminated, truncated, info = slot.env.step(action)
                obs = checks.observation(obs, *stored)
                slot.reward += checks.number("reward", info["raw_reward"] if spec.has_raw_reward else reward)
                ended = checks.flag("terminated", terminated) or checks.flag("truncated", truncated)
                if spec.mask is None:
                    checks.no_mask(info)
                score = info.get("score", np.nan)
            alive()
            if film is not None and slot.episode == 0:
                film(slot.env.render())
            slot.steps += 1
            if ended or slot.steps >= limit:
                results["return"][slot.episode] = slot.reward
                results["length"][slot.episode] = slot.steps
                results["score"][slot.episode] = score
                slots.append(begin(slot.env))
            else:
                slot.obs = np.array(obs)
                slots.append(slot)
    return results


@contextmanager
def blaming(spec: EnvSpec, episode: int, step: int) -> Iterator[None]:
    """Turn whatever the environment raises into an EnvironmentFailed that says where."""
    try:
        yield
    except Exception as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        raise EnvironmentFailed(
            f"{spec.env_id} failed in evaluation episode {episode}, step {step}:\n{trace}"
        ) from error


def summarise(results: dict[str, np.ndarray], spec: EnvSpec) -> dict[str, float]:
    """Mean, spread and extremes of :func:`evaluate`'s results."""
    returns = results["return"]
    summary = {
        "episodes": len(returns),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "length_mean": float(results["length"].mean()),
    }
    if spec.has_score:
        summary["score_mean"] = float(results["score"].mean())
    return summary


def evaluate_run(run_dir: Path, episodes: int, stochastic: bool, video: Path | None = None) -> dict[str, float]:
    """Evaluate the newest checkpoint of a run and add the outcome to its ``result.json`` under ``evaluation``.

    ``video`` films the first episode into that file (``game.mp4``, ``game.gif``).

    Raises:
        ConfigError: the folder holds no run or no readable checkpoint, the environment is not installed or can't draw.
    """
    require_run(run_dir)
    config = load_config(run_dir / "config.toml")
    refuse_code_in(run_dir, config.env, config.network.network)
    path = newest_checkpoint(run_dir)
    checkpoint = load_run_checkpoint(path)
    spec = envs.describe(config.env, config.environment)
    determinism.enable()
    model = build_model(spec, config.network, config.seed)
    try:
        FlatParameters(model, gradients=False).load(checkpoint.group("parameters"))
    except ValueError as error:
        raise ConfigError(f"the checkpoint {path} doesn't fit this run's network: {error}") from None
    with filming(video, spec) as film:
        batch = evaluation_batch(model, spec)
        results = evaluate(batch, spec, config.environment, config.seed, episodes, stochastic, film)
    summary = {"steps": checkpoint.state["steps"], "stochastic": stochastic} | summarise(results, spec)
    try:
        update_result(run_dir, {"evaluation": summary})
    except OSError as error:  # the folder of somebody else, or a full disk: no reason to lose the figures
        print(f"htsrl: note: {run_dir / RESULT} stays as it was: {reason_of(error)}", file=sys.stderr)
    return summary


@contextmanager
def filming(video: Path | None, spec: EnvSpec) -> Iterator[Callable[[np.ndarray | None], None] | None]:
    """A function that appends a picture to the file ``video``; None without one."""
    if video is None:
        yield None
        return
    try:
        import imageio.v2 as imageio
    except ImportError:
        raise ConfigError("--video needs imageio: run `pip install 'htsrl[video]'`") from None
    try:
        writer = imageio.get_writer(video)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--video {video}: {error}") from None

    def film(picture: np.ndarray | None) -> None:
        if picture is None:
            raise ConfigError(f"--video: {spec.env_id} can't draw itself")
        # Video codecs want even sizes
        writer.append_data(picture[: picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2])

    with writer:
        yield film


@dataclass(frozen=True)
class EvaluatorPorts:
    """Everything the evaluator process knows."""

    config: AnyConfig
    spec: EnvSpec
    requests: Connection
    """Steps as JSON, then the parameters as safetensors."""
    lines: Lines


def run_evaluator(ports: EvaluatorPorts) -> None:
    """Body of the evaluator process: plays the configured episodes with each set of parameters it is sent."""
    with reported("evaluator", 0, ports.lines):
        determinism.enable()
        config, output = ports.config, ports.config.output
        model = build_model(ports.spec, config.network, config.seed)
        parameters = FlatParameters(model, gradients=False)
        alive = signs_of_life(ports.lines)
        batch = evaluation_batch(model, ports.spec)
        send_ready(ports.lines)
        while True:
            steps = json.loads(ports.requests.recv_bytes())
            parameters.load(safetensors.numpy.load(ports.requests.recv_bytes()))
            results = evaluate(
                batch, ports.spec, config.environment, config.seed, output.eval_episodes, output.eval_stochastic,
                alive=alive,
            )  # fmt: skip
            summary = {"steps": steps, "stochastic": output.eval_stochastic} | summarise(results, ports.spec)
            ports.lines.reports.send_bytes(json.dumps({"kind": "evaluation"} | summary).encode())


class Evaluator:
    """Periodic evaluation in a process of its own, so that it neither delays nor disturbs training.

    Results arrive later than their request, and carry its step count; parameters travel with the request, so no
    evaluation ever sees half an update. One request is under way at a time, sent when the process waits for it; an
    evaluation that fails or hangs twice is the last: the run goes on without.
    """

    # With more requests than this waiting, evaluation is too slow for its cadence: further ones are left out.
    MOST_WAITING = 16

    _reports: Connection
    _requests: Connection

    def __init__(self, config: AnyConfig, spec: EnvSpec) -> None:
        self._config, self._spec = config, spec
        self._waiting: dict[int, dict[str, np.ndarray]] = {}  # parameters by steps, in the order of their requests
        self._events: list[str] = []
        self._failures = 0
        self._start()

    @property
    def busy(self) -> bool:
        """True while a result is to come."""
        return bool(self._waiting)

    def request(self, steps: int, parameters: dict[str, np.ndarray]) -> None:
        """Evaluate ``parameters``; ``steps`` is when."""
        if self._failures > 1:
            return
        if len(self._waiting) >= self.MOST_WAITING:
            self._events.append(f"no evaluation after {steps} steps: {len(self._waiting)} earlier ones still wait")
            return
        self._waiting[steps] = parameters
        self._send_next()

    def results(self, wait_s: float = 0.0) -> list[dict[str, float]]:
        """Evaluations that have arrived since the last call, after waiting up to ``wait_s`` seconds for the next."""
        arrived: list[dict[str, float]] = []
        while self._failures <= 1 and self._reports.poll(0.0 if arrived else wait_s):
            self._heard = time.monotonic()
            try:
                report = json.loads(self._reports.recv_bytes())
            except (EOFError, OSError):
                self._fail("the evaluator ended without a word")
                continue
            kind = report.pop("kind")
            if kind == "progress":
                continue
            if kind == "evaluation":
                del self._waiting[int(report["steps"])]
                arrived.append(report)
                self._failures = 0
            if kind in ("evaluation", "ready"):
                self._idle = self._ready = True
                self._send_next()
            else:
                self._fail(report["traceback"].splitlines()[-1])
        self._fail_if_hung()
        return arrived

    def take_events(self) -> list[str]:
        """What a person should know since the last call."""
        events, self._events = self._events, []
        return events

    def pending(self) -> dict[str, np.ndarray]:
        """Parameters whose evaluation has not arrived, for a checkpoint: ``evaluation/STEPS/NAME``."""
        waiting = self._waiting.items()
        return {f"evaluation/{steps}/{name}": array for steps, named in waiting for name, array in named.items()}

    def restore(self, pending: dict[str, np.ndarray]) -> None:
        """Request again what :meth:`pending` returned (without its first prefix)."""
        requests: dict[int, dict[str, np.ndarray]] = {}
        for key, array in pending.items():
            when, name = key.split("/", 1)
            requests.setdefault(int(when), {})[name] = array
        for steps in sorted(requests):
            self.request(steps, requests[steps])

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._process.close()
        for end in (self._reports, self._requests, self._stack):
            end.close()

    def _start(self) -> None:
        self._idle = self._ready = False
        self._heard = time.monotonic()
        self._reports, report = multiprocessing.Pipe(duplex=False)
        requests, self._requests = multiprocessing.Pipe(duplex=False)
        self._stack = Stack()
        ports = EvaluatorPorts(self._config, self._spec, requests, Lines(report, self._stack))
        try:
            self._process = processes.start(run_evaluator, ports, "evaluator")
        except RunFailed:
            self._stack.close()
            raise
        report.close()
        requests.close()

    def _send_next(self) -> None:
        """Send the oldest request, if the process waits for one."""
        if not self._idle or not self._waiting:
            return
        steps = next(iter(self._waiting))
        self._idle = False
        self._heard = time.monotonic()
        try:
            self._requests.send_bytes(json.dumps(steps).encode())
            self._requests.send_bytes(safetensors.numpy.save(self._waiting[steps]))
        except OSError:
            pass  # it has ended, which `results` will notice

    def _fail_if_hung(self) -> None:
        """Give up a process that has something to do and has shown no sign of life for too long."""
        runtime = self._config.runtime
        limit = runtime.step_timeout if self._ready else runtime.start_timeout
        silent = time.monotonic() - self._heard
        if self._failures > 1 or self._idle or limit is None or silent < limit:
            return
        what = f"has made no progress for {silent:.0f} s" if self._ready else f"did not come up within {silent:.0f} s"
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, Stack.REQUEST)
        time.sleep(Stack.SECONDS)
        self._fail(f"the evaluator {what}:\n{self._stack.read() or 'it could not write its stack'}")

    def _fail(self, reason: str) -> None:
        """Start again, once."""
        self._failures += 1
        if self._failures > 1:
            self._waiting.clear()
            self._events.append(f"{reason}; evaluation is switched off, training goes on")
            return
        self._events.append(f"{reason}; the evaluator is started again")
        self.stop()
        self._start()
