"""From a rollout [T, N] to minibatches of one fixed size [M]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from htsrl.learner import returns
from htsrl.learner.rollout import Rollout

# No tensor of a forward and backward pass is larger than this. On the CPU glibc gives blocks beyond 32 MiB back to the
# kernel each time, and each time they cost a page fault per 4 KiB (8 to 20 % of a CNN's update); on a GPU the bound is
# for memory alone. The pieces are part of what decides a run's bits.
PIECE_BYTES = {"cpu": 28 << 20, "cuda": 1 << 30}


@dataclass(frozen=True)
class Rows:
    """What a gradient step knows of its rows beside their observations: K minibatches [K, M, ...], or one [M, ...]."""

    index: torch.Tensor
    """int64: row of the batch, t * N + n."""
    weight: torch.Tensor
    """float32: 1/(number of real rows), 0 for fillers."""
    action: torch.Tensor
    log_prob: torch.Tensor
    """Of the action under the behaviour policy."""
    value: torch.Tensor
    """Under the behaviour parameters."""
    advantage: torch.Tensor
    value_target: torch.Tensor
    before: torch.Tensor
    """[..., P] float32: the policy's distribution as the update begins; P is 0 where nobody asks for it."""

    def minibatches(self) -> Iterator[Rows]:
        """The K minibatches of an epoch."""
        return (Rows(*columns) for columns in zip(*(column.unbind() for column in self._columns()), strict=True))

    def pieces(self, size: int, multiple: int = 1) -> Iterator[Rows]:
        """A minibatch in ``multiple`` or more equal pieces of at most ``size`` rows; the last may be smaller."""
        count = -(-len(self.index) // (size * multiple)) * multiple
        if count == 1:
            return iter((self,))
        even = -(-len(self.index) // count)
        return (Rows(*columns) for columns in zip(*(column.split(even) for column in self._columns()), strict=True))

    def _columns(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class Batch:
    """All T*N rows of a rollout, flat, on the learner's device, with advantages and targets."""

    obs: torch.Tensor
    """[T*N, *obs] in the environment's dtype: a view of the storage."""
    action: torch.Tensor
    log_prob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    value_target: torch.Tensor
    before: torch.Tensor
    valid: np.ndarray
    """int64: the rows that are transitions, in order."""
    explained_variance: float

    def rows(self, index: np.ndarray, weight: np.ndarray) -> Rows:
        """The rows of ``index`` [K, M] with their ``weight`` [K, M]."""
        device = self.action.device
        take = torch.from_numpy(index).to(device)
        columns = (self.action, self.log_prob, self.value, self.advantage, self.value_target, self.before)
        return Rows(take, torch.from_numpy(weight).to(device), *(column[take] for column in columns))

    def named(self, rows: Rows) -> dict[str, torch.Tensor]:
        """The columns of ``rows`` [M] by name, with their observations."""
        columns = {field.name: getattr(rows, field.name) for field in fields(rows)}
        return {**columns, "obs": self.obs.index_select(0, rows.index)}


def make_batch(rollout: Rollout, gamma: float, gae_lambda: float) -> Batch:
    """Advantages and λ-return targets of ``rollout``, computed on the host, beside its flattened rows."""
    reward, terminated, truncated, valid, value = (
        x.cpu().numpy() for x in (rollout.reward, rollout.terminated, rollout.truncated, rollout.valid, rollout.value)
    )
    # NaN and infinity come out as they went in: the check of the loss tells about them.
    with np.errstate(invalid="ignore", over="ignore"):
        discount, trace = returns.end_factors(gamma, terminated, truncated)
        advantage = returns.gae(reward, discount, trace, valid, value, gae_lambda)
        value_target = advantage + value[:-1]
        explained_variance = returns.explained_variance(value_target, value[:-1], valid)
    device = rollout.obs.device
    return Batch(
        obs=rollout.obs[:-1].flatten(0, 1),
        action=rollout.action.flatten(0, 1),
        log_prob=rollout.log_prob.flatten(),
        value=rollout.value[:-1].flatten(),
        advantage=torch.from_numpy(advantage.ravel()).to(device),
        value_target=torch.from_numpy(value_target.ravel()).to(device),
        before=rollout.reward.new_empty((reward.size, 0)),
        valid=np.flatnonzero(valid),
        explained_variance=explained_variance,
    )


def deal(rows: np.ndarray, minibatches: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Deal ``rows`` [R] int64 out evenly, in their order: ``(index, weight)`` [minibatches, size].

    A minibatch that gets fewer than ``size`` rows repeats its own with weight 0, so that shapes never change and a
    row that is no transition is never touched. Wants R >= minibatches, size >= R / minibatches.
    """
    counts = np.full(minibatches, len(rows) // minibatches)
    counts[: len(rows) % minibatches] += 1
    place = np.arange(size)
    starts = np.cumsum(counts) - counts
    index = rows[starts[:, None] + place % counts[:, None]]
    weight = np.where(place < counts[:, None], 1.0 / counts[:, None], 0.0)
    return index, weight.astype(np.float32)


def per_episode(index: np.ndarray, weight: np.ndarray, episode_rows: np.ndarray) -> np.ndarray:
    """``weight`` [K, M] of the rows ``index`` [K, M] in which each episode counts as much as any other, not each step.

    ``episode_rows`` [R] float32 is how many transitions the episode of every row made in this interval. In a minibatch
    that holds a share of an episode's rows, that share counts.
    """
    shared = weight / episode_rows[index]
    return (shared / shared.sum(-1, keepdims=True)).astype(np.float32)


def piece_rows(row_bytes: int, device: torch.device) -> int:
    """Rows that one forward and backward pass may take, where a row becomes a tensor of up to ``row_bytes``."""
    return max(1, PIECE_BYTES[device.type] // row_bytes)
