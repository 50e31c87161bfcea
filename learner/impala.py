"""IMPALA (Espeholt et al. 2018): V-trace actor-critic, one pass over a rollout that any earlier policy collected.

Values and log-probabilities are those of the parameters that learn, from the same forward pass that is differentiated:
what the acting policy's critic said plays no part. A sequence is never torn apart, so minibatches, and the pieces in
which a large one is computed, are whole columns of the rollout.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import numpy as np
import torch

from htsrl.config import IMPALAOptions
from htsrl.learner import losses, returns
from htsrl.learner.gradient import clip_gradient, gradient, require_finite, summary
from htsrl.learner.minibatches import piece_rows
from htsrl.learner.optimizer import load_optimizer_state, optimizer_state, rmsprop_or_adam, set_learning_rate
from htsrl.learner.rollout import Rollout
from htsrl.learner.schedules import learning_rate
from htsrl.models import ActorCritic, FlatParameters
from htsrl.storage.trace import mark

# What a gradient step records of its loss.
TERMS = ("total", "policy", "value", "entropy", "kl", "rho")


# Reward, discount, trace and validity on the host, [T, N] float32 each: what V-trace needs beside ratios and values.
Host = tuple[np.ndarray, ...]


class IMPALA:
    """The optimizer's state, and the update that moves ``parameters`` by what a rollout of any earlier policy says."""

    def __init__(self, options: IMPALAOptions, model: ActorCritic, parameters: FlatParameters) -> None:
        self.options = options
        self.model = model
        self.parameters = parameters
        self.optimizer = rmsprop_or_adam(parameters.vector, options)

    def update(self, rollout: Rollout, progress: float, rng: np.random.Generator) -> dict[str, float]:
        """One gradient step per minibatch of replicas; ``progress`` in 0..1 is the used share of the step budget.

        Returns means over the gradient steps. NonFinite before the step where the loss or its gradient is not finite.
        """
        options = self.options
        step_size = learning_rate(options.learning_rate, options.lr_schedule, progress)
        set_learning_rate(self.optimizer, step_size)

        # Deal the replicas out to minibatches
        reward, terminated, truncated, valid = (
            x.cpu().numpy() for x in (rollout.reward, rollout.terminated, rollout.truncated, rollout.valid)
        )
        host = (reward, *returns.end_factors(options.discount, terminated, truncated), valid)
        replicas = np.arange(reward.shape[1])
        if options.minibatches > 1:
            replicas = rng.permutation(replicas)
        records: list[torch.Tensor] = []
        learned: list[Host] = []

        for number, chosen in enumerate(np.split(replicas, options.minibatches)):
            rows = float(valid[:, chosen].sum())
            if not rows:
                continue

            # The gradient, piece by piece, clipped over all parameters together
            mark("gradient", 0, number)
            gradient(self.parameters).zero_()
            terms = []
            for piece in self._pieces(rollout, chosen):
                total, piece_terms, targets = self._loss(rollout, host, piece, rows)
                total.backward()
                terms.append(piece_terms)
                learned.append(targets)
            norms = clip_gradient(self.parameters, options.max_grad_norm)
            records.append(torch.cat((torch.stack(terms).sum(0), norms)))
            require_finite(records, TERMS, (0, number), partial(named, rollout, chosen))

            # Its application
            mark("optimizer", 0, number)
            self.optimizer.step()

        mark("summary")
        return {**summary(records, TERMS, step_size), "loss/explained_variance": explained_variance(learned)}

    def _pieces(self, rollout: Rollout, chosen: np.ndarray) -> list[np.ndarray]:
        """The columns ``chosen`` [C], as many at once as a forward and backward pass may take; at least one."""
        size = max(1, piece_rows(self.model.row_bytes, rollout.obs.device) // len(rollout.value))
        return np.array_split(chosen, -(-len(chosen) // size))

    def _loss(
        self, rollout: Rollout, host: Host, chosen: np.ndarray, rows: float
    ) -> tuple[torch.Tensor, torch.Tensor, Host]:
        """Policy gradient loss + c_v value loss - c_e entropy of the columns ``chosen`` [C], and TERMS.

        All are sums over rows, divided by ``rows``: the transitions of the whole minibatch. The third result is what
        was learned: targets, values and validity [T, C].
        """
        options = self.options
        T, C = len(rollout.reward), len(chosen)
        take = torch.from_numpy(chosen).to(rollout.obs.device)
        action, behaviour_log_prob, behaviour_value, valid = (
            x.index_select(1, take).flatten(0, 1)
            for x in (rollout.action, rollout.log_prob, rollout.value[:-1], rollout.valid)
        )

        # One forward pass over obs[0] to obs[T]; the last row's policy is not asked for
        sequences = None if rollout.memory is None else rollout.memory.sequences(chosen, T + 1)
        params, value = self.model(rollout.obs_rows.index_select(0, rows_of(chosen, T + 1, rollout)), sequences)
        log_prob, entropy = self.model.head.log_prob_entropy(params[: T * C], action)
        log_ratio = losses.log_ratio(log_prob.detach(), behaviour_log_prob)

        # V-trace on the host, where its recursion costs less than its kernels' starts
        with np.errstate(invalid="ignore", over="ignore"):  # the check of the loss tells about them
            reward, discount, trace, host_valid = (x[:, chosen] for x in host)
            host_value = value.detach().view(T + 1, C).cpu().numpy()
            target, advantage = returns.vtrace(
                reward, discount, trace, host_valid, host_value, log_ratio.view(T, C).cpu().numpy(),
                options.gae_lambda, options.rho_clip, options.c_clip,
            )  # fmt: skip

        weight = valid / rows
        target_rows, advantage_rows = (torch.from_numpy(x.ravel()).to(take.device) for x in (target, advantage))
        policy = losses.policy_gradient(log_prob, advantage_rows, weight)
        error = losses.value_loss(value[: T * C], target_rows, behaviour_value, weight)
        mean_entropy = losses.weighted_mean(entropy, weight)
        total = policy + options.value_coef * error - options.entropy_coef * mean_entropy
        with torch.no_grad():
            ratio = log_ratio.exp()
            kl = losses.approximate_kl(log_ratio, ratio, weight)
            rho = losses.weighted_mean(ratio.clamp(max=options.rho_clip), weight)
            terms = torch.stack((total, policy, error, mean_entropy, kl, rho))
        return total, terms, (target, host_value[:-1], host_valid)

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's moments and step count."""
        return optimizer_state(self.optimizer)

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what ``state`` returned."""
        load_optimizer_state(self.optimizer, state)


def explained_variance(learned: list[Host]) -> float:
    """:func:`returns.explained_variance` over (target, value, valid) [T, C] of every piece."""
    if not learned:
        return 0.0
    return returns.explained_variance(*(np.concatenate(columns, axis=1) for columns in zip(*learned, strict=True)))


def named(rollout: Rollout, chosen: np.ndarray) -> dict[str, torch.Tensor]:
    """The rows [M, ...] of the columns ``chosen`` [C] by name; ``index`` is t * N + n of each."""
    T = len(rollout.reward)
    index = rows_of(chosen, T, rollout)
    columns = {each.name: getattr(rollout, each.name) for each in fields(rollout) if each.name not in ("obs", "memory")}
    rows = {name: column[:T].flatten(0, 1)[index] for name, column in columns.items()}
    rows |= {"index": index, "obs": rollout.obs_rows.index_select(0, index)}
    return rows if rollout.memory is None else rows | rollout.memory.sequences(chosen, T).named()


def rows_of(chosen: np.ndarray, steps: int, rollout: Rollout) -> torch.Tensor:
    """t * N + n of the first ``steps`` rows of the columns ``chosen`` [C], in (step, column) order: [steps * C]."""
    index = np.arange(steps)[:, None] * rollout.reward.shape[1] + chosen
    return torch.from_numpy(index.ravel()).to(rollout.obs.device)
