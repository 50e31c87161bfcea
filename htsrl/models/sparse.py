"""The first convolution over images of which nearly every byte is 0, at the cost of those that are not.

Football's minimap marks players and ball: 32 to 100 of the 110,592 bytes of a stack. A dense convolution multiplies
all of them, which is two thirds of what the paper's network computes; this one looks up what each marked byte adds to
the few outputs that see it. On one core its forward and backward pass take 80 µs a row instead of 490.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SCALE = 1.0 / 255.0
"""From the bytes of an image to 0..1."""

_WORD = 8


class SparseConv(nn.Conv2d):
    """A convolution of images [B, H, W, C] uint8, scaled from 0..255 to 0..1: [B, O, h, w] channels_last.

    The same function as a dense one, up to rounding, of any image; only the time depends on how many bytes are 0. A
    row's outputs are sums in an order of its own, so that they don't depend on the rows beside it. On a GPU, where
    shapes that depend on values would make the host wait, it is the dense convolution.

    ``rounded`` computes in bfloat16 what autocast would: weights and outputs.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int,
        padding: int,
        size: tuple[int, int],
        rounded: bool = False,
    ) -> None:
        """``size`` is H, W; the rest as of any square convolution."""
        super().__init__(in_channels, out_channels, kernel_size, stride, padding)
        self.rounded = rounded
        self.height, self.width = ((n + 2 * padding - kernel_size) // stride + 1 for n in size)
        taps = kernel_size**2 * in_channels
        self._columns = taps + 1  # the last one adds nothing
        outputs, column = self._reach(size)
        keys = np.where(column < taps, outputs * self._columns + column, taps)
        # [H * W * C, R]: the outputs that see a byte, each with the weights by which it does, as one number
        self.register_buffer("keys", torch.from_numpy(keys.reshape(-1, keys.shape[-1])), persistent=False)

    keys: torch.Tensor

    def reset_parameters(self) -> None:
        """Nothing: whoever builds the network says what it starts from."""

    def _reach(self, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Of every byte, R outputs y * w + x and rows of weights [H, W, C, R], that of zeros where there are less."""
        kernel, stride, padding, C = self.kernel_size[0], self.stride[0], int(self.padding[0]), self.in_channels
        most = -(-kernel // stride)  # outputs along one axis
        axes = []
        for pixels, places in zip(size, (self.height, self.width), strict=True):
            place = (np.arange(pixels) + padding)[:, None] // stride - np.arange(most)
            tap = (np.arange(pixels) + padding)[:, None] - place * stride
            axes.append((place, tap, (place >= 0) & (place < places) & (tap < kernel)))
        (y, ky, on_y), (x, kx, on_x) = axes
        seen = on_y[:, None, :, None] & on_x[None, :, None, :]  # [H, W, most, most]
        outputs = y[:, None, :, None] * self.width + x[None, :, None, :]
        tap = (ky[:, None, :, None] * kernel + kx[None, :, None, :]) * C
        column = tap[:, :, None] + np.arange(C)[:, None, None]  # [H, W, C, most, most]
        column = np.where(seen[:, :, None], column, kernel**2 * C)
        outputs = np.broadcast_to(outputs[:, :, None], column.shape)
        return outputs.reshape(*column.shape[:3], -1), column.reshape(*column.shape[:3], -1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if image.is_cuda:
            return self._conv_forward(self.seen(image), self.weight, self.bias)
        B, (outputs, C, K, _) = len(image), self.weight.shape
        places = marked(image)
        row = places.div(image[0].numel(), rounding_mode="floor")
        value = image.reshape(-1).index_select(0, places).float().mul_(SCALE)

        # All that is to be added up, [n * R], output by output
        area = self.height * self.width
        keys = self.keys.index_select(0, places - row * image[0].numel()).add_(row[:, None] * (area * self._columns))
        keys, order = keys.view(-1).sort()
        output = keys.div(self._columns, rounding_mode="floor")
        column = keys - output * self._columns
        value = value.index_select(0, order.div_(self.keys.shape[1], rounding_mode="floor"))
        count = output.bincount(minlength=B * area)
        start = count.cumsum(0) - count

        weight, bias = self.weight, self.bias
        assert bias is not None
        if self.rounded:
            weight, bias = weight.bfloat16().float(), bias.bfloat16().float()
        table = F.pad(weight.permute(2, 3, 1, 0).reshape(K * K * C, outputs), (0, 0, 0, 1))
        sums = F.embedding_bag(column, table, start, mode="sum", per_sample_weights=value)
        sums = (sums + bias).view(B, self.height, self.width, outputs).permute(0, 3, 1, 2)
        return sums.bfloat16() if self.rounded else sums

    def seen(self, image: torch.Tensor) -> torch.Tensor:
        """``image`` as a dense convolution would take it: [B, C, H, W] float32, channels_last."""
        return image.permute(0, 3, 1, 2).float().mul_(SCALE)


def marked(image: torch.Tensor) -> torch.Tensor:
    """Where ``image`` [B, ...] uint8 is not 0: [n] int64 in the flat image, in order."""
    flat = image.reshape(-1)
    if len(flat) % _WORD:
        return flat.nonzero().squeeze(1)
    # Eight at a time, as nearly all are 0; a view of another dtype is nothing that torch.jit can record
    words = torch.view_copy(flat, torch.int64) if torch.jit.is_tracing() else flat.view(torch.int64)
    some = words.nonzero().squeeze(1)
    which = flat.view(-1, _WORD).index_select(0, some).nonzero()
    return some.index_select(0, which[:, 0]) * _WORD + which[:, 1]


def few_marks(rng: np.random.Generator, shape: tuple[int, ...], most: int = 128) -> np.ndarray:
    """Images [B, H, W, C] uint8 of such a kind: up to ``most`` bytes of each are not 0, and may be anything."""
    images = np.zeros((shape[0], int(np.prod(shape[1:]))), np.uint8)
    for row in images:
        count = int(rng.integers(most + 1))
        row[rng.integers(0, row.size, count)] = rng.integers(1, 256, count)
    return images.reshape(shape)
