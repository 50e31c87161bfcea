"""Networks: what stands between an observation and the policy's parameters and value.

Images arrive as rows [B, H, W, C]. Seen through ``permute`` that *is* a channels_last [B, C, H, W] tensor, the layout
in which CPU convolutions are fastest, so nothing is reordered on the way in; convolutions keep it, and the flattened
features are read in memory order (H, W, C), so nothing is reordered on the way out either.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from htsrl.config import NetworkOptions
from htsrl.envs.spec import EnvSpec, Part
from htsrl.errors import ConfigError
from htsrl.models.heads import DiagonalGaussian, Head, mask_logits
from htsrl.models.normalize import Normalize
from htsrl.models.recurrent import Core, Sequences
from htsrl.models.sparse import SCALE, SparseConv

# Gains of the orthogonal initialisation: hidden layers keep the scale of a rectified signal, the first policy is close
# to uniform, values start at the features' own scale (Engstrom et al. 2020 and Andrychowicz et al. 2021 measure it).
HIDDEN_GAIN = math.sqrt(2.0)
POLICY_GAIN = 0.01
VALUE_GAIN = 1.0

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class ActorCritic(nn.Module):
    """A trunk, and on top of it a policy and a value function; ``head`` says what the policy's parameters mean.

    With a recurrent ``core`` between them, policy and value of a row also depend on the rows of its episode before it.
    """

    custom = False
    """True for a network of the user's own, of which nothing is known but what it returns."""

    def __init__(
        self,
        head: Head,
        trunk: nn.Module,
        policy: nn.Module,
        value: nn.Module,
        initial_log_std: float,
        core: Core | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.trunk = trunk
        self.policy = policy
        self.value = value
        self.core = core
        self.row_bytes = 0
        """Bytes of the widest tensor that one observation becomes on its way; ``build_model`` sets it."""
        self.bf16 = False
        """Whether the trunk computes in bfloat16; policy and value don't. ``build_model`` sets it."""
        self.normalize: Normalize | None = None
        """What observations go through first, if anything; ``build_model`` sets it."""
        self.mask: slice | None = None
        """Where in packed observations the action mask is; ``build_model`` sets it."""
        self.blank = torch.empty(0)
        """A few observations [B, *obs] of zeros, to see what the network does; ``build_model`` sets it."""
        self.log_std: nn.Parameter | None = None
        if isinstance(head, DiagonalGaussian) and head.state_dependent:
            last = policy[-1] if isinstance(policy, nn.Sequential) else policy
            assert isinstance(last, nn.Linear)
            nn.init.constant_(last.bias[head.dimensions :], initial_log_std)
        elif isinstance(head, DiagonalGaussian):
            self.log_std = nn.Parameter(torch.full((head.dimensions,), float(initial_log_std)))

    @property
    def state_size(self) -> int:
        """S: numbers of recurrent state; 0 without."""
        return 0 if self.core is None else self.core.state_size

    def forward(self, obs: torch.Tensor, sequences: Sequences | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Policy parameters [B, P] and value [B], float32, for ``obs`` [B, *obs] in the environment's dtype.

        With a recurrent core the rows are those of ``sequences``, B = L * C; without, there are none.
        """
        features = self.features(obs)
        assert (self.core is None) == (sequences is None)
        if self.core is not None:
            features = self.core(features, sequences)
        return self.outputs(obs, features)

    def step(self, obs: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Policy parameters [B, P] and value [B] of one row each; with a recurrent core, from its state [B, S].

        Then the state [B, S] after the row comes third.
        """
        features = self.features(obs)
        if self.core is None:
            return self.outputs(obs, features)
        features, after = self.core.step(features, *state)
        return *self.outputs(obs, features), after

    def blank_state(self, rows: int) -> tuple[torch.Tensor, ...]:
        """What :meth:`step` takes beside ``rows`` observations that begin an episode."""
        return () if self.core is None else (torch.zeros(rows, self.state_size),)

    def features(self, obs: torch.Tensor) -> torch.Tensor:
        """[B, F] float32: what the trunk makes of ``obs``."""
        if self.normalize is not None:
            obs = self.normalize(obs)
        if self.bf16:
            # Weights that were rounded once are not cached: the actor's are rounded already, the learner's change
            with torch.autocast(obs.device.type, torch.bfloat16, cache_enabled=False):
                return self.trunk(obs).float()
        return self.trunk(obs)

    def outputs(self, obs: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Policy parameters [B, P] and value [B] for [B, F] that were made of ``obs``, which may hold a mask."""
        params = self.policy(features)
        if self.mask is not None:
            params = mask_logits(params, obs[..., self.mask])
        if self.log_std is not None:
            params = torch.cat((params, self.log_std.expand_as(params)), -1)
        return params, self.value(features).squeeze(-1)


# ------------------------------------------------------------------------------------------------------ the networks


def mlp(spec: EnvSpec, head: Head, options: NetworkOptions, rng: torch.Generator) -> ActorCritic:
    """For vectors: a policy and a value network, each with hidden layers of its own.

    In front of a recurrent core both have the same: a row's state is one.
    """
    trunk = Vectors(spec.parts) if spec.parts else nn.Flatten()
    inputs = trunk.size if isinstance(trunk, Vectors) else math.prod(spec.observation_shape)

    if options.recurrent != "none":
        hidden, features = hidden_layers(inputs, options, rng)
        return on_trunk(nn.Sequential(trunk, *hidden), features, head, options, rng)

    def layers(outputs: int, gain: float) -> nn.Sequential:
        hidden, features = hidden_layers(inputs, options, rng)
        return nn.Sequential(*hidden, linear(features, outputs, gain, rng))

    policy = layers(head.output_size, POLICY_GAIN)
    return ActorCritic(head, trunk, policy, layers(1, VALUE_GAIN), options.initial_log_std)


def hidden_layers(inputs: int, options: NetworkOptions, rng: torch.Generator) -> tuple[list[nn.Module], int]:
    """The hidden layers of an MLP on ``inputs`` numbers, and how many come out."""
    hidden: list[nn.Module] = []
    for size in options.hidden_sizes:
        hidden += [linear(inputs, size, HIDDEN_GAIN, rng), ACTIVATIONS[options.activation]()]
        inputs = size
    return hidden, inputs


def nature_cnn(spec: EnvSpec, head: Head, options: NetworkOptions, rng: torch.Generator) -> ActorCritic:
    """The network of Mnih et al. 2015, which the HTS-RL paper also uses for football's 72x96x16 minimap."""
    shape, dtype = spec.observation_shape, spec.observation_dtype
    return on_trunk(*nature_trunk(shape, dtype, spec.env_id, options, rng, spec.sparse), head, options, rng)


def nature_trunk(
    shape: tuple[int, ...],
    dtype: np.dtype,
    env_id: str,
    options: NetworkOptions,
    rng: torch.Generator,
    sparse: bool = False,
) -> tuple[nn.Module, int]:
    """Its layers for images [H, W, C] of ``dtype``, ``sparse`` ones or not, and how many features they make."""
    height, width, channels = shape
    layers: list[nn.Module] = []
    for outputs, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        if layers:
            layers.append(conv(channels, outputs, kernel, stride, 0, HIDDEN_GAIN, rng))
        elif sparse:
            layers.append(sparse_conv(shape, outputs, kernel, stride, 0, HIDDEN_GAIN, options, rng))
        elif options.precision == "bf16":
            first = conv(channels, outputs, kernel, stride, 0, HIDDEN_GAIN, rng, BlockConv)
            assert isinstance(first, BlockConv)
            first.scale = SCALE if dtype == np.uint8 else 1.0
            layers += [BlockImage(stride), first]
        else:
            layers.append(ScaledImage(dtype, options))
            layers.append(conv(channels, outputs, kernel, stride, 0, HIDDEN_GAIN, rng))
        # The sparse one's output is a view, of which autograd copies whatever is written into it
        layers.append(nn.ReLU(inplace=not isinstance(layers[-1], SparseConv)))
        height, width, channels = (height - kernel) // stride + 1, (width - kernel) // stride + 1, outputs
    if min(height, width) < 1:
        size = "x".join(map(str, shape))
        raise ConfigError(
            f"network '{options.network}' needs images of at least 36x36 pixels and those of {env_id} are {size}: "
            "use 'impala'"
        )
    layers += [FlatImage(), linear(height * width * channels, 512, HIDDEN_GAIN, rng), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers), 512


def impala_cnn(spec: EnvSpec, head: Head, options: NetworkOptions, rng: torch.Generator) -> ActorCritic:
    """The deep residual network of Espeholt et al. 2018 (figure 3); its LSTM is a recurrent core."""
    shape, dtype = spec.observation_shape, spec.observation_dtype
    return on_trunk(*impala_trunk(shape, dtype, options, rng, spec.sparse), head, options, rng)


def impala_trunk(
    shape: tuple[int, ...], dtype: np.dtype, options: NetworkOptions, rng: torch.Generator, sparse: bool = False
) -> tuple[nn.Module, int]:
    """Its layers for images [H, W, C] of ``dtype``, ``sparse`` ones or not, and how many features they make."""
    height, width, channels = shape
    layers: list[nn.Module] = [] if sparse else [ScaledImage(dtype, options)]
    sections = (16, 32, 32)
    for outputs in sections:
        if layers:
            layers.append(conv(channels, outputs, 3, 1, 1, HIDDEN_GAIN, rng))
        else:
            layers.append(sparse_conv(shape, outputs, 3, 1, 1, HIDDEN_GAIN, options, rng))
        layers.append(nn.MaxPool2d(3, 2, 1))
        layers += [Residual(outputs, 2 * len(sections), rng) for _ in range(2)]
        height, width, channels = -(-height // 2), -(-width // 2), outputs
    layers += [nn.ReLU(), FlatImage(), linear(height * width * channels, 256, HIDDEN_GAIN, rng), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers), 256


def on_trunk(trunk: nn.Module, features: int, head: Head, options: NetworkOptions, rng: torch.Generator) -> ActorCritic:
    """A linear policy and a linear value function on the [B, ``features``] that ``trunk`` makes of observations.

    Between them stands the recurrent core, if there is to be one.
    """
    core = None
    if options.recurrent != "none":
        core = Core(options.recurrent, features, options.recurrent_size, rng)
        features = options.recurrent_size
    policy = linear(features, head.output_size, POLICY_GAIN, rng)
    return ActorCritic(head, trunk, policy, linear(features, 1, VALUE_GAIN, rng), options.initial_log_std, core)


def blank_observations(spec: EnvSpec) -> torch.Tensor:
    """A few observations [B, *obs] of zeros, to see what a network makes of them."""
    return torch.from_numpy(np.zeros((4, *spec.observation_shape), spec.observation_dtype))


def widest_row(model: ActorCritic, obs: torch.Tensor) -> int:
    """Bytes per row of the widest output of any module of ``model`` for ``obs`` [B, *obs]."""
    sparse = any(isinstance(module, SparseConv) for module in model.modules())
    sizes = [obs[0].numel() * (1 if sparse else 4)]

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.numel() * output.element_size() // len(obs))

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    with torch.no_grad():
        model.step(obs, *model.blank_state(len(obs)))
    for hook in hooks:
        hook.remove()
    return max(sizes) if model.core is None else max(*sizes, model.core.row_bytes)


# --------------------------------------------------------------------------------------------------------- the parts


class Vectors(nn.Module):
    """The vectors among the parts of packed observations [B, bytes], side by side: [B, size] float32."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.parts = tuple(part for part in parts if part.kind == "vector")
        self.size = sum(math.prod(part.shape) for part in self.parts)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([part_of(rows, part) for part in self.parts], -1)


def part_of(rows: torch.Tensor, part: Part) -> torch.Tensor:
    """``part`` [B, *shape] of packed observations [B, bytes], in the part's dtype; of images, a view."""
    seen = rows[..., part.bytes]
    # A view of another dtype is nothing that torch.jit can record
    return torch.view_copy(seen, torch.float32) if part.dtype == np.float32 else seen.unflatten(-1, part.shape)


class ScaledImage(nn.Module):
    """[B, H, W, C] to [B, C, H, W] floats, channels_last; uint8 from 0..255 to 0..1, other dtypes as they are."""

    def __init__(self, dtype: np.dtype, options: NetworkOptions) -> None:
        super().__init__()
        self.scale = SCALE if dtype == np.uint8 else None
        # Bytes are exact in bfloat16, so the first convolution may as well read half as much
        self.dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        image = image.permute(0, 3, 1, 2).to(self.dtype)
        return image if self.scale is None else image.mul_(self.scale)


class BlockImage(nn.Module):
    """[B, H, W, C] to [B, s²·C, H/s, W/s] bfloat16, channels_last: the pixels of each s x s block side by side.

    Bytes stay what they are, 0..255: :class:`BlockConv` scales its weights instead, which are far fewer.
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        B, H, W, C = image.shape
        s, h, w = self.block, H // self.block, W // self.block
        lines = image[:, : h * s, : w * s].reshape(B, h, s, w, s * C)
        blocks = torch.cat([lines[:, :, line] for line in range(s)], -1)  # as bytes: in whole runs of s·C
        return blocks.to(torch.bfloat16).permute(0, 3, 1, 2)


class BlockConv(nn.Conv2d):
    """A convolution of kernel 2s and stride s as one of kernel 2 and stride 1 over blocks of s x s pixels.

    The same sums, of pixels times ``scale``. PyTorch 2.13's bfloat16 kernel for AMX gets kernel 8, stride 4 over 16
    channels wrong, and this form is as fast.
    """

    scale = 1.0

    def forward(self, blocks: torch.Tensor) -> torch.Tensor:
        outputs, C, kernel, _ = self.weight.shape
        s = self.stride[0]
        assert kernel == 2 * s
        # Rounded before it is scaled, as an actor's weights are
        weight = self.weight.bfloat16().float() * self.scale
        weight = weight.permute(0, 2, 3, 1).reshape(outputs, 2, s, 2, s, C).transpose(2, 3)
        weight = weight.reshape(outputs, 2, 2, s * s * C).permute(0, 3, 1, 2)
        return F.conv2d(blocks, weight, self.bias)


class FlatImage(nn.Module):
    """[B, C, H, W] channels_last to [B, H*W*C]: a view."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.permute(0, 2, 3, 1).flatten(1)


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))), both 3x3 with ``channels`` in and out.

    Each of the network's ``branches`` residual branches adds its share of variance, so that features keep their scale.
    """

    def __init__(self, channels: int, branches: int, rng: torch.Generator) -> None:
        super().__init__()
        self.first = conv(channels, channels, 3, 1, 1, HIDDEN_GAIN, rng)
        self.second = conv(channels, channels, 3, 1, 1, HIDDEN_GAIN / math.sqrt(branches), rng)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.relu_(self.first(F.relu(x))))


def linear(inputs: int, outputs: int, gain: float, rng: torch.Generator) -> nn.Linear:
    """A layer with orthogonal weights and zero bias."""
    return _initialised(nn.utils.skip_init(nn.Linear, inputs, outputs), gain, rng)


def conv(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int,
    padding: int,
    gain: float,
    rng: torch.Generator,
    kind: type[nn.Conv2d] = nn.Conv2d,
) -> nn.Conv2d:
    """A square convolution with orthogonal weights and zero bias, channels_last."""
    layer = nn.utils.skip_init(kind, inputs, outputs, kernel, stride, padding)
    return _initialised(layer, gain, rng).to(memory_format=torch.channels_last)


def sparse_conv(
    shape: tuple[int, ...],
    outputs: int,
    kernel: int,
    stride: int,
    padding: int,
    gain: float,
    options: NetworkOptions,
    rng: torch.Generator,
) -> SparseConv:
    """A square convolution of images [H, W, C] = ``shape`` of mostly zeros, with weights as of :func:`conv`."""
    height, width, channels = shape
    rounded = options.precision == "bf16"
    layer = SparseConv(channels, outputs, kernel, stride, padding, (height, width), rounded)
    _initialised(layer, gain, rng).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return layer


def _initialised(layer: Layer, gain: float, rng: torch.Generator) -> Layer:
    # Layers come from skip_init because PyTorch's own initialisation draws from the global generator.
    nn.init.orthogonal_(layer.weight, gain, generator=rng)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
