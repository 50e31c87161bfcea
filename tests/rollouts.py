"""Small rollouts and networks for the tests of the learner's maths."""

from __future__ import annotations

import numpy as np
import torch

from htsrl.config import NetworkOptions
from htsrl.envs.spec import ActionSpec, EnvSpec
from htsrl.learner.rollout import Rollout
from htsrl.models import ActorCritic, FlatParameters, build_model

# On tensors this small a second thread only waits, and on a busy machine for milliseconds.
torch.set_num_threads(1)

DISCRETE = ActionSpec("discrete", nvec=(3,))
MULTI = ActionSpec("multi_discrete", nvec=(3, 2), shape=(2,))
BINARY = ActionSpec("multi_binary", nvec=(2, 2, 2), shape=(3,))
BOX = ActionSpec("box", low=(-1.0, -1.0), high=(1.0, 1.0), shape=(2,))


def vector_spec(action: ActionSpec = DISCRETE, size: int = 4) -> EnvSpec:
    return EnvSpec("test", "gymnasium", (size,), np.dtype(np.float32), "vector", action)


def image_spec(*shape: int, action: ActionSpec = DISCRETE) -> EnvSpec:
    return EnvSpec("test", "atari", shape, np.dtype(np.uint8), "image", action)


def network(spec: EnvSpec, seed: int = 0, **options) -> tuple[ActorCritic, FlatParameters]:
    model = build_model(spec, NetworkOptions(**options), seed)
    return model, FlatParameters(model)


def rollout(spec: EnvSpec, model: ActorCritic, steps: int = 8, replicas: int = 4, seed: int = 0) -> Rollout:
    """Random observations and rewards; actions, log-probabilities and values as ``model`` would give them."""
    rng = np.random.default_rng(seed)
    shape = (steps + 1, replicas, *spec.observation_shape)
    if spec.observation_kind == "image":
        obs = torch.from_numpy(rng.integers(0, 256, shape, np.uint8))
    else:
        obs = torch.from_numpy(rng.standard_normal(shape, np.float32))
    head = model.head
    noise = torch.from_numpy(rng.gumbel(size=(steps * replicas, head.noise_size)).astype(np.float32))
    with torch.no_grad():
        params, value = model(obs.flatten(0, 1))
        params = params[: steps * replicas]
        action = head.sample(params, noise)
        log_prob = head.log_prob(params, action)
    truncated = (rng.random((steps, replicas)) < 0.1).astype(np.float32)
    valid = np.ones((steps, replicas), np.float32)
    valid[1:] = 1.0 - truncated[:-1]
    truncated *= valid
    valid[1:] = 1.0 - truncated[:-1]
    terminated = ((rng.random((steps, replicas)) < 0.1) * valid * (1.0 - truncated)).astype(np.float32)
    return Rollout(
        obs=obs,
        action=action.unflatten(0, (steps, replicas)),
        log_prob=log_prob.view(steps, replicas),
        value=value.view(steps + 1, replicas),
        reward=torch.from_numpy(rng.standard_normal((steps, replicas), np.float32)),
        terminated=torch.from_numpy(terminated),
        truncated=torch.from_numpy(truncated),
        valid=torch.from_numpy(valid),
    )
