"""One gradient step's parts, on the one vector of all parameters: accumulate, record, clip, check."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from htsrl.errors import NonFinite
from htsrl.learner.minibatches import Batch, Rows, piece_rows
from htsrl.models import ActorCritic, FlatParameters
from htsrl.models.flat import Shard

NORMS = ("grad_norm", "grad_norm_clipped")
"""What a step records after its loss's terms."""
Loss = Callable[[torch.Tensor, torch.Tensor, Rows], tuple[torch.Tensor, torch.Tensor]]


def accumulate_gradient(
    model: ActorCritic, parameters: FlatParameters, batch: Batch, rows: Rows, loss: Loss | Sequence[Loss]
) -> torch.Tensor:
    """Leave the gradient of ``loss`` over ``rows`` [M] in ``parameters.vector.grad``; returns the loss's terms [terms].

    ``loss(params [M, P], value [M], rows)`` gives the scalar to descend and its terms for the records, all of them sums
    over rows, so that the gradient may be added up over pieces of rows: one after the other, and side by side in the
    threads of ``parameters.shards``. Which piece is whose, and the order of the sum, depend on nothing but sizes.

    A loss that adds up something of its own comes as one for each of ``parameters.parts``, which gets that part's
    pieces one after the other, each in the thread that made its forward pass.
    """

    def forward(piece: Rows, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
        params, value = model(batch.obs.index_select(0, piece.index), batch.sequences(piece))
        return loss(params, value, piece)

    def work(shard: Shard, pieces: list[Rows], loss: Loss) -> list[torch.Tensor]:
        shard.grad.zero_()
        terms = []
        for piece in pieces:
            scalar, piece_terms = forward(piece, loss)
            parts = torch.autograd.grad(scalar, parameters.tensors, allow_unused=True)
            for view, part in zip(shard.views, parts, strict=True):
                if part is not None:
                    view.add_(part)
            terms.append(piece_terms)
        return terms

    total = gradient(parameters)
    shards, count = parameters.shards, parameters.parts
    losses = loss if isinstance(loss, Sequence) else [loss] * count
    assert len(losses) == count
    pieces = list(rows.pieces(piece_rows(model.row_bytes, batch.obs.device), count, batch.length))
    if shards:
        threads = workers(count)
        parts = [threads.submit(work, shard, pieces[k::count], losses[k]) for k, shard in enumerate(shards)]
        terms = [term for part in parts for term in part.result()]
        torch.add(shards[0].grad, shards[1].grad, out=total)
        for shard in shards[2:]:
            total.add_(shard.grad)
    else:
        total.zero_()
        terms = []
        for piece in pieces:
            scalar, piece_terms = forward(piece, losses[0])
            scalar.backward()
            terms.append(piece_terms)
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


@functools.cache
def workers(count: int) -> ThreadPoolExecutor:
    """Threads that compute gradients, each on one core.

    PyTorch would rather give every kernel to all cores. Here an executor or actor is about to take one of them, and at
    the end of every kernel the other cores would wait for it, some of them spinning.
    """
    return ThreadPoolExecutor(count, "gradient", initializer=torch.set_num_threads, initargs=(1,))


def clip_gradient(parameters: FlatParameters, max_norm: float) -> torch.Tensor:
    """Clip the whole gradient by :func:`clip_norm`; returns the norms before and after, [2]."""
    return clip_norm(gradient(parameters), max_norm)


def clip_norm(vector: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Scale ``vector`` down to ``max_norm`` in place where its norm is larger; returns the norms before and after, [2].

    A vector that is not finite stays as it is, to be looked at: scaling would turn all of it into zeros and NaN.
    """
    before = torch.linalg.vector_norm(vector)
    vector.mul_(torch.where(before.isfinite(), (max_norm / (before + 1e-6)).clamp(max=1.0), 1.0))
    return torch.stack((before, torch.linalg.vector_norm(vector)))


def gradient(parameters: FlatParameters) -> torch.Tensor:
    """The gradient vector [P], of which every parameter's ``.grad`` is a view."""
    vector = parameters.vector.grad
    assert vector is not None, "the learner's FlatParameters are made with gradients"
    return vector


def require_finite(
    records: list[torch.Tensor],
    terms: tuple[str, ...],
    place: tuple[int, int],
    minibatch: Callable[[], dict[str, torch.Tensor]],
    *,
    stepped: bool = False,
) -> None:
    """NonFinite where the last of ``records`` holds NaN or infinity, to be called before the optimizer's step.

    Args:
        records: of each gradient step of this update so far, its loss ``terms`` and both gradient norms [terms + 2].
        terms: the names of the loss's terms; the first is the loss.
        place: epoch and minibatch of the last step.
        minibatch: gives the step's rows [M, ...] by name; ``index`` is t * N + n of each.
        stepped: the optimizer has made this step already, and may have made others after it.
    """
    record = records[-1]
    if math.isfinite(float(record.sum())):
        return
    epoch, number = place
    tensors = {f"minibatch/{name}": column.cpu().numpy() for name, column in minibatch().items()}
    raise NonFinite(
        f"the loss or its gradient is not finite in epoch {epoch}, minibatch {number} of the update (loss "
        f"{float(record[0]):g}, gradient norm {float(record[-2]):g})",
        {"epoch": epoch, "minibatch": number, "stepped": stepped, "records": [*terms, *NORMS]},
        {**tensors, "records": torch.stack(records).cpu().numpy()},
    )


def summary(records: list[torch.Tensor], terms: tuple[str, ...], learning_rate: float) -> dict[str, float]:
    """Metrics of one update from the ``records`` [terms + 2] of its gradient steps: means, read back at once."""
    metrics = {"learning_rate": learning_rate, "loss/gradient_steps": float(len(records))}
    if records:
        columns = torch.stack(records).cpu().numpy().T
        metrics |= {f"loss/{name}": float(column.mean()) for name, column in zip(terms, columns, strict=False)}
        metrics["loss/grad_norm"] = float(columns[-2].mean())
        metrics["loss/grad_norm_clipped"] = float(columns[-1].max())
    return metrics
