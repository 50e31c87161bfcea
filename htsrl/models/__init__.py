"""Models: ``build_model`` makes the policy and value network that a run trains."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from htsrl.config import NetworkOptions
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError
from htsrl.models.custom import custom_network
from htsrl.models.flat import FlatParameters
from htsrl.models.heads import Head, make_head
from htsrl.models.networks import ActorCritic, blank_observations, impala_cnn, mlp, nature_cnn, widest_row
from htsrl.models.normalize import Normalize
from htsrl.models.packed import packed_network, unpack
from htsrl.rng import Stream, generator, torch_generator

__all__ = ["ActorCritic", "FlatParameters", "Head", "build_model", "make_head", "unpack"]


def build_model(spec: EnvSpec, options: NetworkOptions, seed: int) -> ActorCritic:
    """The network of ``options`` for the observations and actions of ``spec``, on the CPU, float32.

    Initial parameters depend on ``seed`` and nothing else. A network that can't read the observations is a ConfigError.
    """
    build = _choose(spec, options)
    refuse_unfit_actions(spec, options)
    # Orthogonal matrices come from LAPACK, whose bits depend on the number of threads: parameters must not.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = build(spec, make_head(spec.action, options), options, torch_generator(seed, Stream.INITIALISATION))
        model.bf16 = options.precision == "bf16"
        model.normalize = Normalize(spec.observation_shape) if options.normalize_obs else None
        model.mask = None if spec.mask is None else spec.mask.bytes
        model.blank = blank_observations(spec)
        model.row_bytes = widest_row(model, model.blank)
        if model.bf16:
            exact = options.model_copy(update={"precision": "float32"})
            twin = build(spec, make_head(spec.action, exact), exact, torch_generator(seed, Stream.INITIALISATION))
            refuse_wrong_kernels(spec, model, twin)
    finally:
        torch.set_num_threads(threads)
    return model


def _choose(spec: EnvSpec, options: NetworkOptions) -> Callable[..., ActorCritic]:
    """The function that builds the network; 'auto' goes by the observations."""
    image, packed = spec.has_images, spec.observation_kind == "packed"
    if options.precision == "bf16" and packed:
        raise ConfigError(
            f"precision bf16 is for observations that are one image, and those of {spec.env_id} have parts: use float32"
        )
    if options.precision == "bf16" and not image and ":" not in options.network:
        raise ConfigError(
            f"precision bf16 pays for networks that read images, and the observations of {spec.env_id} are vectors: "
            "use float32"
        )
    if options.normalize_obs and spec.observation_kind != "vector":
        raise ConfigError(
            f"normalize_obs is for observations that are vectors, and those of {spec.env_id} are not: use "
            "--no-normalize-obs"
        )
    if ":" in options.network:
        return custom_network
    if options.network != "auto" and (options.network == "mlp") == image:
        shape = "x".join(map(str, spec.observation_shape))
        reads, fits = ("images", "'nature', 'football' or 'impala'") if image else ("vectors", "'mlp'")
        which = f"have {reads} among their parts" if packed else f"are {reads} of shape {shape}"
        raise ConfigError(
            f"network '{options.network}' can't read the observations of {spec.env_id}, which {which}: use {fits}"
        )
    if not image:
        return mlp
    if packed:
        return packed_network
    return impala_cnn if options.network == "impala" else nature_cnn


def refuse_unfit_actions(spec: EnvSpec, options: NetworkOptions) -> None:
    """ConfigError where ``options`` ask of the actions of ``spec`` what they can't have."""
    action = spec.action
    for name in ("squash_actions", "state_dependent_std"):
        if getattr(options, name) and action.kind != "box":
            raise ConfigError(
                f"{name} is for continuous (Box) actions, and those of {spec.env_id} are {action.kind}: leave it out"
            )
    bounded = all(-math.inf < low < high < math.inf for low, high in zip(action.low, action.high, strict=True))
    if options.squash_actions and not bounded:
        raise ConfigError(
            f"squash_actions brings actions between their bounds, and not all of those of {spec.env_id} are finite and "
            "apart: leave it out"
        )


def refuse_wrong_kernels(spec: EnvSpec, model: ActorCritic, exact: ActorCritic) -> None:
    """ConfigError where bfloat16 gives ``model`` other answers than float32 gives ``exact``, far beyond rounding.

    Such kernels exist (see :class:`htsrl.models.networks.BlockConv`), and a policy learns from their answers, badly.
    """
    rng, shape = generator(0, Stream.PROBE), (8, *spec.observation_shape)
    bytes_ = spec.observation_dtype == np.uint8
    # Not sparse ones where observations are: so few numbers don't average a deep network's rounding out
    obs = torch.from_numpy(rng.integers(0, 256, shape, np.uint8) if bytes_ else rng.random(shape, np.float32))
    answers = []
    for each in (model, exact):
        params, value, *_ = each.step(obs, *each.blank_state(len(obs)))
        gradients = torch.autograd.grad(params.sum() + value.sum(), list(each.trunk.parameters()), allow_unused=True)
        answers.append([params, value, *(g for g in gradients if g is not None)])
    for rounded, right in zip(*answers, strict=True):
        if torch.linalg.vector_norm(rounded - right) > 0.25 * torch.linalg.vector_norm(right):
            raise ConfigError(
                "precision bf16 gives wrong results for this network on this machine, whose bfloat16 kernels are off "
                "by more than a quarter: use float32"
            )
