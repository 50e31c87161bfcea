"""The executor: owns environment replicas and steps each as soon as its action arrives. Imports numpy, never torch.

It knows a storage view and mailboxes, nothing else. Observations go straight into the storage row from which the actor
gathers and the learner learns; a message only says which group has a new row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from htsrl import envs
from htsrl.actors.delays import random_pauses
from htsrl.actors.mailbox import STOP
from htsrl.actors.ports import ExecutorPorts, Lines
from htsrl.actors.reports import EnvironmentFault, reported, send_ready, send_unreproducible
from htsrl.envs.spec import ActionSpec, EnvSpec
from htsrl.rng import episode_seed
from htsrl.storage.episodes import EpisodeLog

_LARGEST = float(np.finfo(np.float32).max)


def run_executor(ports: ExecutorPorts) -> None:
    """Body of an executor process."""
    with reported("executor", ports.index, ports.lines):
        # Construct the environments, each at the point where the run stands
        columns = ports.layout.executor_columns[ports.index]
        own_groups = ports.layout.executor_groups[ports.index]
        replicas = [Replica(n, ports) for n in columns]
        groups = {g: [replicas[n - columns.start] for n in ports.layout.groups[g]] for g in own_groups}
        last_obs = [bring_up(replica, log, ports.lines) for replica, log in zip(replicas, ports.logs)]
        control = ports.arena.views("control")
        storages = [ports.arena.views("even"), ports.arena.views("odd")]
        to_env = action_converter(ports.spec.action)
        T = ports.sync_interval
        actor_of = ports.layout.actor_of.tolist()
        actors_and_groups = [
            (outbox, np.array([g for g in own_groups if actor_of[g] == a], np.uint32))
            for a, outbox in enumerate(ports.actors)
        ]
        finished = int(control.finished[ports.index])
        pause = random_pauses(ports.delay_ms)
        send_ready(ports.lines)

        while True:
            # Wait at the barrier until the next interval begins
            while int(control.interval[0]) < finished:
                if STOP in ports.inbox.take():
                    return
            interval = int(control.interval[0])
            storage = storages[interval % 2]

            # Begin: the first observations and the requests for their actions
            own = slice(columns.start, columns.stop)
            storage.valid[:, own] = True
            for flags in (storage.terminated, storage.truncated, storage.episode_length):
                flags[:, own] = 0
            for replica, obs in zip(replicas, last_obs):
                storage.obs[0, replica.column] = obs
            posted = interval * T + 1
            control.posted[own_groups] = posted
            for outbox, numbers in actors_and_groups:
                outbox.post_array(numbers)
            rows = dict.fromkeys(own_groups, 0)

            # Step replicas in the order in which their answers arrive
            while rows:
                ready: dict[int, list[int]] = {}
                for g in ports.inbox.take().tolist():
                    if g == STOP:
                        return
                    t = rows.get(g)
                    if t is None or control.answered[g] <= interval * T + t:
                        continue  # a message that was sent twice
                    pause()
                    step_group(storage, t, groups[g], to_env)
                    if t + 1 < T:
                        rows[g] = t + 1
                        control.posted[g] = interval * T + t + 2
                        ready.setdefault(actor_of[g], []).append(g)
                    else:
                        del rows[g]
                for a, stepped in ready.items():
                    ports.actors[a].post(*stepped)

            # Finish: where each replica stands; report at the barrier
            check_observations(storage.obs, replicas)
            last_obs = [storage.obs[T, replica.column].copy() for replica in replicas]
            for replica in replicas:
                replica.write_stand(control)
            finished = interval + 1
            control.finished[ports.index] = finished
            ports.barrier.post(ports.index)


class Replica:
    """One environment and where it stands in its current episode."""

    def __init__(self, column: int, ports: ExecutorPorts) -> None:
        self.column = column
        self.seed = ports.seed
        self.spec = ports.spec
        self.limit = ports.spec.max_episode_steps or np.iinfo(np.int64).max
        self.episode = -1
        self.steps = 0
        self.reward = 0.0
        self.reset_pending = False
        try:
            self.env = envs.make(ports.spec.env_id, ports.options)
        except Exception as error:
            raise self.fault("construction") from error

    def start(self, log: EpisodeLog) -> np.ndarray:
        """Begin episode ``log.episode``, or replay it up to where it stood; returns the observation there."""
        self.episode = log.episode - 1
        obs = self.reset()
        to_env = action_converter(self.spec.action)
        for row in log.actions:
            (action,) = to_env(row[None])
            try:
                obs, reward, *_, info = self.env.step(action)
            except Exception as error:
                raise self.fault("step", action) from error
            self.steps += 1
            self.reward += info["raw_reward"] if self.spec.has_raw_reward else reward
        self.reset_pending = log.reset_pending
        return np.array(obs, self.spec.observation_dtype)

    def reset(self) -> np.ndarray:
        """Begin the next episode from its own seed."""
        self.episode += 1
        self.steps = 0
        self.reward = 0.0
        self.reset_pending = False
        try:
            obs = self.env.reset(seed=episode_seed(self.seed, self.column, self.episode))
            if np.shape(obs) != self.spec.observation_shape:
                raise wrong_shape(self.spec, obs)
        except Exception as error:
            raise self.fault("reset") from error
        return obs

    def write_stand(self, control: Any) -> None:
        """Leave word of where this replica stands, for checkpoints and recovery."""
        n = self.column
        control.episode[n] = self.episode
        control.episode_steps[n] = self.steps
        control.episode_reward[n] = self.reward
        control.reset_pending[n] = self.reset_pending

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


def bring_up(replica: Replica, log: EpisodeLog, lines: Lines) -> np.ndarray:
    """Put a replica where its log says; returns the observation there.

    An environment that does not repeat itself is reported, and begins a new episode.
    """
    obs = replica.start(log)
    if log.last_obs is None or obs.tobytes() == log.last_obs.tobytes():
        return obs
    send_unreproducible(lines, replica.column)
    return np.array(replica.reset(), replica.spec.observation_dtype)


def step_group(storage: Any, t: int, replicas: list[Replica], to_env: Callable[[np.ndarray], list]) -> None:
    """Step every replica of a group once: action[t] leads to reward[t], the end flags [t] and obs[t+1].

    This is the hot loop: about two microseconds of Python per step beside the environment's own time.
    """
    spec = replicas[0].spec
    first = replicas[0].column
    actions = to_env(storage.action[t, first : first + len(replicas)])
    next_obs = storage.obs[t + 1]
    rewards = storage.reward[t]
    shape = next_obs.shape[1:]
    for replica, action in zip(replicas, actions):
        n = replica.column
        if replica.reset_pending:
            # The row after a truncation is not a transition: its action is ignored
            next_obs[n] = replica.reset()
            storage.valid[t, n] = False
            rewards[n] = 0.0
            continue
        try:
            obs, reward, terminated, truncated, info = replica.env.step(action)
            if obs.shape != shape:
                raise wrong_shape(replica.spec, obs)
            if not -_LARGEST <= reward <= _LARGEST:
                raise ValueError(f"the environment returned a reward of {reward}; rewards must be finite")
        except Exception as error:
            raise replica.fault("step", action) from error
        rewards[n] = reward
        replica.steps += 1
        replica.reward += info["raw_reward"] if spec.has_raw_reward else reward
        if spec.has_life_loss and info["life_lost"]:
            # The learner's episode ends, the game goes on
            storage.terminated[t, n] = True
        if terminated or truncated or replica.steps >= replica.limit:
            storage.episode_return[t, n] = replica.reward
            storage.episode_length[t, n] = replica.steps
            storage.episode_score[t, n] = info["score"] if spec.has_score and "score" in info else np.nan
            if terminated:
                storage.terminated[t, n] = True
                obs = replica.reset()
            else:
                storage.truncated[t, n] = True
                replica.reset_pending = True
        next_obs[n] = obs


def action_converter(action: ActionSpec) -> Callable[[np.ndarray], list]:
    """From stored actions [n, *A] to a list of n actions as the environment wants them."""
    if action.kind == "discrete":
        if action.start == 0:
            return lambda stored: stored.tolist()
        return lambda stored: (stored + action.start).tolist()
    if action.kind == "multi_discrete":
        return lambda stored: list(stored.reshape(-1, *action.shape).copy())
    low, high = np.array(action.low, np.float32), np.array(action.high, np.float32)
    return lambda stored: list(np.clip(stored, low, high).reshape(-1, *action.shape))


def check_observations(obs: np.ndarray, replicas: list[Replica]) -> None:
    """Refuse NaN and infinity before anything is learned from them; once per interval, over [T+1, n, *obs]."""
    if obs.dtype.kind != "f":
        return
    for replica in replicas:
        finite = np.isfinite(obs[:, replica.column]).reshape(len(obs), -1).all(axis=1)
        if not finite.all():
            row = int(np.flatnonzero(~finite)[0])
            error = ValueError(
                f"the environment returned an observation with NaN or infinity (row {row} of the interval)"
            )
            raise replica.fault("observation") from error


def wrong_shape(spec: EnvSpec, obs: Any) -> ValueError:
    return ValueError(
        f"the environment returned an observation of shape {np.shape(obs)}, but its space says {spec.observation_shape}"
    )
