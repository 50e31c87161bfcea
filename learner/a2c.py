"""Advantage actor-critic (Mnih et al. 2016), synchronous: one gradient step over one rollout."""

from __future__ import annotations

import numpy as np
import torch

from htsrl.config import A2COptions
from htsrl.learner import losses
from htsrl.learner.gradient import accumulate_gradient, clip_gradient, require_finite, summary
from htsrl.learner.minibatches import Rows, make_batch
from htsrl.learner.optimizer import load_optimizer_state, optimizer_state, rmsprop_or_adam, set_learning_rate
from htsrl.learner.rollout import Rollout
from htsrl.learner.schedules import learning_rate
from htsrl.models import ActorCritic, FlatParameters
from htsrl.storage.trace import mark

# What a gradient step records of its loss.
TERMS = ("total", "policy", "value", "entropy")


class A2C:
    """The optimizer's state, and the update that moves ``parameters`` one step from those that collected a rollout.

    With ``importance``, from others: the policy gradient is then weighted by the probability ratio between the two.
    """

    def __init__(
        self, options: A2COptions, model: ActorCritic, parameters: FlatParameters, importance: bool = False
    ) -> None:
        self.options = options
        self.importance = importance
        self.model = model
        self.parameters = parameters
        self.optimizer = rmsprop_or_adam(parameters.vector, options)

    def update(self, rollout: Rollout, progress: float, rng: np.random.Generator) -> dict[str, float]:
        """One gradient step on all of ``rollout``; ``progress`` in 0..1 is the used share of the step budget.

        ``rng`` is every algorithm's argument; nothing is drawn here. NonFinite before the step where the loss or its
        gradient is not finite.
        """
        options = self.options
        step_size = learning_rate(options.learning_rate, options.lr_schedule, progress)
        set_learning_rate(self.optimizer, step_size)

        # Advantages and value targets from the values that the behaviour parameters gave.
        batch = make_batch(rollout, options.discount, options.gae_lambda)
        records: list[torch.Tensor] = []

        if len(batch.valid):
            rows = batch.rows(*batch.dealt(1, rollout.reward.numel()))
            if options.normalize_advantage:
                rows.advantage.copy_(losses.whiten(rows.advantage, rows.weight))
            (everything,) = rows.minibatches()

            # The gradient, clipped over all parameters together.
            mark("gradient", 0, 0)
            terms = accumulate_gradient(self.model, self.parameters, batch, everything, self._loss)
            norms = clip_gradient(self.parameters, options.max_grad_norm)
            records.append(torch.cat((terms, norms)))
            require_finite(records, TERMS, (0, 0), lambda: batch.named(everything))

            # Its application.
            mark("optimizer", 0, 0)
            self.optimizer.step()

        mark("summary")
        return {**summary(records, TERMS, step_size), "loss/explained_variance": batch.explained_variance}

    def _loss(self, params: torch.Tensor, value: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Policy gradient loss + c_v value loss - c_e entropy, and TERMS."""
        options = self.options
        log_prob, entropy = self.model.head.log_prob_entropy(params, rows.action)
        if self.importance:
            ratio = losses.log_ratio(log_prob, rows.log_prob).exp()
            policy = losses.importance_weighted(ratio, rows.advantage, rows.weight)
        else:
            policy = losses.policy_gradient(log_prob, rows.advantage, rows.weight)
        error = losses.value_loss(value, rows.value_target, rows.value, rows.weight)
        mean_entropy = losses.weighted_mean(entropy, rows.weight)
        total = policy + options.value_coef * error - options.entropy_coef * mean_entropy
        return total, torch.stack((total, policy, error, mean_entropy)).detach()

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's moments and step count."""
        return optimizer_state(self.optimizer)

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what ``state`` returned."""
        load_optimizer_state(self.optimizer, state)
