"""The executor: owns environment replicas and steps each as soon as its action arrives. Imports numpy, never torch.

It knows a storage view and mailboxes, nothing else. Observations go straight into the storage row from which the actor
gathers and the learner learns; a message only says which group has a new row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from htsrl import envs
from htsrl.actors.delays import random_pauses
from htsrl.actors.mailbox import STOP
from htsrl.actors.ports import ExecutorPorts, Lines
from htsrl.actors.reports import (
    EnvironmentFault,
    reported,
    send_note,
    send_ready,
    send_unreproducible,
    signs_of_life,
)
from htsrl.actors.snapshots import Snapshots
from htsrl.envs import checks
from htsrl.envs.spec import ActionSpec
from htsrl.rng import episode_seed
from htsrl.storage import trace
from htsrl.storage.episodes import EpisodeLog
from htsrl.storage.observations import begin_row, next_row, observation, open_row
from htsrl.storage.snapshots import Snapshot, fingerprint

_LARGEST = float(np.finfo(np.float32).max)


def run_executor(ports: ExecutorPorts) -> None:
    """Body of an executor process."""
    with reported("executor", ports.index, ports.lines):
        # Construct the environments, each at the point where the run stands
        mark = trace.open_lane(ports.arena, f"executor {ports.index}")
        mark("start")
        columns = ports.layout.executor_columns[ports.index]
        own_groups = ports.layout.executor_groups[ports.index]
        replicas = [Replica(n, ports) for n in columns]
        for replica, log in zip(replicas, ports.logs):
            replica.start(log, ports.lines)
        groups = {g: [replicas[n - columns.start] for n in ports.layout.groups[g]] for g in own_groups}
        control = ports.arena.views("control")
        storages = [ports.arena.views("even"), ports.arena.views("odd")]
        to_env = replicas[0].to_env
        pause = random_pauses(ports.delay_ms)
        actor_of = ports.layout.actor_of.tolist()
        T = ports.sync_interval
        snapshots = Snapshots(ports.snapshots, ports.lines)
        send_ready(ports.lines)

        while True:
            # Wait at the barrier until the next interval begins
            mark("barrier")
            while int(control.interval[0]) < int(control.finished[ports.index]):
                if STOP in ports.inbox.take():
                    return
            interval = int(control.interval[0])
            storage = storages[interval % 2]

            # Begin at row 0, or where a predecessor ended; request the first actions
            mark("open")
            done = {g: int(control.stepped[g]) - interval * T for g in own_groups}
            rows = {g: steps for g, steps in done.items() if steps < T}
            for g, row in rows.items():
                open_rows(storage, row, groups[g])
                control.posted[g] = interval * T + row + 1
            request(list(rows), actor_of, ports)
            for replica in replicas:  # while the actors work
                snapshots.take(replica)
            arrived = [g for g in rows if control.answered[g] == control.posted[g]]

            # Step replicas in the order in which their answers arrive
            while rows:
                mark("wait")
                arrived = arrived or ports.inbox.take()
                for g in arrived:
                    if g == STOP:
                        return
                    t = rows.get(g)
                    if t is None or control.answered[g] <= interval * T + t:
                        continue  # no group, or a message that was sent twice
                    pause()
                    mark("step", g, t)
                    step_group(storage, t, groups[g], to_env)
                    control.stepped[g] = interval * T + t + 1
                    if t + 1 < T:
                        rows[g] = t + 1
                        control.posted[g] = interval * T + t + 2
                        request([g], actor_of, ports)
                    else:
                        del rows[g]
                arrived = []

            # Finish: report at the barrier
            mark("check")
            check_observations(storage, replicas)
            for replica in replicas:
                replica.obs = observation(storage, T, replica.column)
            control.finished[ports.index] = interval + 1
            ports.barrier.post(ports.index)


def open_rows(storage: Any, t: int, replicas: list[Replica]) -> None:
    """Write the observations at which ``replicas`` stand into row ``t``, and clear the flags from there on."""
    own = slice(replicas[0].column, replicas[-1].column + 1)
    storage.valid[t:, own] = True
    for flags in (storage.terminated, storage.truncated, storage.episode_length):
        flags[t:, own] = 0
    for replica in replicas:
        open_row(storage, t, replica.column, replica.obs)


def request(groups: list[int], actor_of: list[int], ports: ExecutorPorts) -> None:
    """Post the numbers of ``groups`` to their actors."""
    if len(ports.actors) == 1:
        if groups:
            ports.actors[0].post(*groups)
        return
    for a, outbox in enumerate(ports.actors):
        numbers = [g for g in groups if actor_of[g] == a]
        if numbers:
            outbox.post(*numbers)


class Replica:
    """One environment and where it stands in its current episode."""

    def __init__(self, column: int, ports: ExecutorPorts) -> None:
        self.column = column
        self.alive = signs_of_life(ports.lines)
        self.seed = ports.seed
        self.spec = ports.spec
        self.to_env = action_converter(ports.spec.action, ports.squash_actions)
        self.limit = ports.spec.max_episode_steps or np.iinfo(np.int64).max
        self.episode = -1
        self.steps = 0
        self.reward = 0.0
        self.reset_pending = False
        try:
            self.env = envs.make(ports.spec.env_id, ports.options, masked=ports.spec.mask_in_info)
        except Exception as error:
            raise self.fault("construction") from error
        self.published = ports.snapshots
        self.alive()

    def start(self, log: EpisodeLog, lines: Lines) -> None:
        """Begin episode ``log.episode`` and go on to where it stood: from its snapshot, or else by all its actions.

        An environment that does not repeat itself is reported; its episode ends where it stood, without an outcome.
        """
        trace.mark("replay", self.column)
        obs = None
        if log.snapshot is not None:
            try:
                obs = self.restored(log, log.snapshot)
            except Exception as error:
                send_note(lines, f"a snapshot was no good ({error.__cause__ or error!r}): its episode is replayed")
        if obs is None:
            obs = self.play(log.actions, self.begin(log.episode))
        self.obs = np.array(obs, self.spec.observation_dtype)
        self.reset_pending = log.reset_pending
        if log.last_obs is not None and self.obs.tobytes() != log.last_obs.tobytes():
            send_unreproducible(lines, self.column)
            self.obs = log.last_obs
            self.reset_pending = True

    def restored(self, log: EpisodeLog, snapshot: Snapshot) -> np.ndarray:
        """The observation at which episode ``log.episode`` stood, by way of ``snapshot`` and the actions since.

        Raises:
            Exception: whatever the environment raises; ValueError where it came to anything else than before.
        """
        obs = self.begin(log.episode)
        self.env.restore(snapshot.data)  # type: ignore[attr-defined]
        self.steps, self.reward = snapshot.steps, snapshot.reward
        obs = self.play(log.actions[snapshot.steps : snapshot.later], obs)
        if fingerprint(self.env.snapshot()) != snapshot.fingerprint:  # type: ignore[attr-defined]
            raise ValueError("it led to another state than before")
        obs = self.play(log.actions[snapshot.later :], obs)
        if log.last_obs is None or np.asarray(obs, log.last_obs.dtype).tobytes() != log.last_obs.tobytes():
            raise ValueError("it led to another observation than before")
        self.published.write(self.column, snapshot)  # it serves the next checkpoint, too
        return obs

    def play(self, actions: np.ndarray, obs: np.ndarray) -> np.ndarray:
        """Repeat ``actions`` [L, *A] of this episode, which stands at ``obs``; returns the observation after them."""
        self.alive()
        for row in actions:
            (action,) = self.to_env(row[None])
            try:
                obs, reward, *_, info = self.env.step(action)
                self.reward += checks.number("reward", info["raw_reward"] if self.spec.has_raw_reward else reward)
            except Exception as error:
                raise self.fault("step", action) from error
            self.steps += 1
            self.alive()
        return obs

    def begin(self, episode: int) -> np.ndarray:
        """Begin ``episode`` from its own seed."""
        self.episode = episode - 1
        return self.reset()

    def go_on(self) -> np.ndarray:
        """Begin the next episode within a step."""
        trace.mark("reset", self.column)
        obs = self.reset()
        trace.mark("step")
        return obs

    def reset(self) -> np.ndarray:
        """Begin the next episode from its own seed."""
        self.episode += 1
        self.steps = 0
        self.reward = 0.0
        self.reset_pending = False
        try:
            obs = self.env.reset(seed=episode_seed(self.seed, self.column, self.episode))
            return checks.observation(obs, self.spec.observation_shape, self.spec.observation_dtype)
        except Exception as error:
            raise self.fault("reset") from error

    def fault(self, phase: str, action: Any = None) -> EnvironmentFault:
        """What to tell the user about a failure of this replica."""
        return EnvironmentFault(
            {
                "phase": phase,
                "replica": self.column,
                "episode": max(self.episode, 0),
                "step": self.steps,
                "seed": episode_seed(self.seed, self.column, max(self.episode, 0)),
                "action": None if action is None else np.asarray(action).tolist(),
            }
        )


def step_group(storage: Any, t: int, replicas: list[Replica], to_env: Callable[[np.ndarray], list]) -> None:
    """Step every replica of a group once: action[t] leads to reward[t], the end flags [t] and obs[t+1].

    This is the hot loop: about two microseconds of Python per step beside the environment's own time.
    """
    spec = replicas[0].spec
    first = replicas[0].column
    actions = to_env(storage.action[t, first : first + len(replicas)])
    next_obs = next_row(storage, t, slice(first, first + len(replicas)))
    rewards = storage.reward[t]
    shape, dtype = spec.observation_shape, spec.observation_dtype
    ndarray, storable, unmasked = np.ndarray, checks.storable(dtype), not spec.parts or spec.mask is None
    for replica, action in zip(replicas, actions):
        n = replica.column
        if replica.reset_pending:
            # The row after a truncation is not a transition: its action is ignored
            next_obs[n] = begin_next(storage, t, replica)
            storage.valid[t, n] = False
            rewards[n] = 0.0
            continue
        try:
            obs, reward, terminated, truncated, info = replica.env.step(action)
            # What is as it should be passes the cheap tests; the functions accept more, or refuse
            if obs.__class__ is not ndarray or obs.dtype not in storable or obs.shape != shape:
                obs = checks.observation(obs, shape, dtype)
            if not isinstance(reward, float):
                reward = checks.number("reward", reward)
            if not -_LARGEST <= reward <= _LARGEST:
                raise ValueError(f"the environment returned a reward of {reward}; rewards must be finite in float32")
            if terminated.__class__ is not bool:
                terminated = checks.flag("terminated", terminated)
            if truncated.__class__ is not bool:
                truncated = checks.flag("truncated", truncated)
            if info and unmasked:
                checks.no_mask(info)
            raw_reward = checks.number("raw_reward", info["raw_reward"]) if spec.has_raw_reward else reward
            life_lost = spec.has_life_loss and info["life_lost"]
        except Exception as error:
            raise replica.fault("step", action) from error
        rewards[n] = reward
        replica.steps += 1
        replica.reward += raw_reward
        if life_lost:
            # The learner's episode ends, the game goes on
            storage.terminated[t, n] = True
        if terminated or truncated or replica.steps >= replica.limit:
            storage.episode_return[t, n] = replica.reward
            storage.episode_length[t, n] = replica.steps
            storage.episode_score[t, n] = info["score"] if spec.has_score and "score" in info else np.nan
            if terminated:
                storage.terminated[t, n] = True
                obs = begin_next(storage, t, replica)
            else:
                storage.truncated[t, n] = True
                replica.reset_pending = True
        next_obs[n] = obs


def begin_next(storage: Any, t: int, replica: Replica) -> np.ndarray:
    """Begin the next episode of ``replica`` within step t; returns its first observation, that of row t+1.

    A recurrent policy remembers nothing there, nor does a stack of frames.
    """
    begin_row(storage, t + 1, replica.column)
    if hasattr(storage, "state"):
        storage.state[t + 1, replica.column] = 0.0
    return replica.go_on()


def action_converter(action: ActionSpec, squashed: bool) -> Callable[[np.ndarray], list]:
    """From stored actions [n, *A] to a list of n actions as the environment wants them.

    Those of a box are clipped to its bounds, or, ``squashed``, brought between them by tanh.
    """
    if action.kind == "discrete":
        if action.start == 0:
            return lambda stored: stored.tolist()
        return lambda stored: (stored + action.start).tolist()
    if action.kind in ("multi_discrete", "multi_binary"):
        return lambda stored: list(stored.reshape(-1, *action.shape).copy())
    low, high = np.array(action.low, np.float32), np.array(action.high, np.float32)
    if not squashed:
        return lambda stored: list(np.clip(stored, low, high).reshape(-1, *action.shape))
    centre, half = high / 2 + low / 2, high / 2 - low / 2

    def squash(stored: np.ndarray) -> list:
        # math's tanh, one by one: the bits of numpy's could depend on how many it computes at once
        unit = np.array([math.tanh(u) for u in stored.ravel().tolist()], np.float32).reshape(stored.shape)
        return list(np.clip(centre + half * unit, low, high).reshape(-1, *action.shape))

    return squash


def check_observations(storage: Any, replicas: list[Replica]) -> None:
    """Refuse NaN and infinity before anything is learned from them; once per interval, over its T+1 rows."""
    spec = replicas[0].spec
    vectors = [part for part in spec.parts if part.kind == "vector"]
    if spec.observation_dtype.kind != "f" and not vectors:
        return
    obs = storage.obs
    for replica in replicas:
        own = obs[:, replica.column]
        numbers = [own[:, part.bytes].view(part.dtype) for part in vectors] or [own.reshape(len(obs), -1)]
        finite = np.logical_and.reduce([np.isfinite(each).all(axis=1) for each in numbers])
        if not finite.all():
            replica.episode, replica.steps = place_of(storage, replica, int(np.flatnonzero(~finite)[0]))
            error = ValueError("the environment returned an observation with NaN or infinity")
            raise replica.fault("observation") from error


def place_of(storage: Any, replica: Replica, row: int) -> tuple[int, int]:
    """The episode, and the steps in it, that led to ``replica``'s observation in ``row``; it stands at the last row."""
    n = replica.column
    episode, steps = replica.episode, replica.steps
    for t in reversed(range(row, len(storage.reward))):
        # From obs[t+1] back to obs[t]
        begun = not storage.valid[t, n] or (storage.terminated[t, n] and storage.episode_length[t, n])
        if not begun:
            steps -= 1
            continue
        episode -= 1
        if storage.valid[t, n]:
            steps = int(storage.episode_length[t, n]) - 1
        elif t > 0:
            steps = int(storage.episode_length[t - 1, n])
    return episode, steps
