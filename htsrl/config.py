"""The configuration: one frozen pydantic model per concern, validated once, before any process starts.

The command line, TOML files, presets and the ``config.toml`` of a run are all made from these models. This module
imports neither torch nor an environment, so that ``htsrl --help`` answers at once and executors can read it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def refused(sentence: str) -> PydanticCustomError:
    """What a validator raises: ``sentence`` names settings in backticks, so that each front end spells them its way."""
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})


class Section(BaseModel):
    """A group of settings: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: Any, info: ValidationInfo) -> Any:
        """For values from text: 'none' is None where that is allowed, '1e6' a whole number, and true is no number."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        choices = (annotation, *get_args(annotation))
        if isinstance(value, bool) and not {bool, Any} & set(choices):
            return str(value).lower()  # pydantic would read it as 0 or 1
        if isinstance(value, str):
            if value.lower() == "none" and type(None) in choices:
                return None
            if re.fullmatch(r"\d+(\.\d+)?e\+?\d{1,2}", value, re.IGNORECASE) and _whole(choices):
                return float(value)
        return value


def _whole(choices: tuple[Any, ...]) -> bool:
    return any(choice is int or int in get_args(choice) for choice in choices)


# ---------------------------------------------------------------------------------------------- environment families


class GymnasiumOptions(Section):
    """Any environment that is registered with Gymnasium."""

    max_episode_steps: PositiveInt | None = None
    """Steps after which an episode is truncated; by default what the environment registered."""
    reward_scale: PositiveFloat = 1.0
    """The learner sees rewards times this; reported returns stay raw."""


class AtariOptions(Section):
    """Atari games, straight on the Arcade Learning Environment."""

    frame_skip: PositiveInt = 4
    """Emulator frames per agent step; the observation is the maximum over the last two."""
    frame_stack: PositiveInt = 4
    """Observations stacked on the last axis."""
    noop_max: NonNegativeInt = 30
    """An episode starts with 1 to this many no-op frames; 0 starts at once."""
    sticky_actions: Fraction = 0.0
    """Probability per frame that the emulator repeats the previous action."""
    reward_clip: bool = True
    """The learner sees the sign of the reward; reported returns are the game's full score."""
    terminal_on_life_loss: bool = False
    """The learner sees a lost life as a termination; episodes in reports are always full games."""
    full_action_space: bool = False
    """All 18 actions instead of those the game uses."""
    max_episode_steps: PositiveInt | None = 27_000
    """Agent steps after which a game is truncated (27,000 x 4 frames = 30 minutes)."""


class FootballOptions(Section):
    """Google Research Football."""

    representation: Literal["extracted", "simple115v2"] = "extracted"
    """'extracted' is the 72x96 minimap of four planes, 'simple115v2' a vector of 115 numbers."""
    stacked: bool = True
    """Stack the last four observations."""
    rewards: Literal["scoring", "scoring,checkpoints"] = "scoring,checkpoints"
    """What the learner is paid for; the reported score counts goals alone."""
    max_episode_steps: PositiveInt | None = None
    """Steps after which an episode is truncated; by default the scenario decides."""


class SyntheticOptions(Section):
    """Environments made for tests and benchmarks."""

    step_ms: NonNegativeFloat | None = None
    """Mean duration of a step in milliseconds: asleep, by default 0; synthetic:football works, by default for 2."""
    step_shape: PositiveFloat = 1.0
    """Shape K of the Gamma distribution of the duration (1: exponential; larger: more regular)."""
    observation_size: PositiveInt = 16
    """Length of the observation vector."""
    num_actions: PositiveInt = 6
    """Number of discrete actions."""
    memory_steps: PositiveInt = 8
    """Steps of an episode of synthetic:memory, and so for how long its cue must be remembered."""
    max_episode_steps: PositiveInt | None = 200
    """Steps after which an episode is truncated."""


EnvOptions = GymnasiumOptions | AtariOptions | FootballOptions | SyntheticOptions

FAMILIES: dict[str, type[Section]] = {
    "gymnasium": GymnasiumOptions,
    "atari": AtariOptions,
    "football": FootballOptions,
    "synthetic": SyntheticOptions,
}


# -------------------------------------------------------------------------------------------------------- algorithms


class AlgorithmOptions(Section):
    """Settings that all algorithms share."""

    learning_rate: PositiveFloat = 3e-4
    """Step size at the start."""
    lr_schedule: Literal["constant", "linear"] = "linear"
    """'linear' falls to zero at the end of the step budget."""
    discount: Fraction = 0.99
    """γ."""
    gae_lambda: Fraction = 0.95
    """λ of generalised advantage estimation; 1 gives n-step returns."""
    entropy_coef: NonNegativeFloat = 0.01
    """Weight of the entropy bonus."""
    value_coef: NonNegativeFloat = 0.5
    """Weight of the value loss."""
    max_grad_norm: PositiveFloat = 0.5
    """Every gradient step's global norm is clipped to this."""


class PPOOptions(AlgorithmOptions):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    epochs: PositiveInt = 4
    """Passes over each interval's data."""
    minibatches: PositiveInt = 4
    """Gradient steps per pass."""
    batched_by: Literal["steps", "episodes"] = "steps"
    """What counts alike in a minibatch's means: every step, or every episode (its part in this interval)."""
    clip_range: PositiveFloat | None = 0.2
    """ε: how far the probability ratio may move before its gradient is cut; none doesn't cut it."""
    clip_value: PositiveFloat | None = None
    """Clip the value function's change to this range; off by default."""
    normalize_advantage: bool = True
    """Whiten advantages within each minibatch."""
    target_kl: PositiveFloat | None = None
    """Skip the remaining epochs once the mean KL divergence exceeds 1.5 times this."""
    kl_penalty: PositiveFloat | None = None
    """Initial weight of a penalty on the KL divergence; it adapts to `kl_penalty_target`. Off by default."""
    kl_penalty_target: PositiveFloat = 0.01
    """Mean KL divergence that an update should make: beyond 1.3 times it the penalty grows, below 0.7 it falls."""
    kl_cutoff: PositiveFloat = 2.0
    """From this many times the target on, the square of the excess is penalised, too."""
    kl_cutoff_coef: NonNegativeFloat = 1000.0
    """Weight of that square."""
    normalize_reward: bool = False
    """Divide rewards by their running root mean square; clip at 10, and scale so that returns are of order 1."""
    adam_eps: PositiveFloat = 1e-5
    """Adam's ε."""

    @model_validator(mode="after")
    def _penalty_settings_need_a_penalty(self) -> PPOOptions:
        for name in ("kl_penalty_target", "kl_cutoff", "kl_cutoff_coef"):
            if self.kl_penalty is None and getattr(self, name) != PPOOptions.model_fields[name].default:
                raise refused(f"`{name}` needs `kl_penalty`, the initial weight of the penalty that it shapes")
        return self

    @model_validator(mode="after")
    def _something_holds_the_policy(self) -> PPOOptions:
        if self.clip_range is None and self.kl_penalty is None and self.target_kl is None:
            raise refused("`clip_range` none needs `kl_penalty` or `target_kl`: nothing else would hold the policy")
        return self


class BatchPPOOptions(PPOOptions):
    """BatchPPO (Hafner et al. 2017): PPO held by an adaptive KL penalty. The defaults are those of its code."""

    learning_rate: PositiveFloat = 1e-4
    """Step size at the start."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """'linear' falls to zero at the end of the step budget."""
    discount: Fraction = 0.995
    """γ."""
    gae_lambda: Fraction = 1.0
    """λ of generalised advantage estimation; 1 gives n-step returns."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    value_coef: NonNegativeFloat = 1.0
    """Weight of the value loss."""
    epochs: PositiveInt = 25
    """Passes over each interval's data."""
    minibatches: PositiveInt = 1
    """Gradient steps per pass."""
    clip_range: PositiveFloat | None = None
    """ε: how far the probability ratio may move before its gradient is cut; none doesn't cut it."""
    kl_penalty: PositiveFloat | None = 1.0
    """Initial weight of a penalty on the KL divergence; it adapts to `kl_penalty_target`."""
    normalize_reward: bool = True
    """Divide rewards by their running root mean square; clip at 10, and scale so that returns are of order 1."""
    adam_eps: PositiveFloat = 1e-8
    """Adam's ε."""


class A2COptions(AlgorithmOptions):
    """Advantage actor-critic (Mnih et al. 2016): one gradient step per interval."""

    learning_rate: PositiveFloat = 7e-4
    """Step size at the start."""
    gae_lambda: Fraction = 1.0
    """λ of generalised advantage estimation; 1 gives n-step returns."""
    normalize_advantage: bool = False
    """Whiten advantages within the batch."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """'rmsprop' is the paper's."""
    rmsprop_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.99
    """RMSprop's smoothing of squared gradients."""
    optimizer_eps: PositiveFloat = 1e-5
    """ε of the optimizer."""


class IMPALAOptions(AlgorithmOptions):
    """IMPALA (Espeholt et al. 2018): V-trace actor-critic, which corrects for the policy lag; one pass per interval."""

    learning_rate: PositiveFloat = 6e-4
    """Step size at the start."""
    gae_lambda: Fraction = 1.0
    """λ of V-trace: with ratios of 1, that of generalised advantage estimation."""
    rho_clip: PositiveFloat = 1.0
    """ρ̄: largest probability ratio in targets and policy gradient; decides whose value function is learned."""
    c_clip: PositiveFloat = 1.0
    """c̄: largest probability ratio in the traces: how far an error reaches back; at most `rho_clip` in the paper."""
    minibatches: PositiveInt = 1
    """Gradient steps per interval, each on replicas of its own."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """'rmsprop' is the paper's."""
    rmsprop_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.99
    """RMSprop's smoothing of squared gradients."""
    optimizer_eps: PositiveFloat = 1e-5
    """ε of the optimizer."""


class ACKTROptions(AlgorithmOptions):
    """Actor-critic with a natural gradient by K-FAC (Wu et al. 2017): one step per interval."""

    learning_rate: PositiveFloat = 0.25
    """Largest step along the natural gradient, at the start."""
    gae_lambda: Fraction = 1.0
    """λ of generalised advantage estimation; 1 gives n-step returns."""
    normalize_advantage: bool = False
    """Whiten advantages within the batch."""
    kl_clip: PositiveFloat = 0.001
    """δ of the trust region: no step changes the policy (or value) by more nats, as far as the Fisher matrix tells."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Each step is averaged with those before it, which keep this weight; the paper's 0.9 unlearns CartPole again."""
    damping: PositiveFloat = 0.01
    """λ that is added to every eigenvalue of the Fisher matrix."""
    factor_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.99
    """Smoothing of the Fisher matrix's factors over updates."""
    kfac_interval: PositiveInt = 10
    """Updates between two decompositions of the factors."""
    cold_updates: NonNegativeInt = 10
    """Updates at the start that only gather factors and step along the plain gradient."""
    cold_learning_rate: PositiveFloat = 1e-3
    """Step size of those."""


ALGORITHMS: dict[str, type[AlgorithmOptions]] = {
    "ppo": PPOOptions,
    "batchppo": BatchPPOOptions,
    "a2c": A2COptions,
    "impala": IMPALAOptions,
    "acktr": ACKTROptions,
}


# ------------------------------------------------------------------------------------------------------------ shared


LOG_STD_RANGE = (-5.0, 2.0)
"""Of standard deviations that a network gives: outside, noise or its gradient would be lost in rounding."""
NETWORKS = ("auto", "mlp", "nature", "football", "impala")


class NetworkOptions(Section):
    """The policy and value network."""

    network: str = "auto"
    """auto, mlp, nature, football, impala, or your own module:function. auto: MLP for vectors, else the paper's CNN."""
    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
    """Hidden layers of the MLP (policy and value have one each)."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the MLP."""
    initial_log_std: float = 0.0
    """Logarithm of the initial standard deviation of continuous actions."""
    state_dependent_std: bool = False
    """The network gives the standard deviations of continuous actions, e^-5 to e^2; else they are free parameters."""
    squash_actions: bool = False
    """tanh brings continuous actions between their bounds; else they are clipped to them."""
    normalize_obs: bool = False
    """Centre and scale vector observations by the statistics of all intervals so far, and clip them at 5."""
    precision: Literal["float32", "bf16"] = "float32"
    """'bf16' computes image networks in bfloat16: faster, just as reproducible; parameters and losses stay float32."""
    recurrent: Literal["none", "lstm", "gru"] = "none"
    """Let the policy remember its episode: a layer of such cells in front of policy and value, which share the rest."""
    recurrent_size: PositiveInt = 128
    """Cells of that layer."""

    @property
    def state_size(self) -> int:
        """S: numbers that a row's recurrent state is made of; 0 without."""
        return {"none": 0, "gru": 1, "lstm": 2}[self.recurrent] * self.recurrent_size

    @model_validator(mode="after")
    def _deviation_in_range(self) -> NetworkOptions:
        low, high = LOG_STD_RANGE
        if self.state_dependent_std and not low <= self.initial_log_std <= high:
            raise refused(
                f"`initial_log_std` must be between {low:g} and {high:g} with `state_dependent_std`, got "
                f"{self.initial_log_std:g}"
            )
        return self

    @field_validator("network")
    @classmethod
    def _known_network(cls, value: str) -> str:
        if value not in NETWORKS and not re.fullmatch(r"[\w.]+:\w+", value):
            raise refused(f"`network` must be one of {', '.join(NETWORKS)} or module:function, got {value}")
        return value

    @model_validator(mode="after")
    def _size_needs_a_core(self) -> NetworkOptions:
        default = type(self).model_fields["recurrent_size"].default
        if self.recurrent == "none" and self.recurrent_size != default:
            raise refused("`recurrent_size` needs `recurrent` lstm or gru: there is no such layer otherwise")
        return self


class RuntimeOptions(Section):
    """Processes, schedule and devices. Any layout of processes gives the same bits (but for schedule async)."""

    num_envs: PositiveInt = 16
    """N: environment replicas."""
    sync_interval: PositiveInt = 128
    """T: steps of each replica between two barriers (the paper's alpha)."""
    schedule: Literal["hts", "sync", "async"] = "hts"
    """'hts' learns while the next interval is collected; 'sync' is the A2C/PPO baseline, 'async' IMPALA's."""
    delay: Literal["gradient", "importance"] = "gradient"
    """Of hts: 'gradient' takes the update at the parameters that acted and adds it to the newest ones; 'importance'
    starts it at the newest, and the ratio to the old probabilities makes up for the lag."""
    async_slots: PositiveInt = 2
    """Of schedule async: unrolls per replica that are collected or wait for the learner; bounds the policy lag."""
    layout: Literal["rule", "auto"] = "rule"
    """How 'auto' values of the three settings below are found: by a 'rule' from environment and cores, or, 'auto', by
    trying others during the first intervals and keeping the fastest. No bit depends on them."""
    num_executors: PositiveInt | Literal["auto"] = "auto"
    """Processes that step environments; 'auto' fits the machine's cores and the environment."""
    num_actors: PositiveInt | Literal["auto"] = "auto"
    """Processes that run the policy; 'auto' is one, or what `layout` auto finds."""
    envs_per_group: PositiveInt | Literal["auto"] = "auto"
    """Replicas that one message speaks of."""
    device: str = "auto"
    """'cpu', 'cuda', 'cuda:1' or 'auto' (a GPU where there is one)."""
    learner_threads: PositiveInt | Literal["auto"] = "auto"
    """Threads that share a gradient. Other numbers give other bits; 'auto' is written into the run's configuration."""
    max_restarts: NonNegativeInt = 20
    """Failed processes that are replaced before the run gives up; 0 gives up at once."""
    step_timeout: PositiveFloat | None = 300.0
    """Seconds after which a step, reset or inference that makes no progress counts as a failed process."""
    start_timeout: PositiveFloat = 180.0
    """Seconds after which an import, construction or reset that makes no progress counts as a failed start."""

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise refused(f"`device` must be auto, cpu, cuda or cuda:N, got {value}")
        return value

    @model_validator(mode="after")
    def _layout_fits(self) -> RuntimeOptions:
        """Replicas are dealt to the executors as evenly as possible, and a group never spans two executors."""
        if self.num_executors != "auto" and self.num_executors > self.num_envs:
            raise refused(f"`num_executors` must be at most `num_envs` ({self.num_envs}), got {self.num_executors}")
        if self.num_actors != "auto" and self.num_actors > self.num_envs:
            raise refused(f"`num_actors` must be at most `num_envs` ({self.num_envs}), got {self.num_actors}")
        if self.schedule != "async" and self.async_slots != 2:
            raise refused(f"`async_slots` is for `schedule` async, and this run's is {self.schedule}")
        if self.schedule != "hts" and self.delay != "gradient":
            raise refused(
                f"`delay` is for `schedule` hts: with {self.schedule} there is one start for an update, the newest "
                "parameters"
            )
        if self.schedule == "sync" and self.num_actors not in ("auto", 1):
            raise refused(f"`schedule` sync needs `num_actors` 1, got {self.num_actors}")
        if self.layout == "auto" and self.schedule == "async":
            raise refused(
                "`layout` auto is for `schedule` hts and sync: it changes processes at a barrier, and async has none"
            )
        actors = 1 if self.schedule == "sync" else self.num_actors
        if self.layout == "auto" and "auto" not in (self.num_executors, actors, self.envs_per_group):
            raise refused(
                "`layout` auto has nothing to find where `num_executors`, `num_actors` and `envs_per_group` are all "
                "given: leave out one of them"
            )
        if self.envs_per_group != "auto":
            executors = 1 if self.num_executors == "auto" else self.num_executors
            largest = -(-self.num_envs // executors)
            if self.envs_per_group > largest:
                raise refused(
                    f"`envs_per_group` must be at most {largest}, the replicas of one executor "
                    f"({self.num_envs} / {executors}, rounded up): a group never spans two; got {self.envs_per_group}"
                )
        return self


class OutputOptions(Section):
    """What a run writes and shows."""

    run_dir: Path | None = None
    """Folder of the run; by default runs/ENV-ALGO-SEED-TIME."""
    checkpoint_every: PositiveInt | None = None
    """Steps between checkpoints; by default one a minute. One at the end is always written."""
    keep_checkpoints: PositiveInt = 3
    """Older checkpoints are deleted."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations of the current policy; off by default."""
    eval_episodes: PositiveInt = 10
    """Episodes of one evaluation."""
    eval_stochastic: bool = False
    """Evaluations sample actions instead of taking the most likely one."""
    tensorboard: bool = True
    """Write TensorBoard events into the run's folder."""
    trace: Path | None = None
    """Write a timeline of every process, for `htsrl plot --timeline FILE` and ui.perfetto.dev; off by default."""
    trace_after: NonNegativeInt = 2
    """Intervals left out before the timeline, counted from where this command starts; 0 shows the start-up, too."""
    trace_intervals: PositiveInt = 20
    """Intervals that the timeline shows: about 100 bytes for each phase of each process, and never more than 1 GiB."""
    record_digests: bool = False
    """Write digests of every interval, digests.jsonl: `htsrl verify --against` can then replay the run."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """'live' is a table that updates in place, 'plain' a line now and then, 'auto' picks by the terminal."""

    @model_validator(mode="after")
    def _trace_settings_need_a_trace(self) -> OutputOptions:
        for name in ("trace_after", "trace_intervals"):
            if self.trace is None and getattr(self, name) != type(self).model_fields[name].default:
                raise refused(f"`{name}` needs `trace`, the file that the timeline goes to")
        return self


E = TypeVar("E", bound=Section, covariant=True)
H = TypeVar("H", bound=AlgorithmOptions, covariant=True)


class Config(Section, Generic[E, H]):
    """One training run. ``Config[AtariOptions, PPOOptions]`` is PPO on Atari, and so on."""

    algo: str = "ppo"
    """Algorithm: ppo, batchppo, a2c, impala or acktr."""
    env: str = "gfootball"
    """Environment: gfootball, gfootball:SCENARIO, atari:Pong, ALE/Pong-v5, any Gymnasium id, module:Id-v0."""
    total_steps: PositiveInt = 1_000_000
    """Step budget over all replicas; the run ends at the first barrier that reaches it."""
    seed: NonNegativeInt = 0
    """All randomness of the run comes from this."""
    algorithm: H
    environment: E
    network: NetworkOptions = NetworkOptions()
    runtime: RuntimeOptions = RuntimeOptions()
    output: OutputOptions = OutputOptions()

    @field_validator("env")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise refused(f"`env` must be a name without control characters, got {value!r}")
        return value

    @field_validator("algo")
    @classmethod
    def _known_algorithm(cls, value: str) -> str:
        if value not in ALGORITHMS:
            raise refused(f"`algo` must be one of {', '.join(ALGORITHMS)}, got {value}")
        return value

    @model_validator(mode="after")
    def _options_belong(self) -> Config[E, H]:
        wanted = ALGORITHMS[self.algo]
        if type(self.algorithm) is not wanted:
            raise refused(f"`algo` {self.algo} takes {wanted.__name__}, got {type(self.algorithm).__name__}")
        return self

    @model_validator(mode="after")
    def _digests_mean_something(self) -> Config[E, H]:
        if self.runtime.schedule == "async" and self.output.record_digests:
            raise refused("`record_digests` is for `schedule` hts and sync: an async run never repeats itself")
        if self.runtime.schedule == "async" and self.output.trace is not None:
            raise refused("`trace` is for `schedule` hts and sync: it shows intervals, and an async run has none")
        if self.runtime.layout == "auto" and self.output.trace is not None:
            raise refused("`trace` needs `layout` rule: a timeline has a line for each process, and these would change")
        return self

    @model_validator(mode="after")
    def _minibatches_fit(self) -> Config[E, H]:
        recurrent = self.network.recurrent != "none"
        if isinstance(self.algorithm, PPOOptions) and not recurrent:
            envs, interval, parts = self.runtime.num_envs, self.runtime.sync_interval, self.algorithm.minibatches
            rows = envs * interval
            if rows % parts:
                raise refused(
                    f"`minibatches` must divide `num_envs` x `sync_interval` = {envs} x {interval} = {rows}, "
                    f"got {parts}; nearest that fit: {_nearest_divisors(rows, parts)}"
                )
        elif isinstance(self.algorithm, PPOOptions | IMPALAOptions):
            envs, parts = self.runtime.num_envs, self.algorithm.minibatches
            why = f", as `recurrent` {self.network.recurrent} tears none apart" if recurrent else ""
            if envs % parts:
                raise refused(
                    f"`minibatches` must divide `num_envs` = {envs}, the sequences of an interval{why}, got {parts}; "
                    f"nearest that fit: {_nearest_divisors(envs, parts)}"
                )
        return self

    @model_validator(mode="after")
    def _acktr_is_exact(self) -> Config[E, H]:
        if isinstance(self.algorithm, ACKTROptions):
            if self.network.precision != "float32":
                raise refused(
                    "`algo` acktr needs `precision` float32: the Fisher matrix's small eigenvalues would be lost, got "
                    f"{self.network.precision}"
                )
            if self.network.recurrent != "none":
                raise refused(
                    "`algo` acktr needs `recurrent` none: it knows the curvature of layers that see rows one by one, "
                    f"got {self.network.recurrent}"
                )
            if self.runtime.schedule == "async":
                raise refused(
                    "`algo` acktr is for `schedule` hts and sync: its trust region starts at the policy that acted, "
                    "and in an async run there are several"
                )
            if self.runtime.delay != "gradient":
                raise refused(
                    f"`algo` acktr needs `delay` gradient: its trust region starts at the policy that acted, got "
                    f"{self.runtime.delay}"
                )
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # pydantic puts a parametrised class where pickle can't find it, unless it was made at a module's top level.
        return _restore, (self.__pydantic_generic_metadata__["args"], dict(self))


def _restore(arguments: tuple[Any, ...], values: dict[str, Any]) -> Config[Any, Any]:
    return (Config[arguments] if arguments else Config)(**values)  # type: ignore[valid-type,misc]


def _nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of ``number`` just below and above ``wanted``: '4 and 8'."""
    below = next(d for d in range(min(wanted, number), 0, -1) if number % d == 0)
    above = next((d for d in range(wanted, number + 1) if number % d == 0), None)
    return str(below) if above is None else f"{below} and {above}"


AnyConfig = Config[EnvOptions, AlgorithmOptions]
