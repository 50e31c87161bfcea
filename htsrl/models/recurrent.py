"""Recurrent cores: what a policy remembers of its episode, between the trunk and the heads.

An actor makes one step for rows of many replicas, each with the state that the row before it left. A learner unrolls
whole sequences from the state that their first row had. Within a sequence an episode may end and the next one begin,
from zeros: so a sequence is cut where episodes begin, and the pieces are computed side by side, as PyTorch's packed
sequences. Nothing is masked or padded, and the loop over time is PyTorch's own.

Letters: B rows of one step, C sequences, L rows of each, F features, H outputs, S numbers of state.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Sequences:
    """C sequences of L rows each, which stand in (step, sequence) order: row l * C + c."""

    state: torch.Tensor
    """[C, S] float32 before the first row; zeros where that begins an episode."""
    begins: np.ndarray
    """[L, C] bool, on the host: the row is the first of an episode, so that nothing before it counts."""

    def named(self) -> dict[str, torch.Tensor]:
        """Both by name."""
        return {"state": self.state, "begins": torch.from_numpy(self.begins)}


@dataclass(frozen=True)
class Packing:
    """Sequences cut into E pieces of one episode each, the longest first, and how to read them step by step."""

    order: np.ndarray
    """[L * C] int64: all first rows of the pieces, then all second ones, and so on."""
    rows_per_step: np.ndarray
    """[longest piece] int64: how many pieces have such a row."""
    sequence: np.ndarray
    """[E] int64: the sequence that the piece is cut from."""
    first: np.ndarray
    """[E] bool: it is the first of its sequence, and begins with that one's state; all others begin with zeros."""


def pack(begins: np.ndarray) -> Packing:
    """How to read sequences whose episodes begin at ``begins`` [L, C] bool."""
    L, C = begins.shape
    starts = begins.copy()
    starts[0] = True
    sequence, step = np.nonzero(starts.T)  # sequence by sequence, so that the next start is where a piece ends
    at = sequence * L + step
    length = np.diff(at, append=L * C)
    longest_first = np.argsort(-length, kind="stable")
    sequence, step, length = sequence[longest_first], step[longest_first], length[longest_first]
    has_row = length > np.arange(length[0])[:, None]  # [longest piece, E]
    row, piece = np.nonzero(has_row)
    return Packing(
        order=(step[piece] + row) * C + sequence[piece],
        rows_per_step=has_row.sum(1),
        sequence=sequence,
        first=step == 0,
    )


class Core(nn.Module):
    """One layer of LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014) cells: [B, F] to [B, H].

    A state is what the next row starts from, [B, S] float32: of an LSTM its output and its cell side by side, S = 2H,
    of a GRU its output, S = H.
    """

    def __init__(self, kind: str, inputs: int, size: int, rng: torch.Generator) -> None:
        super().__init__()
        # On 'meta' PyTorch's own initialisation draws nothing from the global generator
        made = nn.LSTM if kind == "lstm" else nn.GRU
        self.layer: nn.RNNBase = made(inputs, size, device="meta").to_empty(device="cpu")
        self.parts = 2 if kind == "lstm" else 1
        """How many vectors [B, H] a state is made of."""
        self.state_size = self.parts * size
        self.row_bytes = 4 * len(self.layer.all_weights[0][0])
        """Bytes of the widest tensor that a row becomes: its gates."""
        *matrices, bias, other_bias = (weight.detach() for weight in self.layer.all_weights[0])
        for matrix in matrices:
            for gate in matrix.split(size):
                nn.init.orthogonal_(gate, generator=rng)
        nn.init.zeros_(bias)
        nn.init.zeros_(other_bias)
        if kind == "lstm":
            # The gates are those of input, forgetting, cell and output: a new cell remembers (Jozefowicz et al. 2015)
            nn.init.ones_(bias[size : 2 * size])

    def step(self, features: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [B, H] and the state [B, S] after a row, for ``features`` [B, F] and the ``state`` [B, S] before."""
        (weights,) = self.layer.all_weights
        if self.parts == 1:
            out = torch.gru_cell(features, state, *weights)
            return out, out
        out, cell = torch.lstm_cell(features, state.chunk(2, -1), *weights)
        return out, torch.cat((out, cell), -1)

    def forward(self, features: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """Outputs [L * C, H] for the rows of ``sequences``, whose ``features`` are [L * C, F]."""
        assert len(features) == sequences.begins.size
        packing = pack(sequences.begins)

        def there(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(features.device)

        rows = features.index_select(0, there(packing.order))
        state = sequences.state.index_select(0, there(packing.sequence)) * there(packing.first)[:, None]
        start = [part[None].contiguous() for part in state.chunk(self.parts, -1)]
        # cuDNN wants all weights in one block of its own, and its kernels are not always the same
        with torch.backends.cudnn.flags(enabled=False) if features.is_cuda else nullcontext():
            packed = PackedSequence(rows, torch.from_numpy(packing.rows_per_step))
            out, _ = self.layer(packed, tuple(start) if self.parts == 2 else start[0])
        return out.data.index_select(0, there(np.argsort(packing.order)))
