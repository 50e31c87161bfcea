"""One full storage, as tensors on the learner's device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rollout:
    """What T steps of N replicas left behind, for the algorithms.

    Row t: obs[t] led to action[t] led to reward[t] and obs[t+1].

    A truncated episode's last observation is obs[t+1]; row t+1 is then not a transition (``valid`` is 0 there) and its
    action, reward and flags mean nothing, but ``value[t+1]`` is the value of that last observation.
    """

    obs: torch.Tensor
    """[T+1, N, *obs] in the environment's dtype."""
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
