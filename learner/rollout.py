"""One full storage, as tensors on the learner's device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from htsrl.learner.stacks import Stacks
from htsrl.models.recurrent import Sequences


@dataclass(frozen=True)
class Memory:
    """What a recurrent policy started from, and where it started anew."""

    state: torch.Tensor
    """[N, S] float32 before row 0, under the behaviour parameters."""
    begins: np.ndarray
    """[T+1, N] bool, on the host: the row is the first of an episode. Of row 0 the state says it."""

    def sequences(self, columns: np.ndarray, length: int) -> Sequences:
        """The first ``length`` rows of ``columns`` [C]."""
        take = torch.from_numpy(columns).to(self.state.device)
        return Sequences(self.state.index_select(0, take), self.begins[:length, columns])


@dataclass(frozen=True)
class Rollout:
    """What T steps of N replicas left behind, for the algorithms.

    Row t: obs[t] led to action[t] led to reward[t] and obs[t+1].

    A truncated episode's last observation is obs[t+1]; row t+1 is then not a transition (``valid`` is 0 there) and its
    action, reward and flags mean nothing, but ``value[t+1]`` is the value of that last observation.
    """

    obs: torch.Tensor | Stacks
    """[T+1, N, *obs] in the environment's dtype; where they are put together from frames, flat: [(T+1)*N, *obs]."""
    action: torch.Tensor
    """[T, N] int64, [T, N, A] int64 or [T, N, A] float32."""
    log_prob: torch.Tensor
    """[T, N] float32: of the action under the behaviour policy."""
    value: torch.Tensor
    """[T+1, N] float32 under the behaviour parameters; row T bootstraps."""
    reward: torch.Tensor
    """[T, N] float32."""
    terminated: torch.Tensor
    """[T, N] float32, 1 where the episode ended in a terminal state."""
    truncated: torch.Tensor
    """[T, N] float32, 1 where the episode was cut off by a time limit."""
    valid: torch.Tensor
    """[T, N] float32, 0 where the row is not a transition."""
    memory: Memory | None = None
    """Only of a recurrent policy."""

    @property
    def obs_rows(self) -> torch.Tensor | Stacks:
        """[(T+1)*N, *obs]: row t * N + n, to be had with ``index_select(0, index)``."""
        return self.obs if isinstance(self.obs, Stacks) else self.obs.flatten(0, 1)
