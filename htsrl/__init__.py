"""HTS-RL: high-throughput synchronous reinforcement learning, bit-for-bit reproducible.

    import htsrl

    config = htsrl.configure("CartPole-v1", algo="ppo", total_steps=100_000)
    result = htsrl.train(config)

Names are imported when first used, so that ``import htsrl`` costs nothing and executors never load torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# The learner's threads share the cores with executors and actors: one that spins while it waits for another takes the
# core that the other needs (three times slower on two cores). OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"

_HOME = {
    "A2COptions": "htsrl.config",
    "ACKTROptions": "htsrl.config",
    "AtariOptions": "htsrl.config",
    "Config": "htsrl.config",
    "ConfigError": "htsrl.errors",
    "EnvSpec": "htsrl.envs.spec",
    "Environment": "htsrl.envs.spec",
    "EnvironmentFailed": "htsrl.errors",
    "FootballOptions": "htsrl.config",
    "GymnasiumOptions": "htsrl.config",
    "HtsrlError": "htsrl.errors",
    "IMPALAOptions": "htsrl.config",
    "NetworkOptions": "htsrl.config",
    "OutputOptions": "htsrl.config",
    "PPOOptions": "htsrl.config",
    "RunFailed": "htsrl.errors",
    "RuntimeOptions": "htsrl.config",
    "SyntheticOptions": "htsrl.config",
    "configure": "htsrl.settings",
    "evaluate_run": "htsrl.evaluation",
    "fork": "htsrl.training",
    "load_config": "htsrl.tomlfile",
    "resume": "htsrl.training",
    "to_toml": "htsrl.tomlfile",
    "train": "htsrl.training",
}

__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from htsrl.config import A2COptions as A2COptions
    from htsrl.config import ACKTROptions as ACKTROptions
    from htsrl.config import AtariOptions as AtariOptions
    from htsrl.config import Config as Config
    from htsrl.config import FootballOptions as FootballOptions
    from htsrl.config import GymnasiumOptions as GymnasiumOptions
    from htsrl.config import IMPALAOptions as IMPALAOptions
    from htsrl.config import NetworkOptions as NetworkOptions
    from htsrl.config import OutputOptions as OutputOptions
    from htsrl.config import PPOOptions as PPOOptions
    from htsrl.config import RuntimeOptions as RuntimeOptions
    from htsrl.config import SyntheticOptions as SyntheticOptions
    from htsrl.envs.spec import Environment as Environment
    from htsrl.envs.spec import EnvSpec as EnvSpec
    from htsrl.errors import ConfigError as ConfigError
    from htsrl.errors import EnvironmentFailed as EnvironmentFailed
    from htsrl.errors import HtsrlError as HtsrlError
    from htsrl.errors import RunFailed as RunFailed
    from htsrl.evaluation import evaluate_run as evaluate_run
    from htsrl.settings import configure as configure
    from htsrl.tomlfile import load_config as load_config
    from htsrl.tomlfile import to_toml as to_toml
    from htsrl.training import fork as fork
    from htsrl.training import resume as resume
    from htsrl.training import train as train


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'htsrl' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
