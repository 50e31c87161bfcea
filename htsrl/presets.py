"""Where a run starts from: settings per environment family and algorithm, and for a few environments.

A preset names what its source states or what differs from the defaults of ``htsrl.config``. TOML files and flags
override it, and the resolved values are in the run's ``config.toml``.
"""

from __future__ import annotations

from typing import Any

Preset = dict[str, Any]

FOOTBALL_PPO: Preset = {
    # The hyperparameters of the football scripts released with the paper (Liu, Yeh, Schwing 2020), except for the
    # budget: 5 million steps there; empty-goal-close, the default scenario, is solved well within this one.
    "total_steps": 200_000,
    "num_envs": 16,
    "sync_interval": 128,
    "learning_rate": 3.43e-4,
    "discount": 0.993,
    "gae_lambda": 0.95,
    "epochs": 2,
    "minibatches": 8,
    "clip_range": 0.08,
    "clip_value": 0.08,
    "entropy_coef": 0.003,
    "value_coef": 0.5,
    "max_grad_norm": 0.64,
    "adam_eps": 1e-5,
}
FOOTBALL_A2C: Preset = {
    # The paper's discount, entropy and clipping; RMSprop's settings are those of Mnih et al. 2016.
    "total_steps": 400_000,
    "num_envs": 16,
    "sync_interval": 16,
    "learning_rate": 7e-4,
    "discount": 0.993,
    "gae_lambda": 0.95,
    "entropy_coef": 0.003,
    "max_grad_norm": 0.64,
}
ATARI_PPO: Preset = {
    # Schulman et al. 2017, appendix A, with their minibatches of 256 but twice the replicas, and the shorter clip range
    # that later implementations agree on.
    "total_steps": 10_000_000,
    "num_envs": 16,
    "sync_interval": 128,
    "learning_rate": 2.5e-4,
    "epochs": 4,
    "minibatches": 8,
    "clip_range": 0.1,
    "entropy_coef": 0.01,
}
ATARI_A2C: Preset = {
    # Mnih et al. 2016: 16 replicas; a longer interval than their 5 steps, so that the barrier stays cheap.
    "total_steps": 10_000_000,
    "num_envs": 16,
    "sync_interval": 16,
    "learning_rate": 7e-4,
    "entropy_coef": 0.01,
}
VECTOR_PPO: Preset = {
    # Small networks on small observations bear a larger step than PPO's usual 3e-4.
    "num_envs": 16,
    "sync_interval": 128,
    "learning_rate": 1e-3,
    "epochs": 4,
    "minibatches": 4,
    "clip_range": 0.2,
    "entropy_coef": 0.005,
}
VECTOR_A2C: Preset = {
    "num_envs": 16,
    "sync_interval": 16,
    "learning_rate": 1e-3,
    "gae_lambda": 0.95,
    "entropy_coef": 0.005,
    "optimizer": "adam",
}
FOOTBALL_IMPALA: Preset = {
    # The football settings of SEED RL (Espeholt et al. 2019), which clips no gradients, with this project's budget.
    "total_steps": 1_000_000,
    "num_envs": 32,
    "sync_interval": 32,
    "learning_rate": 1.254e-4,
    "lr_schedule": "constant",
    "discount": 0.997,
    "entropy_coef": 7.33e-4,
    "max_grad_norm": 40.0,
    "optimizer": "adam",
}
ATARI_IMPALA: Preset = {
    # Espeholt et al. 2018, appendix G. Their loss is a sum over 32 x 20 rows, this one a mean: so the largest norm of
    # the gradient, 40 there, and RMSprop's ε, 0.01 there, are 640 times smaller.
    "total_steps": 10_000_000,
    "num_envs": 32,
    "sync_interval": 20,
    "learning_rate": 6e-4,
    "entropy_coef": 0.01,
    "max_grad_norm": 0.0625,
    "optimizer_eps": 1.5625e-5,
}
VECTOR_IMPALA: Preset = {
    # A large ε: the gradient of a policy that has nothing left to learn is noise, and must not grow to full steps.
    "num_envs": 16,
    "sync_interval": 32,
    "learning_rate": 1e-3,
    "gae_lambda": 0.95,
    "minibatches": 4,
    "entropy_coef": 0.005,
    "max_grad_norm": 40.0,
    "optimizer_eps": 0.01,
}
FOOTBALL_ACKTR: Preset = {
    # The paper's discount and entropy; the K-FAC settings are those of ATARI_ACKTR.
    "total_steps": 400_000,
    "num_envs": 32,
    "sync_interval": 20,
    "learning_rate": 0.25,
    "kl_clip": 0.001,
    "kfac_interval": 50,
    "discount": 0.993,
    "gae_lambda": 0.95,
    "entropy_coef": 0.003,
}
ATARI_ACKTR: Preset = {
    # The settings published with Wu et al. 2017, 32 replicas x 20 steps, except for their momentum of 0.9, with which
    # policies for CartPole collapsed, under 'sync' as under 'hts'. Decompositions are rare: that of a layer with 3,000
    # inputs takes several seconds, and the factors themselves change over 100 updates.
    "total_steps": 10_000_000,
    "num_envs": 32,
    "sync_interval": 20,
    "learning_rate": 0.25,
    "kl_clip": 0.001,
    "damping": 0.01,
    "factor_decay": 0.99,
    "kfac_interval": 50,
    "entropy_coef": 0.01,
}
VECTOR_ACKTR: Preset = {
    "num_envs": 16,
    "sync_interval": 16,
    "gae_lambda": 0.95,
    "entropy_coef": 0.005,
}
MUJOCO_PPO: Preset = {
    # Schulman et al. 2017, table 3: many passes over small minibatches, no entropy bonus.
    "total_steps": 1_000_000,
    "learning_rate": 3e-4,
    "epochs": 10,
    "minibatches": 32,
    "entropy_coef": 0.0,
}

# The settings of the code published with BatchPPO (Hafner et al. 2017), but for the size of updates: there one is of 30
# or 60 whole episodes, up to 60,000 steps, which the gradient of all of them moves 25 times, with budgets of 10 million
# steps and more. These learn from less at a time and more often, with larger steps that end at 0.
VECTOR_BATCHPPO: Preset = {
    "num_envs": 16,
    "sync_interval": 128,
    "learning_rate": 3e-4,
    "lr_schedule": "linear",
    "gae_lambda": 0.95,
    "epochs": 10,
    "minibatches": 16,
    "hidden_sizes": (200, 100),
    "activation": "relu",
    "initial_log_std": -1.0,
    "normalize_obs": True,
}
IMAGE_BATCHPPO: Preset = {
    # Nothing was published for images, whose scale is known.
    "num_envs": 16,
    "sync_interval": 128,
    "learning_rate": 2.5e-4,
    "discount": 0.99,
    "gae_lambda": 0.95,
    "entropy_coef": 0.01,
    "epochs": 4,
    "minibatches": 8,
}

PRESETS: dict[tuple[str, str], Preset] = {
    ("football", "batchppo"): IMAGE_BATCHPPO | {"total_steps": 200_000, "discount": 0.993, "entropy_coef": 0.003},
    ("atari", "batchppo"): IMAGE_BATCHPPO | {"total_steps": 10_000_000},
    ("gymnasium", "batchppo"): VECTOR_BATCHPPO,
    ("synthetic", "batchppo"): VECTOR_BATCHPPO,
    ("football", "ppo"): FOOTBALL_PPO,
    ("football", "a2c"): FOOTBALL_A2C,
    ("football", "impala"): FOOTBALL_IMPALA,
    ("football", "acktr"): FOOTBALL_ACKTR,
    ("atari", "ppo"): ATARI_PPO,
    ("atari", "a2c"): ATARI_A2C,
    ("atari", "impala"): ATARI_IMPALA,
    ("atari", "acktr"): ATARI_ACKTR,
    ("gymnasium", "ppo"): VECTOR_PPO,
    ("gymnasium", "a2c"): VECTOR_A2C,
    ("gymnasium", "impala"): VECTOR_IMPALA,
    ("gymnasium", "acktr"): VECTOR_ACKTR,
    ("synthetic", "ppo"): VECTOR_PPO,
    ("synthetic", "a2c"): VECTOR_A2C,
    ("synthetic", "impala"): VECTOR_IMPALA,
    ("synthetic", "acktr"): VECTOR_ACKTR,
}

# On top of the family's preset.
ENVIRONMENT_PRESETS: dict[tuple[str, str], Preset] = {
    # Gentler than the family's: a pole that stands for 500 steps must not be unlearned by the last updates.
    ("CartPole-v1", "ppo"): {
        "total_steps": 200_000,
        "discount": 0.98,
        "gae_lambda": 0.9,
        "epochs": 8,
        "entropy_coef": 0.0,
    },
    # Small rewards: with one norm for both, returns of up to 100 would let the value function's gradient use up the
    # clip and leave the policy almost none. Short intervals: one gradient step each.
    ("CartPole-v1", "a2c"): {
        "total_steps": 400_000,
        "sync_interval": 8,
        "optimizer": "rmsprop",
        "gae_lambda": 1.0,
        "entropy_coef": 0.0,
        "reward_scale": 0.02,
    },
    # The same, for the same reasons: with a lag of one or two updates V-trace is close to A2C's estimate.
    ("CartPole-v1", "impala"): {
        "total_steps": 400_000,
        "sync_interval": 8,
        "gae_lambda": 1.0,
        "minibatches": 1,
        "entropy_coef": 0.0,
        "max_grad_norm": 0.5,
        "optimizer_eps": 1e-5,
        "reward_scale": 0.02,
    },
    # The critic's trust region is in units of the learner's rewards: with unscaled ones learning takes three times as
    # long. Short intervals: one step each.
    ("CartPole-v1", "acktr"): {
        "total_steps": 400_000,
        "sync_interval": 8,
        "gae_lambda": 1.0,
        "entropy_coef": 0.0,
        "reward_scale": 0.02,
    },
    ("Acrobot-v1", "ppo"): {"total_steps": 300_000},
    ("Acrobot-v1", "a2c"): {"total_steps": 500_000},
    # Every step counts and the effects are immediate: a short horizon learns several times faster.
    ("Pendulum-v1", "ppo"): {
        "total_steps": 300_000,
        "discount": 0.9,
        "epochs": 10,
        "minibatches": 32,
        "entropy_coef": 0.0,
    },
    ("Pendulum-v1", "acktr"): {"total_steps": 300_000, "discount": 0.9, "entropy_coef": 0.0, "reward_scale": 0.1},
    ("HalfCheetah-v5", "ppo"): MUJOCO_PPO,
    ("Hopper-v5", "ppo"): MUJOCO_PPO,
    ("Walker2d-v5", "ppo"): MUJOCO_PPO,
    ("Ant-v5", "ppo"): MUJOCO_PPO,
    # Horizon and passes are those of ppo.
    ("CartPole-v1", "batchppo"): {
        "total_steps": 400_000,
        "learning_rate": 1e-3,
        "discount": 0.98,
        "gae_lambda": 0.9,
        "epochs": 8,
        "minibatches": 4,
    },
    ("Pendulum-v1", "batchppo"): {"total_steps": 300_000, "discount": 0.9},
    # The published horizons; a tenth of the published budgets is enough.
    ("HalfCheetah-v5", "batchppo"): {"total_steps": 1_000_000, "discount": 0.99},
    ("Walker2d-v5", "batchppo"): {"total_steps": 1_000_000},
    ("Hopper-v5", "batchppo"): {"total_steps": 1_000_000},
    ("Humanoid-v5", "batchppo"): {"total_steps": 10_000_000, "num_envs": 32, "minibatches": 32},
}


def preset(family: str, algo: str, env: str) -> Preset:
    """Settings by name for ``algo`` on ``env``, which belongs to ``family``."""
    return PRESETS[family, algo] | ENVIRONMENT_PRESETS.get((env, algo), {})
