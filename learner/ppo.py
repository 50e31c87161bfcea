"""Proximal policy optimisation (Schulman et al. 2017): epochs of clipped minibatch steps over one rollout."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from htsrl.config import PPOOptions
from htsrl.learner import losses
from htsrl.learner.gradient import accumulate_gradient, clip_gradient, require_finite, summary
from htsrl.learner.minibatches import Rows, deal, make_batch
from htsrl.learner.optimizer import adam, load_optimizer_state, optimizer_state, set_learning_rate
from htsrl.learner.rollout import Rollout
from htsrl.learner.schedules import learning_rate
from htsrl.models import ActorCritic, FlatParameters
from htsrl.storage.trace import mark

# What each gradient step records of its loss.
TERMS = ("total", "policy", "value", "entropy", "kl", "clip_fraction")


class PPO:
    """Adam's state, and the update that moves ``parameters`` away from those that collected a rollout."""

    def __init__(self, options: PPOOptions, model: ActorCritic, parameters: FlatParameters) -> None:
        self.options = options
        self.model = model
        self.parameters = parameters
        self.optimizer = adam(parameters.vector, options.learning_rate, options.adam_eps)
        self.checks_every_step = not parameters.vector.is_cuda

    def update(self, rollout: Rollout, progress: float, rng: np.random.Generator) -> dict[str, float]:
        """All epochs' gradient steps on ``rollout``; ``progress`` in 0..1 is the used share of the step budget.

        Returns means over the gradient steps. NonFinite where a loss or gradient is not finite: on the CPU before the
        optimizer's step. On a GPU looking at every step would stall it, so there it is after the last step, and the
        parameters must be thrown away.
        """
        options = self.options
        step_size = learning_rate(options.learning_rate, options.lr_schedule, progress)
        set_learning_rate(self.optimizer, step_size)

        # Advantages and value targets, once, from the values that the behaviour parameters gave.
        batch = make_batch(rollout, options.discount, options.gae_lambda)
        per_epoch = min(options.minibatches, len(batch.valid))
        size = -(-rollout.reward.numel() // options.minibatches)
        records: list[torch.Tensor] = []
        unchecked: list[Rows] = []

        for epoch in range(options.epochs if per_epoch else 0):
            # Shuffle, and deal the rows out to minibatches of one fixed size.
            mark("shuffle", epoch)
            rows = batch.rows(*deal(rng.permutation(batch.valid), per_epoch, size))
            if options.normalize_advantage:
                rows.advantage.copy_(losses.whiten(rows.advantage, rows.weight))

            for number, minibatch in enumerate(rows.minibatches()):
                # The gradient, clipped in every minibatch over all parameters together.
                mark("gradient", epoch, number)
                terms = accumulate_gradient(self.model, self.parameters, batch, minibatch, self._loss)
                norms = clip_gradient(self.parameters, options.max_grad_norm)
                records.append(torch.cat((terms, norms)))
                if self.checks_every_step:
                    require_finite(records, TERMS, (epoch, number), partial(batch.named, minibatch))
                else:
                    unchecked.append(minibatch)

                # Its application.
                mark("optimizer", epoch, number)
                self.optimizer.step()

            # Stop where the policy has moved too far from the one that acted.
            if options.target_kl is not None and _mean_kl(records[-per_epoch:]) > 1.5 * options.target_kl:
                break

        mark("summary")
        table = torch.stack(records).cpu() if records else torch.zeros(0, len(TERMS) + 2)
        for step, minibatch in enumerate(unchecked):
            rows_of = partial(batch.named, minibatch)
            require_finite(list(table[: step + 1]), TERMS, divmod(step, per_epoch), rows_of, stepped=True)
        return {**summary(table, TERMS, step_size), "loss/explained_variance": batch.explained_variance}

    def _loss(self, params: torch.Tensor, value: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Clipped surrogate + c_v value loss - c_e entropy (Schulman et al. 2017, equation 9), and TERMS."""
        options = self.options
        log_prob, entropy = self.model.head.log_prob_entropy(params, rows.action)
        log_ratio = losses.log_ratio(log_prob, rows.log_prob)
        ratio = log_ratio.exp()
        policy = losses.clipped_surrogate(ratio, rows.advantage, rows.weight, options.clip_range)
        error = losses.value_loss(value, rows.value_target, rows.value, rows.weight, options.clip_value)
        mean_entropy = losses.weighted_mean(entropy, rows.weight)
        total = policy + options.value_coef * error - options.entropy_coef * mean_entropy
        with torch.no_grad():
            kl = losses.approximate_kl(log_ratio, ratio, rows.weight)
            clipped = losses.clip_fraction(ratio, rows.weight, options.clip_range)
            return total, torch.stack((total, policy, error, mean_entropy, kl, clipped))

    def state(self) -> dict[str, torch.Tensor]:
        """Adam's moments and step count."""
        return optimizer_state(self.optimizer)

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what ``state`` returned."""
        load_optimizer_state(self.optimizer, state)


def _mean_kl(records: list[torch.Tensor]) -> float:
    """Mean divergence over the minibatches of ``records``."""
    return float(torch.stack(records)[:, TERMS.index("kl")].mean())
