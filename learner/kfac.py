"""K-FAC: the Fisher matrix of a network as one Kronecker product per layer.

Martens and Grosse 2015 for linear layers, Grosse and Martens 2016 for convolutions. A layer computes s = W a at each of
its S positions (one for a linear layer), where a is the input there, with a 1 appended if there is a bias. With g the
derivative of log p(y | x) by s, at a y drawn from the network's own distribution p, the layer's block of the Fisher
matrix is that of the products g aᵀ, and taken to be

    F = A ⊗ G,    A = E[1/S Σ_s a aᵀ],    G = E[Σ_s g gᵀ],

the first factor from inputs alone, the second from derivatives alone. That is exact where inputs and derivatives are
independent and, for several positions, derivatives of different positions are uncorrelated. Between layers: nothing.

Letters: M rows, S positions, I inputs of a layer (with the appended 1), O outputs, K parts in which an update's rows
are taken, each in a thread of its own. All tensors are float32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from htsrl.errors import ConfigError
from htsrl.learner.checks import check
from htsrl.learner.minibatches import piece_rows
from htsrl.models import ActorCritic
from htsrl.models.sparse import SparseConv

Layer = nn.Linear | nn.Conv2d

KNOWN = "Linear, and Conv2d with one group and zeros as padding"


@dataclass(frozen=True)
class Block:
    """A layer's block of the Fisher matrix. All tensors are written in place."""

    name: str
    layer: Layer
    inputs: torch.Tensor
    """[I, I] A, averaged over updates."""
    outputs: torch.Tensor
    """[O, O] G, averaged over updates."""
    inputs_parts: torch.Tensor
    """[K, I, I] what each part of this update's rows adds to A."""
    outputs_parts: torch.Tensor
    """[K, O, O] what it adds to G."""
    inputs_values: torch.Tensor
    """[I] eigenvalues of A when it was last decomposed."""
    inputs_basis: torch.Tensor
    """[I, I] their eigenvectors, in columns."""
    outputs_values: torch.Tensor
    """[O] eigenvalues of G."""
    outputs_basis: torch.Tensor
    """[O, O] their eigenvectors."""

    @property
    def inputs_now(self) -> torch.Tensor:
        """[I, I] A of this update's rows, once :func:`recording` has ended."""
        return self.inputs_parts[0]

    @property
    def outputs_now(self) -> torch.Tensor:
        """[O, O] G of this update's rows."""
        return self.outputs_parts[0]

    def kept(self) -> dict[str, torch.Tensor]:
        """What the next update needs, by name."""
        fields = ("inputs", "outputs", "inputs_values", "inputs_basis", "outputs_values", "outputs_basis")
        return {f"{self.name}/{field}": getattr(self, field) for field in fields}


def make_blocks(model: ActorCritic, parts: int = 1) -> list[Block]:
    """A block, all zeros, for each layer of ``model``, on the device of its parameters.

    Args:
        model: whose layers are looked at, and what they are given in one pass over a few blank observations.
        parts: K.

    Raises:
        ConfigError: ``model`` has parameters in a layer that K-FAC doesn't know, or uses a layer in a way that it
            doesn't know. ``log_std``, which belongs to no layer, is not looked at.
    """
    blocks = []
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        own = [] if module is model else list(module.parameters(recurse=False))
        if not own:
            continue
        if not _is_known(module):
            raise _refusal(name, module, f"it knows {KNOWN}")
        for parameter in own:
            if owners.setdefault(id(parameter), name) != name:
                raise _refusal(name, module, f"it shares a parameter with {owners[id(parameter)]}")
        blocks.append(_empty_block(name, module, parts))

    # How often each layer is used, and whether it sees one row per observation, shows when the network runs.
    obs = model.blank.to(next(model.parameters()).device)
    with recording(blocks) as tapes:
        model(obs)
    for block in blocks:
        seen = [note.x for note in tapes[0].notes.made if note.block is block]
        if len(seen) > 1:
            raise _refusal(block.name, block.layer, f"one pass uses it {len(seen)} times, and it must be used once")
        if seen and len(seen[0]) != len(obs):
            raise _refusal(block.name, block.layer, f"{len(obs)} observations reach it as {len(seen[0])} rows")
    return blocks


def _is_known(module: nn.Module) -> bool:
    # Exactly these classes: what a subclass computes, or whether its owner calls it at all, is its own affair.
    if isinstance(module, nn.Conv2d) and type(module) in (nn.Conv2d, SparseConv):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


def _refusal(name: str, module: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"acktr can't train the layer '{name}' ({type(module).__name__}) of this network: {reason}; change the network "
        "or use another algorithm"
    )


def _empty_block(name: str, layer: nn.Module, parts: int) -> Block:
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    outputs, inputs = weight_rows(layer, layer.weight.detach(), layer.bias).shape
    zeros = layer.weight.new_zeros
    return Block(
        name=name,
        layer=layer,
        inputs=zeros(inputs, inputs),
        outputs=zeros(outputs, outputs),
        inputs_parts=zeros(parts, inputs, inputs),
        outputs_parts=zeros(parts, outputs, outputs),
        inputs_values=zeros(inputs),
        inputs_basis=zeros(inputs, inputs),
        outputs_values=zeros(outputs),
        outputs_basis=zeros(outputs, outputs),
    )


# ------------------------------------------------------------------------------------- a layer's tensors as rows


def weight_rows(layer: Layer, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """W [O, I] of a layer's weight and bias, or of what belongs to them, as a copy."""
    rows = weight.flatten(1)
    return rows.clone() if bias is None else torch.cat((rows, bias.detach()[:, None]), 1)


def input_rows(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """a [M, S, I] of a layer's input: [M, ..., inputs] of a linear layer, [M, C, H, W] of a convolution."""
    if isinstance(layer, SparseConv):
        x = layer.seen(x)
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        rows = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)
    else:
        rows = x.reshape(len(x), -1, x.shape[-1])
    return rows if layer.bias is None else F.pad(rows, (0, 1), value=1.0)


def output_rows(layer: Layer, g: torch.Tensor) -> torch.Tensor:
    """g [M, S, O] of a derivative by a layer's output: [M, ..., O] of a linear layer, [M, O, H, W] of a convolution."""
    if isinstance(layer, nn.Conv2d):
        g = g.permute(0, 2, 3, 1)
    return g.reshape(len(g), -1, g.shape[-1])


def second_moment(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Σ_m weight[m] Σ_s x xᵀ [D, D] for ``rows`` [M, S, D]."""
    sizes: dict[str, int] = {}
    check(sizes, "M S D", torch.float32, rows)
    check(sizes, "M", torch.float32, weight)
    flat = (rows * weight.sqrt()[:, None, None]).flatten(0, 1)
    return flat.T @ flat


# --------------------------------------------------------------------------------------------- the update's own rows


@dataclass(frozen=True)
class Note:
    """One use of a layer: what it was given, and where its output stands in the graph.

    An edge, not the output itself: a ReLU may write over that, and the edge still means the layer's own output.
    """

    block: Block
    x: torch.Tensor
    output: GradientEdge


class Notes(threading.local):
    """What the layers did in the forward pass that this thread made last."""

    def __init__(self) -> None:
        self.made: list[Note] = []


@dataclass(frozen=True)
class Tape:
    """The moments of one part of the rows, which one thread at a time adds to."""

    notes: Notes
    part: int

    def add_moments(self, log_likelihood: torch.Tensor, weight: torch.Tensor) -> None:
        """Add the rows of this thread's last pass to this part's moments.

        The graph stays: the pass can still be differentiated for the update itself.

        Args:
            log_likelihood: [] the sum over rows of log p(y | x), y drawn from p.
            weight: [M] of the rows; all weights of an update add up to 1.
        """
        made = self.notes.made
        derivatives = torch.autograd.grad(
            log_likelihood, [note.output for note in made], retain_graph=True, allow_unused=True
        )
        for note, derivative in zip(made, derivatives, strict=True):
            block = note.block
            _add_input_moment(block.inputs_parts[self.part], block.layer, note.x.detach(), weight)
            if derivative is not None:
                block.outputs_parts[self.part].add_(second_moment(output_rows(block.layer, derivative), weight))
        made.clear()


@contextmanager
def recording(blocks: Sequence[Block]) -> Iterator[list[Tape]]:
    """Note each use of the layers of ``blocks`` in the passes that are made meanwhile; gives a tape for each part.

    The parts' moments start at 0 and are added up at the end, in order.
    """
    notes = Notes()
    hooks = []
    for block in blocks:
        block.inputs_parts.zero_()
        block.outputs_parts.zero_()

        def note(layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor, block: Block = block) -> None:
            notes.made.append(Note(block, inputs[0], get_gradient_edge(output)))

        hooks.append(block.layer.register_forward_hook(note))
    try:
        yield [Tape(notes, part) for part in range(len(blocks[0].inputs_parts))]
    finally:
        for hook in hooks:
            hook.remove()
    for block in blocks:
        for parts in (block.inputs_parts, block.outputs_parts):
            for part in parts[1:]:
                parts[0].add_(part)


def _add_input_moment(total: torch.Tensor, layer: Layer, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Add the mean over positions of a aᵀ; a convolution's patches are many times its input, so made in pieces."""
    positions, inputs = input_rows(layer, x[:1]).shape[1:]
    size = piece_rows(4 * positions * inputs, x.device)
    for some, their_weight in zip(x.split(size), weight.split(size), strict=True):
        total.add_(second_moment(input_rows(layer, some), their_weight / positions))


def fisher_trace(blocks: Sequence[Block]) -> torch.Tensor:
    """Trace [] of this update's Fisher matrix, Σ_layers tr A tr G: finite only if every moment is."""
    return torch.stack([block.inputs_now.trace() * block.outputs_now.trace() for block in blocks]).sum()


# ------------------------------------------------------------------------------------------------ the running factors


def average(block: Block, keep: float) -> None:
    """Fold this update's moments into the running ones, which keep the share ``keep`` of what they were."""
    block.inputs.mul_(keep).add_(block.inputs_now, alpha=1.0 - keep)
    block.outputs.mul_(keep).add_(block.outputs_now, alpha=1.0 - keep)


def decompose(block: Block) -> None:
    """Find the eigenvectors and eigenvalues of both running factors: O(I³ + O³)."""
    for factor, values, basis in (
        (block.inputs, block.inputs_values, block.inputs_basis),
        (block.outputs, block.outputs_values, block.outputs_basis),
    ):
        # MKL's float32 fails on factors of few rows, which have many eigenvalues of 0, or returns NaN; this takes three
        # times as long: seconds for 3,000 inputs.
        found, vectors = torch.linalg.eigh(factor.double())
        # A second moment has no negative eigenvalue but for rounding.
        values.copy_(found.clamp_(min=0.0))
        basis.copy_(vectors)


def precondition(block: Block, damping: float) -> None:
    """Replace the layer's gradients by (A ⊗ G + damping)⁻¹ times them, for A and G as they were last decomposed."""
    layer = block.layer
    assert layer.weight.grad is not None
    gradient = weight_rows(layer, layer.weight.grad, None if layer.bias is None else layer.bias.grad)
    inside = block.outputs_basis.T @ gradient @ block.inputs_basis
    inside.div_(torch.outer(block.outputs_values, block.inputs_values).add_(damping))
    natural = block.outputs_basis @ inside @ block.inputs_basis.T
    weights = layer.weight[0].numel()
    layer.weight.grad.copy_(natural[:, :weights].view(layer.weight.shape))
    if layer.bias is not None:
        assert layer.bias.grad is not None
        layer.bias.grad.copy_(natural[:, weights])
