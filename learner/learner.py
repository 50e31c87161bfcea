"""The learner: turns a full storage into new parameters. It asserts the policy lag instead of trusting a comment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.errors import NonFinite
from htsrl.learner import make_algorithm
from htsrl.learner.allocator import keep_freed_memory
from htsrl.learner.delayed import delayed_update, update_at_newest
from htsrl.learner.moments import Moments
from htsrl.learner.rollout import Memory, Rollout
from htsrl.learner.stacks import Stacks
from htsrl.models import build_model
from htsrl.models.flat import FlatParameters
from htsrl.rng import Stream, generator
from htsrl.storage.episodes import begins_after
from htsrl.storage.observations import is_stacked
from htsrl.storage.trace import mark


class Learner:
    """Parameters, the algorithm, and the rule that joins its updates to the newest parameters.

    ``version`` counts published parameters: θ_version is the newest. Under 'hts', interval j runs with θ_j while the
    learner makes θ_{j+1} from D_{j-1}, which θ_{j-1} collected: a lag of 1. Under 'sync' the lag is 0. Under 'async' it
    differs from row to row, is measured, and the update starts at the newest parameters; so it does under 'hts' with
    delay 'importance'.
    """

    def __init__(self, config: AnyConfig, spec: EnvSpec, device: torch.device) -> None:
        keep_freed_memory()
        self.device = device
        self.seed = config.seed
        self.num_envs = config.runtime.num_envs
        self.lag = 1 if config.runtime.schedule == "hts" else 0
        self.lag_varies = config.runtime.schedule == "async"
        self.starts_behind = self.lag == 1 and config.runtime.delay == "gradient"
        self.model = build_model(spec, config.network, config.seed).to(device)
        threads = config.runtime.learner_threads
        shards = threads if device.type == "cpu" and threads != "auto" else 1
        self.parameters = FlatParameters(self.model, shards=shards)
        self.algorithm = make_algorithm(config, self.model, self.parameters)
        self.moments = Moments.empty(math.prod(spec.observation_shape)) if config.network.normalize_obs else None
        """Of all observations that were learned from, if the policy normalises them."""
        self.version = 0
        self.newest = self.parameters.state.clone()
        """θ_version [P + S], with the normalisation of observations that it is used with."""
        self.behaviour = self.newest.clone()
        """θ_{version - lag} [P + S]: collected the storage that is learned from next."""

    def warm_up(self) -> None:
        """The first interval has nothing to learn from: θ_1 = θ_0."""
        if self.lag:
            self.version += 1

    def start_from(self, tensors: Callable[[str], dict[str, np.ndarray]]) -> None:
        """Use ``tensors("parameters")`` as θ_0, and go on counting the observations of ``tensors("moments")``."""
        self.parameters.load(tensors("parameters"))
        self.newest = self.behaviour = self.parameters.state.clone()
        self._load_moments(tensors("moments"))

    def learn(self, storage: Any, progress: float) -> dict[str, float]:
        """Make θ_{version+1} from one full storage; returns the algorithm's metrics.

        Args:
            storage: views of the rollout fields, all T rows written.
            progress: share of the step budget that was spent before this storage was filled, in [0, 1].

        Raises:
            NonFinite: a loss or gradient is; it carries the minibatch and this learner's state.
        """
        policy_lag = self._policy_lag(storage)
        metrics: dict[str, float] = {}
        start = self.behaviour if self.starts_behind else self.newest

        self.parameters.state.copy_(self.behaviour)
        rollout = self._rollout(storage)

        def update() -> None:
            rng = generator(self.seed, Stream.MINIBATCH, self.version - self.lag)
            metrics.update(self.algorithm.update(rollout, progress, rng))

        try:
            if self.starts_behind:
                after = delayed_update(self.newest, self.behaviour, self.parameters.state, update)
            else:
                after = update_at_newest(self.newest, self.parameters.state, update)
            self.behaviour, self.newest = (self.newest if self.lag else after), after
        except NonFinite as failure:
            failure.numbers |= {"interval": self.version - self.lag, "progress": progress}
            failure.tensors |= self._evidence(failure, start)
            raise
        self.version += 1
        self._count_observations(storage)
        return metrics | {"policy_lag": policy_lag}

    def _count_observations(self, storage: Any) -> None:
        """Give θ_version the normalisation by all observations so far, those of ``storage`` included.

        The storage's values and probabilities, bootstrap values too, are of the normalisation that came with the
        behaviour parameters, for all rows alike; so are the gradients of an update that starts at those.
        """
        if self.moments is not None:
            rows = storage.obs[:-1][storage.valid]
            self.moments.add(rows.reshape(len(rows), -1))
            constants = np.concatenate(self.moments.centre_and_scale())
            self.newest[len(self.parameters.vector) :] = torch.from_numpy(constants)

    def _policy_lag(self, storage: Any) -> float:
        """Updates between the parameters that acted and those that learn; the mean where that varies."""
        if self.lag_varies:
            lags = (self.version - storage.behaviour_version)[storage.valid]  # of [T, N]
            assert (lags >= 0).all(), "parameters acted before they were published"
            return float(lags.mean()) if len(lags) else 0.0
        (lag,) = (self.version - storage.behaviour_version).tolist()
        assert lag == self.lag, f"policy lag is {lag}, but this schedule's is {self.lag}"
        return lag

    def interrupt_with(self, check: Callable[[], None]) -> None:
        """Call ``check`` before every forward pass of the learner: what it raises ends an update of any length."""
        self.model.register_forward_pre_hook(lambda *_: check())

    def named(self, vector: torch.Tensor) -> dict[str, np.ndarray]:
        """The parameters of ``vector`` [P + S] by name. Overwrites the model's, which every update sets anew."""
        self.parameters.state.copy_(vector)
        return dict(self.parameters.items())

    def tensors(self) -> dict[str, np.ndarray]:
        """Everything that a checkpoint must hold of the learner, by name."""
        return {
            **{f"parameters/{name}": array for name, array in self.named(self.newest).items()},
            **{f"behaviour/{name}": array for name, array in self.named(self.behaviour).items()},
            **{f"algorithm/{name}": tensor.cpu().numpy() for name, tensor in self.algorithm.state().items()},
            **{f"moments/{name}": array for name, array in (self.moments.arrays() if self.moments else {}).items()},
        }

    def restore(self, tensors: Callable[[str], dict[str, np.ndarray]], version: int) -> None:
        """Continue from ``tensors("parameters")``, ``"behaviour"``, ``"algorithm"``, ``"moments"`` of a checkpoint."""
        self.parameters.load(tensors("behaviour"))
        self.behaviour = self.parameters.state.clone()
        self.parameters.load(tensors("parameters"))
        self.newest = self.parameters.state.clone()
        self.algorithm.load_state({name: torch.from_numpy(a) for name, a in tensors("algorithm").items()})
        self._load_moments(tensors("moments"))
        self.version = version

    def _load_moments(self, arrays: dict[str, np.ndarray]) -> None:
        if self.moments is not None:
            self.moments = Moments.loaded(arrays, len(self.moments.mean))

    def _evidence(self, failure: NonFinite, start: torch.Tensor) -> dict[str, np.ndarray]:
        """What ``failure`` lacks: where its rows stand, and the state of an update that began at ``start`` [P + S].

        After a step with a gradient that is not finite the state is worthless, and all of it but ``start`` left out.
        """
        t, n = np.divmod(failure.tensors["minibatch/index"], self.num_envs)
        tensors = {"minibatch/t": t, "minibatch/n": n}
        if not failure.numbers["stepped"]:
            tensors |= {
                **{f"gradient/{name}": array for name, array in self.parameters.gradients()},
                **{f"parameters/{name}": array for name, array in self.parameters.items()},
                **{f"algorithm/{name}": tensor.cpu().numpy() for name, tensor in self.algorithm.state().items()},
            }
        return tensors | {f"behaviour/{name}": array for name, array in self.named(start).items()}

    def _rollout(self, storage: Any) -> Rollout:
        """The storage as tensors on this device; the last value row is made here, with the behaviour parameters."""
        mark("returns")

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        obs = Stacks(storage, self.device) if is_stacked(storage) else tensor(storage.obs)
        T, N = storage.reward.shape
        memory = None
        last_state: tuple[torch.Tensor, ...] = ()
        if self.model.state_size:
            begins = np.zeros((T + 1, N), np.bool_)
            begins[1:] = begins_after(storage, np.s_[:])
            memory = Memory(tensor(storage.state[0]), begins)
            last_state = (tensor(storage.state[-1]),)
        last_rows = tensor(np.arange(T * N, (T + 1) * N))
        last_obs = obs.index_select(0, last_rows) if isinstance(obs, Stacks) else obs[-1]
        with torch.inference_mode():
            _, bootstrap, *_ = self.model.step(last_obs, *last_state)
        return Rollout(
            obs=obs,
            action=tensor(storage.action),
            log_prob=tensor(storage.log_prob),
            value=torch.cat([tensor(storage.value), bootstrap[None]]),
            reward=tensor(storage.reward),
            terminated=tensor(storage.terminated).float(),
            truncated=tensor(storage.truncated).float(),
            valid=tensor(storage.valid).float(),
            memory=memory,
        )
