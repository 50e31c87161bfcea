"""Proximal policy optimisation (Schulman et al. 2017): epochs of minibatch steps over one rollout.

What keeps the policy near the one that acted is a clipped ratio, or BatchPPO's adaptive KL penalty (Hafner et al. 2017,
TensorFlow Agents), or both. BatchPPO is this algorithm with other settings: see ``htsrl.config.BatchPPOOptions``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from htsrl.config import PPOOptions
from htsrl.learner import losses, returns
from htsrl.learner.gradient import accumulate_gradient, clip_gradient, require_finite, summary
from htsrl.learner.kl import adapted, kl_penalty
from htsrl.learner.minibatches import Batch, Rows, make_batch, per_episode, piece_rows
from htsrl.learner.moments import Moments
from htsrl.learner.optimizer import adam, load_optimizer_state, optimizer_state, set_learning_rate
from htsrl.learner.rewards import normalized
from htsrl.learner.rollout import Rollout
from htsrl.learner.schedules import learning_rate
from htsrl.models import ActorCritic, FlatParameters
from htsrl.storage.trace import mark

# What each gradient step records of its loss.
TERMS = ("total", "policy", "value", "entropy", "kl", "clip_fraction")


class PPO:
    """Adam's state, and the update that moves ``parameters`` away from those that collected a rollout.

    With them, where options ask for it, the weight of the KL penalty and the statistics of all rewards.
    """

    def __init__(self, options: PPOOptions, model: ActorCritic, parameters: FlatParameters) -> None:
        self.options = options
        self.model = model
        self.parameters = parameters
        self.optimizer = adam(parameters.vector, options.learning_rate, options.adam_eps)
        self.checks_every_step = not parameters.vector.is_cuda
        self.penalty = options.kl_penalty
        """β, of the next update."""
        self.rewards = Moments.empty(1) if options.normalize_reward else None

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
        if self.rewards is not None:
            reward, valid = rollout.reward.cpu().numpy(), rollout.valid.cpu().numpy()
            scaled = torch.from_numpy(normalized(reward, valid, options.discount, self.rewards))
            rollout = replace(rollout, reward=scaled.to(rollout.reward.device))
        batch = make_batch(rollout, options.discount, options.gae_lambda)
        if self.penalty is not None:
            batch = replace(batch, before=self._policy(batch))
        episode_rows = rows_of_episodes(rollout) if options.batched_by == "episodes" else None
        per_epoch = batch.enough_for(options.minibatches)
        size = -(-rollout.reward.numel() // options.minibatches)
        records: list[torch.Tensor] = []
        unchecked: list[Rows] = []

        for epoch in range(options.epochs if per_epoch else 0):
            # Shuffle, and deal the rows (a recurrent policy's columns) out to minibatches of one fixed size.
            mark("shuffle", epoch)
            index, weight = batch.dealt(per_epoch, size, rng)
            rows = batch.rows(index, weight if episode_rows is None else per_episode(index, weight, episode_rows))
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
        if unchecked:
            records = list(torch.stack(records).cpu())
        for step, minibatch in enumerate(unchecked):
            rows_of = partial(batch.named, minibatch)
            require_finite(records[: step + 1], TERMS, divmod(step, per_epoch), rows_of, stepped=True)
        metrics = {**summary(records, TERMS, step_size), "loss/explained_variance": batch.explained_variance}
        return metrics | (self._adapt(batch, self.penalty) if self.penalty is not None and records else {})

    def _policy(self, batch: Batch) -> torch.Tensor:
        """The policy's distribution [R, P] in every row, invalid ones too, as many at once as a pass may take."""
        size = piece_rows(self.model.row_bytes, batch.obs.device)
        with torch.no_grad():
            if batch.memory is None:
                rows = torch.arange(len(batch.action), device=batch.obs.device).split(size)
                return torch.cat([self.model(batch.obs.index_select(0, index))[0] for index in rows])
            (everything,) = batch.rows(*batch.dealt(1, len(batch.action))).minibatches()
            pieces = list(everything.pieces(size, length=batch.length))
            params = [self.model(batch.obs.index_select(0, each.index), batch.sequences(each))[0] for each in pieces]
            return torch.cat(params)[torch.cat([each.index for each in pieces]).argsort()]

    def _adapt(self, batch: Batch, penalty: float) -> dict[str, float]:
        """Fit β to how far this update has moved the policy, over all transitions; returns both.

        Both policies are this update's, at its start and its end, whatever the delayed rule then makes of the step.
        """
        options = self.options
        assert options.kl_penalty is not None
        kl = self.model.head.kl(batch.before, self._policy(batch)).cpu().numpy()
        moved = float(kl[batch.valid].mean(dtype=np.float64))
        self.penalty = adapted(penalty, moved, options.kl_penalty_target, options.kl_penalty)
        return {"loss/kl_update": moved, "loss/kl_penalty": penalty}

    def _loss(self, params: torch.Tensor, value: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Surrogate + c_v value loss - c_e entropy (Schulman et al. 2017, equations 8 and 9), and TERMS.

        The surrogate is clipped, or penalised by the divergence, or both.
        """
        options = self.options
        log_prob, entropy = self.model.head.log_prob_entropy(params, rows.action)
        log_ratio = losses.log_ratio(log_prob, rows.log_prob)
        ratio = log_ratio.exp()
        if options.clip_range is None:
            policy = losses.surrogate(ratio, rows.advantage, rows.weight)
        else:
            policy = losses.clipped_surrogate(ratio, rows.advantage, rows.weight, options.clip_range)
        error = losses.value_loss(value, rows.value_target, rows.value, rows.weight, options.clip_value)
        mean_entropy = losses.weighted_mean(entropy, rows.weight)
        total = policy + options.value_coef * error - options.entropy_coef * mean_entropy
        if self.penalty is None:
            kl = losses.approximate_kl(log_ratio.detach(), ratio.detach(), rows.weight)
        else:
            exact = self.model.head.kl(rows.before, params)
            cutoff = options.kl_cutoff * options.kl_penalty_target
            total = total + kl_penalty(exact, rows.weight, self.penalty, cutoff, options.kl_cutoff_coef)
            kl = losses.weighted_mean(exact.detach(), rows.weight)
        with torch.no_grad():
            clipped = losses.clip_fraction(ratio, rows.weight, options.clip_range)
            return total, torch.stack((total, policy, error, mean_entropy, kl, clipped))

    def state(self) -> dict[str, torch.Tensor]:
        """Adam's moments and step count, β, and the statistics of rewards; the last two where options ask for them."""
        state = optimizer_state(self.optimizer)
        if self.penalty is not None:
            state["kl_penalty"] = torch.tensor(self.penalty, dtype=torch.float64)
        if self.rewards is not None:
            state |= {f"reward/{name}": torch.from_numpy(array) for name, array in self.rewards.arrays().items()}
        return state

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what ``state`` returned; ValueError where it is none of such an algorithm."""
        rest = dict(state)
        if self.penalty is not None:
            self.penalty = loaded_penalty(rest.pop("kl_penalty", None))
        if self.rewards is not None:
            names = [name for name in rest if name.startswith("reward/")]
            self.rewards = Moments.loaded({name.removeprefix("reward/"): rest.pop(name).numpy() for name in names}, 1)
        load_optimizer_state(self.optimizer, rest)


def loaded_penalty(tensor: torch.Tensor | None) -> float:
    """β from a state; ValueError where that is none."""
    if tensor is None or (tensor.dtype, tensor.shape) != (torch.float64, ()) or not 0.0 < float(tensor) < np.inf:
        raise ValueError(f"this is no weight of a KL penalty: {tensor}")
    return float(tensor)


def rows_of_episodes(rollout: Rollout) -> np.ndarray:
    """:func:`returns.episode_rows` of every row, [T * N]."""
    flags = (rollout.terminated, rollout.truncated, rollout.valid)
    return returns.episode_rows(*(x.cpu().numpy() for x in flags)).ravel()


def _mean_kl(records: list[torch.Tensor]) -> float:
    """Mean divergence over the minibatches of ``records``."""
    return float(torch.stack(records)[:, TERMS.index("kl")].mean())
