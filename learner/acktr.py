"""ACKTR (Wu et al. 2017): actor-critic with a natural gradient by K-FAC, held in a trust region."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from htsrl.config import ACKTROptions
from htsrl.learner import kfac, losses
from htsrl.learner.gradient import accumulate_gradient, clip_norm, gradient, require_finite, summary
from htsrl.learner.minibatches import Batch, Rows, deal, make_batch
from htsrl.learner.rollout import Rollout
from htsrl.learner.schedules import learning_rate
from htsrl.models import ActorCritic, FlatParameters
from htsrl.rng import action_noise, normal
from htsrl.storage.trace import mark

# What an update records of its loss.
TERMS = ("total", "policy", "value", "entropy", "fisher_trace")

# The Fisher matrix of a normal distribution by the logarithm of its standard deviation is exactly this, whatever mean
# and deviation are, and has no entry between that and the mean: ``log_std`` needs no factors.
LOG_STD_FISHER = 2.0


class Noise(NamedTuple):
    """What the Fisher matrix is sampled with."""

    action: torch.Tensor
    """[T*N, noise_size] of the action head's kind."""
    value: torch.Tensor
    """[T*N] standard normal."""


class ACKTR:
    """The Fisher matrix's factors, the momentum, and the update that moves ``parameters`` one natural step.

    The Fisher matrix is that of policy and critic together: the critic is taken as the mean of a normal distribution of
    variance 1, whose Fisher matrix is the Gauss-Newton matrix, so that rewards far from 1 in size want a
    ``reward_scale``. Where policy and critic share no layer they are two networks: each has a gradient norm and a trust
    region of its own (section 3.1 of the paper).
    """

    def __init__(self, options: ACKTROptions, model: ActorCritic, parameters: FlatParameters) -> None:
        """ConfigError where ``model`` has layers that K-FAC doesn't know."""
        self.options = options
        self.model = model
        self.parameters = parameters
        self.blocks = kfac.make_blocks(model, parameters.parts)
        self.networks = separate_networks(model, parameters)
        self.momentum = torch.zeros_like(parameters.vector)
        """[P]: the average step, in the direction of the gradient."""
        self.updates = 0

    def update(self, rollout: Rollout, progress: float, rng: np.random.Generator) -> dict[str, float]:
        """One step on all of ``rollout``; ``progress`` in 0..1 is the used share of the step budget.

        ``rng`` draws the actions and values that the Fisher matrix is sampled with. NonFinite before anything changes
        where the loss, its gradient or the Fisher matrix is not finite.
        """
        options = self.options
        cold = self.updates < options.cold_updates
        largest = learning_rate(options.learning_rate, options.lr_schedule, progress)
        batch = make_batch(rollout, options.discount, options.gae_lambda)
        records: list[torch.Tensor] = []
        metrics: dict[str, float] = {}

        if len(batch.valid):
            rows = batch.rows(*deal(batch.valid, 1, rollout.reward.numel()))
            if options.normalize_advantage:
                rows.advantage.copy_(losses.whiten(rows.advantage, rows.weight))
            (everything,) = rows.minibatches()

            # The gradient, and in the same passes what the Fisher matrix is estimated from.
            mark("gradient", 0, 0)
            noise = self._noise(rng, len(batch.action))
            with kfac.recording(self.blocks) as tapes:
                of_parts = [partial(self._loss, tape, noise) for tape in tapes]
                terms = accumulate_gradient(self.model, self.parameters, batch, everything, of_parts)
            vector = gradient(self.parameters)
            norm = torch.linalg.vector_norm(vector)
            records.append(torch.cat((terms, torch.stack((kfac.fisher_trace(self.blocks), norm, norm)))))
            require_finite(records, TERMS, (0, 0), lambda: named(batch, everything, noise))
            norms = torch.stack([clip_norm(vector[part], options.max_grad_norm) for part in self.networks])
            records[-1][-1] = torch.linalg.vector_norm(norms[:, 1])

            mark("optimizer", 0, 0)
            # Running factors: a plain mean over the first updates, then one that forgets (Martens and Grosse 2015).
            keep = min(1.0 - 1.0 / (self.updates + 1), options.factor_decay)
            for block in self.blocks:
                kfac.average(block, keep)

            # The step: a plain gradient's while the factors are few rows' work, then the natural gradient's.
            if cold:
                vector.mul_(options.cold_learning_rate)
            else:
                if (self.updates - options.cold_updates) % options.kfac_interval == 0:
                    for block in self.blocks:
                        kfac.decompose(block)
                metrics = self._natural_step(vector, largest)

            # Its application, averaged with those before it: of steps inside the trust region the mean is, too.
            self.momentum.mul_(options.momentum).add_(vector, alpha=1.0 - options.momentum)
            self.parameters.vector.sub_(self.momentum)
            self.updates += 1

        mark("summary")
        metrics |= summary(records, TERMS, options.cold_learning_rate if cold else largest)
        return metrics | {"loss/explained_variance": batch.explained_variance}

    def _noise(self, rng: np.random.Generator, rows: int) -> Noise:
        """Noise for an action [T*N, noise_size] and a value [T*N] of every row of a batch, drawn on the host."""
        head, device = self.model.head, self.parameters.vector.device
        return Noise(
            action=torch.from_numpy(action_noise(head.noise_kind, rng, (rows, head.noise_size))).to(device),
            value=torch.from_numpy(normal(rng, (rows,))).to(device),
        )

    def _loss(
        self,
        tape: kfac.Tape,
        noise: Noise,
        params: torch.Tensor,
        value: torch.Tensor,
        rows: Rows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Policy gradient loss + c_v value loss - c_e entropy, and TERMS but the last; adds to the Fisher's moments."""
        options, head = self.options, self.model.head

        # log p of an action and a value that the network itself might have given: log π(a|s) and log N(v; V(s), 1)
        action = head.sample(params.detach(), noise.action[rows.index])
        drawn = value.detach() + noise.value[rows.index]
        log_likelihood = head.log_prob(params, action).sum() - 0.5 * (value - drawn).square().sum()
        tape.add_moments(log_likelihood, rows.weight)

        log_prob, entropy = head.log_prob_entropy(params, rows.action)
        policy = losses.policy_gradient(log_prob, rows.advantage, rows.weight)
        error = losses.value_loss(value, rows.value_target, rows.value, rows.weight)
        mean_entropy = losses.weighted_mean(entropy, rows.weight)
        total = policy + options.value_coef * error - options.entropy_coef * mean_entropy
        return total, torch.stack((total, policy, error, mean_entropy)).detach()

    def _natural_step(self, vector: torch.Tensor, largest: float) -> dict[str, float]:
        """Turn the gradient ``vector`` [P] into the step of each network; returns metrics."""
        options = self.options
        plain = vector.clone()
        for block in self.blocks:
            kfac.precondition(block, options.damping)
        log_std = self.model.log_std
        if log_std is not None:
            assert log_std.grad is not None
            log_std.grad.div_(LOG_STD_FISHER + options.damping)

        metrics = {}
        for part, name in zip(self.networks, ("step_size", "critic_step_size"), strict=False):
            size = step_size(float(vector[part] @ plain[part]), largest, options.kl_clip)
            vector[part].mul_(size)
            metrics[f"loss/{name}"] = size
        return metrics

    def state(self) -> dict[str, torch.Tensor]:
        """The factors and their decompositions, the momentum and the number of updates."""
        state = {name: tensor.clone() for block in self.blocks for name, tensor in block.kept().items()}
        return state | {"momentum": self.momentum.clone(), "updates": torch.tensor(self.updates)}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what ``state`` returned."""
        for block in self.blocks:
            for name, tensor in block.kept().items():
                tensor.copy_(state[name])
        self.momentum.copy_(state["momentum"])
        self.updates = int(state["updates"])


def named(batch: Batch, rows: Rows, noise: Noise) -> dict[str, torch.Tensor]:
    """The columns of ``rows`` [M] by name, with their observations and noise."""
    return batch.named(rows) | {"action_noise": noise.action[rows.index], "value_noise": noise.value[rows.index]}


def separate_networks(model: ActorCritic, parameters: FlatParameters) -> list[slice]:
    """Where policy and critic stand in the vector of ``parameters``; one slice if they share a layer."""
    if any(True for _ in model.trunk.parameters()):
        return [slice(0, len(parameters))]
    critic = len(parameters) - sum(p.numel() for p in model.value.parameters())  # 'value' is last in name order
    return [slice(0, critic), slice(critic, len(parameters))]


def step_size(squared_length: float, largest: float, kl_clip: float) -> float:
    """η = min(largest, √(2 δ / v·(F + λ)v)) (Wu et al. 2017, section 3.2), with δ = ``kl_clip``.

    To second order the step η v changes the distribution by ½ η² v·Fv ≤ δ nats. The damping λ is counted, which bounds
    the step where F knows no curvature: |η v|² ≤ 2 δ / λ.

    Args:
        squared_length: v·(F + λ)v, which is v·g for the natural gradient v = (F + λ)⁻¹ g.
    """
    bound = 2.0 * kl_clip
    return largest if squared_length * largest**2 <= bound else (bound / squared_length) ** 0.5
