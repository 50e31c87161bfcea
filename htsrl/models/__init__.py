"""Models: ``build_model`` makes the policy and value network that a run trains."""

from __future__ import annotations

import torch

from htsrl.config import NetworkOptions
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError
from htsrl.models.flat import FlatParameters
from htsrl.models.heads import Head, make_head
from htsrl.models.networks import ACTIVATIONS, ActorCritic, impala_cnn, mlp, nature_cnn
from htsrl.rng import Stream, torch_generator

__all__ = ["ActorCritic", "FlatParameters", "Head", "build_model", "make_head"]


def build_model(spec: EnvSpec, options: NetworkOptions, seed: int) -> ActorCritic:
    """The network of ``options`` for observations and actions of ``spec``: on the CPU, float32, initialised from ``seed``.

    A network that can't read the observations is a ConfigError.
    """
    network = _choose(spec, options)
    head = make_head(spec.action)
    rng = torch_generator(seed, Stream.INITIALISATION)
    # Orthogonal matrices come from LAPACK, whose bits depend on the number of threads: parameters must not.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if network == "mlp":
            activation = ACTIVATIONS[options.activation]
            return mlp(head, spec.observation_shape, options.hidden_sizes, activation, options.initial_log_std, rng)
        cnn = impala_cnn if network == "impala" else nature_cnn
        return cnn(head, spec.observation_shape, options.initial_log_std, rng)
    finally:
        torch.set_num_threads(threads)


def _choose(spec: EnvSpec, options: NetworkOptions) -> str:
    """The network's name, 'auto' resolved."""
    image = spec.observation_kind == "image"
    if options.network == "auto":
        return "nature" if image else "mlp"
    if (options.network == "mlp") == image:
        shape = "x".join(map(str, spec.observation_shape))
        fits = "'nature', 'football' or 'impala'" if image else "'mlp'"
        what = "images" if image else "vectors"
        raise ConfigError(
            f"network '{options.network}' can't read the observations of {spec.env_id}, which are {what} "
            f"({shape}): use {fits}"
        )
    return options.network
