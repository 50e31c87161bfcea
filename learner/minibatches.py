"""From a rollout [T, N] to minibatches of one fixed size [M]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from htsrl.learner import returns
from htsrl.learner.rollout import Memory, Rollout
from htsrl.learner.stacks import Stacks
from htsrl.models.recurrent import Sequences

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

    def pieces(self, size: int, multiple: int = 1, length: int = 1) -> Iterator[Rows]:
        """A minibatch in ``multiple`` or more equal pieces of at most ``size`` rows; the last may be smaller.

        Sequences of ``length`` rows, in (step, sequence) order, stay whole: so pieces may be larger, or fewer.
        """
        count = -(-len(self.index) // (size * multiple)) * multiple
        if count == 1:
            return iter((self,))
        even = -(-len(self.index) // (length * count))
        split = (column.unflatten(0, (length, -1)).split(even, 1) for column in self._columns())
        return (Rows(*(part.flatten(0, 1) for part in columns)) for columns in zip(*split, strict=True))

    def _columns(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class Batch:
    """All T*N rows of a rollout, flat, on the learner's device, with advantages and targets."""

    obs: torch.Tensor | Stacks
    """[(T+1)*N, *obs] in the environment's dtype: a view of the storage, of which a batch uses the first T*N rows."""
    action: torch.Tensor
    log_prob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    value_target: torch.Tensor
    before: torch.Tensor
    valid: np.ndarray
    """int64: the rows that are transitions, in order."""
    explained_variance: float
    memory: Memory | None = None
    """Only of a recurrent policy: minibatches are then made of whole columns."""

    @property
    def length(self) -> int:
        """Rows that must stay together: L of a recurrent policy's sequences, all steps of the rollout; else 1."""
        return 1 if self.memory is None else len(self.memory.begins) - 1

    def enough_for(self, wanted: int) -> int:
        """How many minibatches there are transitions for, at most ``wanted``; columns are always dealt out to all."""
        return min(wanted, len(self.valid)) if self.memory is None else wanted * bool(len(self.valid))

    def dealt(
        self, minibatches: int, size: int, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """All transitions in ``minibatches`` of ``size`` rows: ``(index, weight)`` [minibatches, size].

        They are shuffled by ``rng``, or else in their order. A recurrent policy's are whole columns in (step, column)
        order, in which rows that are no transitions have weight 0.
        """

        def ordered(x: np.ndarray) -> np.ndarray:
            return x if rng is None else rng.permutation(x)

        if self.memory is None:
            return deal(ordered(self.valid), minibatches, size)
        N = self.memory.begins.shape[1]
        transitions = np.zeros((self.length, N), np.bool_)
        transitions.flat[self.valid] = True
        return deal_columns(ordered(np.arange(N)), minibatches, transitions)

    def sequences(self, rows: Rows) -> Sequences | None:
        """What a recurrent policy must know of ``rows`` [M] beside their observations."""
        if self.memory is None:
            return None
        index = rows.index.cpu().numpy().reshape(self.length, -1)
        N = self.memory.begins.shape[1]
        assert (index == np.arange(self.length)[:, None] * N + index[0]).all(), "not whole columns"
        return self.memory.sequences(index[0], self.length)

    def rows(self, index: np.ndarray, weight: np.ndarray) -> Rows:
        """The rows of ``index`` [K, M] with their ``weight`` [K, M]."""
        device = self.action.device
        take = torch.from_numpy(index).to(device)
        columns = (self.action, self.log_prob, self.value, self.advantage, self.value_target, self.before)
        return Rows(take, torch.from_numpy(weight).to(device), *(column[take] for column in columns))

    def named(self, rows: Rows) -> dict[str, torch.Tensor]:
        """The columns of ``rows`` [M] by name, with their observations."""
        columns = {field.name: getattr(rows, field.name) for field in fields(rows)}
        named = {**columns, "obs": self.obs.index_select(0, rows.index)}
        sequences = self.sequences(rows)
        return named if sequences is None else named | sequences.named()


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
        obs=rollout.obs_rows,
        action=rollout.action.flatten(0, 1),
        log_prob=rollout.log_prob.flatten(),
        value=rollout.value[:-1].flatten(),
        advantage=torch.from_numpy(advantage.ravel()).to(device),
        value_target=torch.from_numpy(value_target.ravel()).to(device),
        before=rollout.reward.new_empty((reward.size, 0)),
        valid=np.flatnonzero(valid),
        explained_variance=explained_variance,
        memory=rollout.memory,
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
    shared = weight / np.maximum(episode_rows[index], 1.0)  # 0 for one without transitions, whose weight is 0, too
    return (shared / np.maximum(shared.sum(-1, keepdims=True), np.finfo(np.float32).tiny)).astype(np.float32)


def deal_columns(columns: np.ndarray, minibatches: int, transitions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Deal ``columns`` [N] int64 out evenly, in their order: ``(index, weight)`` [minibatches, T * N / minibatches].

    Rows are in (step, column) order. Those that are no ``transitions`` [T, N] bool are there with weight 0, as a
    sequence has no holes; what follows them begins anew. Wants ``minibatches`` to divide N.
    """
    T, N = transitions.shape
    index = np.arange(T)[:, None] * N + columns.reshape(minibatches, 1, -1)  # [minibatches, T, C]
    index = index.reshape(minibatches, -1)
    real = transitions.ravel()[index]
    return index, real.astype(np.float32) / np.maximum(real.sum(1, keepdims=True), 1, dtype=np.float32)


def piece_rows(row_bytes: int, device: torch.device) -> int:
    """Rows that one forward and backward pass may take, where a row becomes a tensor of up to ``row_bytes``."""
    return max(1, PIECE_BYTES[device.type] // row_bytes)
