"""A network of the user's own: ``--network module:function``.

``function(spec)`` returns a module that maps observations [B, *obs], in the environment's dtype, to features [B, F]
float32. The policy and the value function are put on top of it. Of packed observations (Dict, Tuple, or with an action
mask), rows of bytes, ``htsrl.models.unpack(spec, rows)`` gives the parts; the mask acts on the policy without its help.
"""

from __future__ import annotations

import torch
from torch import nn

from htsrl.config import NetworkOptions
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError
from htsrl.models.heads import Head
from htsrl.models.networks import ActorCritic, blank_observations, on_trunk
from htsrl.usercode import import_module


def custom_network(spec: EnvSpec, head: Head, options: NetworkOptions, rng: torch.Generator) -> ActorCritic:
    """The network that ``options.network`` names; ConfigError where it can't be found or doesn't give features."""
    module_name, _, function_name = options.network.partition(":")
    try:
        function = getattr(import_module(module_name), function_name)
    except Exception as error:
        raise ConfigError(f"network '{options.network}' can't be imported: {type(error).__name__}: {error}") from error
    # Layers of any make draw their initial weights from the global generator: for this moment it is the run's own.
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng.get_state())
        try:
            trunk = function(spec)
            features = _features(trunk, spec)
        except Exception as error:
            raise ConfigError(f"network '{options.network}' doesn't work for {spec.env_id}: {error}") from error
        rng.set_state(torch.get_rng_state())
    model = on_trunk(trunk, features, head, options, rng)
    model.custom = True
    return model


def _features(trunk: nn.Module, spec: EnvSpec) -> int:
    """F, found by trying some rows."""
    for name, layer in trunk.named_modules():
        # Such layers look at other rows or at a global generator, so that a row's answer would depend on its company
        if isinstance(layer, nn.modules.batchnorm._NormBase | nn.modules.dropout._DropoutNd):
            raise ValueError(f"{type(layer).__name__} ({name}) does not treat rows one by one; LayerNorm or none does")
    obs = blank_observations(spec)
    with torch.no_grad():
        out = trunk(obs)
    if out.dtype != torch.float32 or out.dim() != 2 or len(out) != len(obs):
        raise ValueError(
            f"it must turn {len(obs)} observations {list(obs.shape)} into float32 features [{len(obs)}, F], "
            f"not {out.dtype} {list(out.shape)}"
        )
    return out.shape[1]
