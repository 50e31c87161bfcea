"""Networks: what stands between an observation and the policy's parameters and value.

Images arrive as rows [B, H, W, C] uint8. Seen through ``permute`` that *is* a channels_last [B, C, H, W] tensor, the
layout in which CPU convolutions are fastest, so nothing is reordered on the way in; the convolutions keep it, and the
flattened features are read in memory order (H, W, C), so nothing is reordered on the way out either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from htsrl.errors import ConfigError
from htsrl.models.heads import DiagonalGaussian, Head

# Gains of the orthogonal initialisation (Engstrom et al. 2020 measure how much they matter): hidden layers keep the
# variance of a rectified signal, the first policy is close to uniform, values start at the features' own scale.
HIDDEN_GAIN = math.sqrt(2.0)
POLICY_GAIN = 0.01
VALUE_GAIN = 1.0


class ActorCritic(nn.Module):
    """A trunk, and on top of it a policy and a value function; ``head`` says what the policy's parameters mean."""

    def __init__(
        self, head: Head, trunk: nn.Module, policy: nn.Module, value: nn.Module, initial_log_std: float = 0.0
    ) -> None:
        super().__init__()
        self.head = head
        self.trunk = trunk
        self.policy = policy
        self.value = value
        self.log_std: nn.Parameter | None = None
        if isinstance(head, DiagonalGaussian):
            self.log_std = nn.Parameter(torch.full((head.dimensions,), float(initial_log_std)))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Policy parameters [B, P] and value [B], float32, for ``obs`` [B, *obs] in the environment's dtype."""
        features = self.trunk(obs)
        params = self.policy(features)
        if self.log_std is not None:
            params = torch.cat((params, self.log_std.expand_as(params)), -1)
        return params, self.value(features).squeeze(-1)


# ------------------------------------------------------------------------------------------------------ the networks


def mlp(
    head: Head,
    observation_shape: tuple[int, ...],
    hidden_sizes: Sequence[int],
    activation: type[nn.Module],
    initial_log_std: float,
    rng: torch.Generator,
) -> ActorCritic:
    """Policy and value networks of their own, each with ``hidden_sizes``, for vectors."""

    def layers(outputs: int, gain: float) -> nn.Sequential:
        sizes = [math.prod(observation_shape), *hidden_sizes]
        hidden = [
            module
            for inputs, size in zip(sizes, sizes[1:], strict=False)
            for module in (linear(inputs, size, HIDDEN_GAIN, rng), activation())
        ]
        return nn.Sequential(*hidden, linear(sizes[-1], outputs, gain, rng))

    return ActorCritic(
        head, nn.Flatten(), layers(head.output_size, POLICY_GAIN), layers(1, VALUE_GAIN), initial_log_std
    )


def nature_cnn(
    head: Head, observation_shape: tuple[int, ...], initial_log_std: float, rng: torch.Generator
) -> ActorCritic:
    """The network of Mnih et al. 2015 (Nature 518), which the HTS-RL paper also uses for football's 72x96x16 minimap."""
    height, width, channels = observation_shape
    layers: list[nn.Module] = [ScaledImage()]
    for outputs, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layers += [conv(channels, outputs, kernel, stride, 0, HIDDEN_GAIN, rng), nn.ReLU(inplace=True)]
        height, width, channels = (height - kernel) // stride + 1, (width - kernel) // stride + 1, outputs
    if min(height, width) < 1:
        raise ConfigError(
            f"the Nature CNN needs images of at least 36x36 pixels, not {_by(observation_shape)}: use --network.network impala"
        )
    layers += [FlatImage(), linear(height * width * channels, 512, HIDDEN_GAIN, rng), nn.ReLU(inplace=True)]
    return _shared(head, nn.Sequential(*layers), 512, initial_log_std, rng)


def impala_cnn(
    head: Head, observation_shape: tuple[int, ...], initial_log_std: float, rng: torch.Generator
) -> ActorCritic:
    """The deep residual network of IMPALA (Espeholt et al. 2018, figure 3), without its LSTM."""
    height, width, channels = observation_shape
    layers: list[nn.Module] = [ScaledImage()]
    sections = (16, 32, 32)
    for outputs in sections:
        layers += [conv(channels, outputs, 3, 1, 1, HIDDEN_GAIN, rng), nn.MaxPool2d(3, 2, 1)]
        layers += [Residual(outputs, 2 * len(sections), rng) for _ in range(2)]
        height, width, channels = -(-height // 2), -(-width // 2), outputs
    layers += [nn.ReLU(), FlatImage(), linear(height * width * channels, 256, HIDDEN_GAIN, rng), nn.ReLU(inplace=True)]
    return _shared(head, nn.Sequential(*layers), 256, initial_log_std, rng)


def _shared(head: Head, trunk: nn.Module, features: int, initial_log_std: float, rng: torch.Generator) -> ActorCritic:
    """Policy and value on one trunk."""
    policy = linear(features, head.output_size, POLICY_GAIN, rng)
    return ActorCritic(head, trunk, policy, linear(features, 1, VALUE_GAIN, rng), initial_log_std)


# --------------------------------------------------------------------------------------------------------- the parts


class ScaledImage(nn.Module):
    """[B, H, W, C] uint8 in 0..255 to [B, C, H, W] float32 in 0..1, channels_last."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.permute(0, 3, 1, 2).to(torch.float32).mul_(1.0 / 255.0)


class FlatImage(nn.Module):
    """[B, C, H, W] channels_last to [B, H*W*C]: a view."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.permute(0, 2, 3, 1).flatten(1)


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))), both 3x3 with ``channels`` in and out.

    The network's ``branches`` residual branches each add a share of the variance, so that features keep their scale.
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
    inputs: int, outputs: int, kernel: int, stride: int, padding: int, gain: float, rng: torch.Generator
) -> nn.Conv2d:
    """A square convolution with orthogonal weights and zero bias, channels_last."""
    layer = nn.utils.skip_init(nn.Conv2d, inputs, outputs, kernel, stride, padding)
    return _initialised(layer, gain, rng).to(memory_format=torch.channels_last)


def _initialised(layer, gain: float, rng: torch.Generator):
    # skip_init above: PyTorch's own initialisation would draw from the global generator.
    nn.init.orthogonal_(layer.weight, gain, generator=rng)
    nn.init.zeros_(layer.bias)
    return layer


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
