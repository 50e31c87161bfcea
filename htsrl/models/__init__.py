"""Models: ``build_model`` makes the policy and value network that a run trains."""

from __future__ import annotations

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
from htsrl.rng import Stream, generator, torch_generator

__all__ = ["ActorCritic", "FlatParameters", "Head", "build_model", "make_head"]

_NETWORKS = {"mlp": mlp, "nature": nature_cnn, "football": nature_cnn, "impala": impala_cnn}


def build_model(spec: EnvSpec, options: NetworkOptions, seed: int) -> ActorCritic:
    """The network of ``options`` for the observations and actions of ``spec``, on the CPU, float32.

    Initial parameters depend on ``seed`` and nothing else. A network that can't read the observations is a ConfigError.
    """
    build = _choose(spec, options)
    # Orthogonal matrices come from LAPACK, whose bits depend on the number of threads: parameters must not.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = build(spec, make_head(spec.action), options, torch_generator(seed, Stream.INITIALISATION))
        model.bf16 = options.precision == "bf16"
        model.blank = blank_observations(spec)
        model.row_bytes = widest_row(model, model.blank)
        if model.bf16:
            exact = options.model_copy(update={"precision": "float32"})
            twin = build(spec, make_head(spec.action), exact, torch_generator(seed, Stream.INITIALISATION))
            refuse_wrong_kernels(spec, model, twin)
    finally:
        torch.set_num_threads(threads)
    return model


def _choose(spec: EnvSpec, options: NetworkOptions) -> Callable[..., ActorCritic]:
    """The function that builds the network; 'auto' goes by the observations."""
    image = spec.observation_kind == "image"
    if options.precision == "bf16" and not image and ":" not in options.network:
        raise ConfigError(
            f"precision bf16 pays for networks that read images, and the observations of {spec.env_id} are vectors: "
            "use float32"
        )
    if options.network == "auto":
        return nature_cnn if image else mlp
    if ":" in options.network:
        return custom_network
    if (options.network == "mlp") == image:
        shape = "x".join(map(str, spec.observation_shape))
        reads, fits = ("images", "'nature', 'football' or 'impala'") if image else ("vectors", "'mlp'")
        raise ConfigError(
            f"network '{options.network}' can't read the observations of {spec.env_id}, which are {reads} of shape "
            f"{shape}: use {fits}"
        )
    return _NETWORKS[options.network]


def refuse_wrong_kernels(spec: EnvSpec, model: ActorCritic, exact: ActorCritic) -> None:
    """ConfigError where bfloat16 gives ``model`` other answers than float32 gives ``exact``, far beyond rounding.

    Such kernels exist (see :class:`htsrl.models.networks.BlockConv`), and a policy learns from their answers, badly.
    """
    rng, shape = generator(0, Stream.PROBE), (8, *spec.observation_shape)
    bytes_ = spec.observation_dtype == np.uint8
    obs = torch.from_numpy(rng.integers(0, 256, shape, np.uint8) if bytes_ else rng.random(shape, np.float32))
    answers = []
    for each in (model, exact):
        params, value = each(obs)
        gradients = torch.autograd.grad(params.sum() + value.sum(), list(each.trunk.parameters()), allow_unused=True)
        answers.append([params, value, *(g for g in gradients if g is not None)])
    for rounded, right in zip(*answers, strict=True):
        if torch.linalg.vector_norm(rounded - right) > 0.1 * torch.linalg.vector_norm(right):
            raise ConfigError(
                "precision bf16 gives wrong results for this network on this machine, whose bfloat16 kernels are off "
                "by more than a tenth: use float32"
            )
