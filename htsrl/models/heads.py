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

from htsrl.config import LOG_STD_RANGE, NetworkOptions
from htsrl.envs.spec import ActionSpec

NoiseKind = Literal["gumbel", "normal"]
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
# A finite logit for what must not be chosen. Its probability is exactly 0 in float32, beside any logit that a network
# gives, and entropy, divergences and gradients stay finite: p log p is 0 where infinity would make it NaN.
MASKED_LOGIT = -1e9


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

    def kl(self, before: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """KL(before ‖ params) [B] in nats, exact, of the distributions that both [B, P] describe."""


def make_head(action: ActionSpec, options: NetworkOptions | None = None) -> Head:
    """The head that fits an action space; ``options`` choose between those for a box."""
    if action.kind == "discrete":
        return Categorical(action.nvec[0])
    if action.kind == "multi_discrete":
        return MultiCategorical(action.nvec)
    if action.kind == "multi_binary":
        return Bernoulli(len(action.nvec))
    if options is None:
        return DiagonalGaussian(len(action.low))
    return DiagonalGaussian(len(action.low), options.state_dependent_std, options.squash_actions)


def mask_logits(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """``logits`` [B, A] where ``allowed`` [B, A] uint8 is not 0; elsewhere never chosen, and without a gradient.

    Where nothing is allowed, which no environment may say while an episode goes on, all are as likely.
    """
    return torch.where(allowed.bool(), logits, MASKED_LOGIT)


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

    def kl(self, before: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        log_probs = F.log_softmax(before, -1)
        return (log_probs.exp() * (log_probs - F.log_softmax(params, -1))).sum(-1)


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

    def kl(self, before: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.nvec, before.split(self.nvec, -1), params.split(self.nvec, -1), strict=True)
        return _sum(Categorical(n).kl(old, new) for n, old, new in pairs)


@dataclass(frozen=True)
class Bernoulli:
    """A independent yes-or-no choices; ``params`` are logits of 'yes' [B, A], actions int64 [B, A] of 0 and 1."""

    dimensions: int
    noise_kind: NoiseKind = "gumbel"

    @property
    def output_size(self) -> int:
        return self.dimensions

    @property
    def param_size(self) -> int:
        return self.dimensions

    @property
    def noise_size(self) -> int:
        return 2 * self.dimensions

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """As a :class:`Categorical` of 'no' with logit 0 and 'yes' would."""
        no, yes = noise.chunk(2, -1)
        return (params + yes > no).long()

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        return (params > 0).long()

    def log_prob(self, params: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return -F.softplus(torch.where(action > 0, -params, params)).sum(-1)

    def entropy(self, params: torch.Tensor) -> torch.Tensor:
        """Σ p log(1 + e^-l) + (1 - p) log(1 + e^l): no difference of large numbers."""
        return (params.sigmoid() * F.softplus(-params) + (-params).sigmoid() * F.softplus(params)).sum(-1)

    def log_prob_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_prob(params, action), self.entropy(params)

    def kl(self, before: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        yes = before.sigmoid() * (F.softplus(-params) - F.softplus(-before))
        return (yes + (-before).sigmoid() * (F.softplus(params) - F.softplus(before))).sum(-1)


@dataclass(frozen=True)
class DiagonalGaussian:
    """A independent normal actions; ``params`` [B, 2A] are means, then logarithms of standard deviations.

    Actions are float32 [B, A] and unbounded. The environment's side clips what it executes, and the log-probability is
    that of the action before clipping.

    ``squashed``, the environment's side applies tanh and stretches (-1, 1) to the bounds. Actions are stored before
    that, u, which no rounding can bring to where the inverse is infinite; log-probability and entropy are those of
    tanh(u), in (-1, 1)^A. Stretching would only add a constant.

    ``state_dependent`` deviations are outputs of the network, clamped to LOG_STD_RANGE; else they are parameters.
    """

    dimensions: int
    state_dependent: bool = False
    squashed: bool = False
    noise_kind: NoiseKind = "normal"

    @property
    def output_size(self) -> int:
        return 2 * self.dimensions if self.state_dependent else self.dimensions

    @property
    def param_size(self) -> int:
        return 2 * self.dimensions

    @property
    def noise_size(self) -> int:
        return self.dimensions

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log_std = self._split(params)
        return mean + log_std.exp() * noise

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        """The mean; ``squashed``, the median, since the density may be largest at the bounds."""
        # A copy: an action must not change when the parameters' buffer is used again.
        return params[:, : self.dimensions].clone()

    def log_prob(self, params: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        mean, log_std = self._split(params)
        z = (action - mean) * torch.exp(-log_std)
        log_prob = (-0.5 * z.square() - log_std).sum(-1) - self.dimensions * _LOG_SQRT_2PI
        return log_prob - _log_slope(action).sum(-1) if self.squashed else log_prob

    def entropy(self, params: torch.Tensor) -> torch.Tensor:
        """Squashed, that of the normal plus E[log tanh'(u)], which has no closed form: by quadrature."""
        mean, log_std = self._split(params)
        entropy = log_std.sum(-1) + self.dimensions * (0.5 + _LOG_SQRT_2PI)
        return entropy + _mean_log_slope(mean, log_std.exp()).sum(-1) if self.squashed else entropy

    def log_prob_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_prob(params, action), self.entropy(params)

    def kl(self, before: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Squashed, the same: tanh is one to one, so that it tells the two policies no better and no worse apart."""
        (mean_before, log_std_before), (mean, log_std) = self._split(before), self._split(params)
        narrower = log_std_before - log_std
        apart = (mean_before - mean) * torch.exp(-log_std)
        return (0.5 * (torch.expm1(2.0 * narrower) + apart.square()) - narrower).sum(-1)

    def _split(self, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and logarithms of deviations, [B, A] each."""
        mean, log_std = params.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD_RANGE) if self.state_dependent else log_std


def _log_slope(u: torch.Tensor) -> torch.Tensor:
    """log of the derivative of tanh at ``u``, log(1 - tanh²(u)) = 2 (log 2 - u - log(1 + e^-2u)): finite for any u."""
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))


def _mean_log_slope(mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """E of :func:`_log_slope` over normal u, for ``mean`` and ``std`` [B, A]: the trapezoidal rule over ±5 deviations.

    On so smooth a function its error falls exponentially with the spacing: to 1e-4 nats for deviations of 2, 0.06 for
    those of e^2. Unlike an estimate from the action, it has no noise.
    """
    z = torch.arange(-5.0, 5.25, 0.5, device=mean.device)
    weight = torch.softmax(-0.5 * z.square(), 0)
    return (weight * _log_slope(mean[..., None] + std[..., None] * z)).sum(-1)


def _entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """H = -Σ p log p, [B], of normalised ``log_probs`` [B, A]."""
    return -(log_probs.exp() * log_probs).sum(-1)


def _sum(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum of K vectors [B], in the order given."""
    return torch.stack(list(rows)).sum(0)
