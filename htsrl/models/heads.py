"""Action heads: how a row of network outputs becomes an action, its log-probability and the policy's entropy.

Heads are pure: they hold no parameters and draw nothing. Noise is an argument, so sampling is a function of its inputs
and gives the same action wherever it is done. Letters: B rows, A choices or action dimension, K components.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from htsrl.envs.spec import ActionSpec

NoiseKind = Literal["gumbel", "normal"]
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class Head(Protocol):
    """A family of action distributions, described by ``params`` [B, P] float32."""

    @property
    def output_size(self) -> int:
        """Outputs that the network's last policy layer has; less than ``param_size`` where parameters are appended."""

    @property
    def param_size(self) -> int:
        """P."""

    @property
    def noise_size(self) -> int:
        """Noise values that one sample takes."""

    @property
    def noise_kind(self) -> NoiseKind:
        """Distribution of the noise: standard Gumbel or standard normal."""

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Action [B, *A] for ``noise`` [B, noise_size] float32."""

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        """The most likely action [B, *A]."""

    def log_prob(self, params: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Log-probability (density) [B] of ``action`` [B, *A]."""

    def entropy(self, params: torch.Tensor) -> torch.Tensor:
        """Entropy [B] in nats."""

    def log_prob_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both of the above from one normalisation: what a gradient step wants."""


def make_head(action: ActionSpec) -> Head:
    """The head that fits an action space."""
    if action.kind == "discrete":
        return Categorical(action.nvec[0])
    if action.kind == "multi_discrete":
        return MultiCategorical(action.nvec)
    return DiagonalGaussian(len(action.low))


@dataclass(frozen=True)
class Categorical:
    """One choice of A; ``params`` are logits [B, A], actions int64 [B]."""

    choices: int
    noise_kind: NoiseKind = "gumbel"

    @property
    def output_size(self) -> int:
        return self.choices

    @property
    def param_size(self) -> int:
        return self.choices

    @property
    def noise_size(self) -> int:
        return self.choices

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """argmax(logits + Gumbel noise) has exactly the distribution softmax(logits) (Gumbel 1954)."""
        return (params + noise).argmax(-1)

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        return params.argmax(-1)

    def log_prob(self, params: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        # The loss, not gather: its gradient writes each row's own element, so nothing is added in an unknown order.
        return -F.cross_entropy(params, action, reduction="none")

    def entropy(self, params: torch.Tensor) -> torch.Tensor:
        return _entropy(F.log_softmax(params, -1))

    def log_prob_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = F.log_softmax(params, -1)
        return -F.nll_loss(log_probs, action, reduction="none"), _entropy(log_probs)


@dataclass(frozen=True)
class MultiCategorical:
    """K independent choices; ``params`` are their logits side by side [B, sum of nvec], actions int64 [B, K]."""

    nvec: tuple[int, ...]
    noise_kind: NoiseKind = "gumbel"

    @property
    def output_size(self) -> int:
        return sum(self.nvec)

    @property
    def param_size(self) -> int:
        return sum(self.nvec)

    @property
    def noise_size(self) -> int:
        return sum(self.nvec)

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self.mode(params + noise)

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        return torch.stack([logits.argmax(-1) for logits in params.split(self.nvec, -1)], -1)

    def log_prob(self, params: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.log_prob_entropy(params, action)[0]

    def entropy(self, params: torch.Tensor) -> torch.Tensor:
        return _sum(_entropy(F.log_softmax(logits, -1)) for logits in params.split(self.nvec, -1))

    def log_prob_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        components = [
            Categorical(n).log_prob_entropy(logits, choice)
            for n, logits, choice in zip(self.nvec, params.split(self.nvec, -1), action.unbind(-1), strict=True)
        ]
        return _sum(log_prob for log_prob, _ in components), _sum(entropy for _, entropy in components)


@dataclass(frozen=True)
class DiagonalGaussian:
    """A independent normal actions; ``params`` [B, 2A] are means, then logarithms of standard deviations.

    Actions are float32 [B, A] and unbounded: the environment's side clips what it executes, and the log-probability is
    that of the action before clipping.
    """

    dimensions: int
    noise_kind: NoiseKind = "normal"

    @property
    def output_size(self) -> int:
        return self.dimensions

    @property
    def param_size(self) -> int:
        return 2 * self.dimensions

    @property
    def noise_size(self) -> int:
        return self.dimensions

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log_std = params.chunk(2, -1)
        return mean + log_std.exp() * noise

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        # A copy: an action must not change when the parameters' buffer is used again.
        return params[:, : self.dimensions].clone()

    def log_prob(self, params: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        mean, log_std = params.chunk(2, -1)
        z = (action - mean) * torch.exp(-log_std)
        return (-0.5 * z.square() - log_std).sum(-1) - self.dimensions * _LOG_SQRT_2PI

    def entropy(self, params: torch.Tensor) -> torch.Tensor:
        return params[:, self.dimensions :].sum(-1) + self.dimensions * (0.5 + _LOG_SQRT_2PI)

    def log_prob_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_prob(params, action), self.entropy(params)


def _entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """H = -Σ p log p, [B], of normalised ``log_probs`` [B, A]."""
    return -(log_probs.exp() * log_probs).sum(-1)


def _sum(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum of K vectors [B], in the order given."""
    return torch.stack(list(rows)).sum(0)
