"""One gradient step's parts, on the one vector of all parameters: accumulate, record, clip, check."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

import torch

from htsrl.errors import NonFinite
from htsrl.learner.minibatches import Batch, Rows, piece_rows
from htsrl.models import ActorCritic, FlatParameters

NORMS = ("grad_norm", "grad_norm_clipped")
"""What a step records after its loss's terms."""
Loss = Callable[[torch.Tensor, torch.Tensor, Rows], tuple[torch.Tensor, torch.Tensor]]


def accumulate_gradient(
    model: ActorCritic, parameters: FlatParameters, batch: Batch, rows: Rows, loss: Loss
) -> torch.Tensor:
    """Leave the gradient of ``loss`` over ``rows`` [M] in ``parameters.vector.grad``; returns the loss's terms [terms].

    ``loss(params [M, P], value [M], rows)`` gives the scalar to descend and its terms for the records, all of them sums
    over rows, so that the gradient may be added up over pieces of rows.
    """
    gradient(parameters).zero_()
    terms: list[torch.Tensor] = []
    for piece in rows.pieces(piece_rows(model.row_bytes, batch.obs.device)):
        params, value = model(batch.obs.index_select(0, piece.index))
        scalar, piece_terms = loss(params, value, piece)
        scalar.backward()
        terms.append(piece_terms)
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


def clip_gradient(parameters: FlatParameters, max_norm: float) -> torch.Tensor:
    """Scale the gradient down to ``max_norm`` where its norm is larger; returns the norms before and after, [2].

    A gradient that is not finite stays as it is, to be looked at: scaling would turn all of it into zeros and NaN.
    """
    vector = gradient(parameters)
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
    batch: Batch,
    rows: Rows,
    *,
    stepped: bool = False,
) -> None:
    """NonFinite where the last of ``records`` holds NaN or infinity, to be called before the optimizer's step.

    Args:
        records: of each gradient step of this update so far, its loss ``terms`` and both gradient norms [terms + 2].
        terms: the names of the loss's terms; the first is the loss.
        place: epoch and minibatch of the last step.
        batch: what the step's ``rows`` [M] are rows of.
        rows: the minibatch.
        stepped: the optimizer has made this step already, and may have made others after it.
    """
    record = records[-1]
    if math.isfinite(float(record.sum())):
        return
    epoch, minibatch = place
    columns = {field.name: getattr(rows, field.name) for field in fields(rows)}
    columns["obs"] = batch.obs.index_select(0, rows.index)
    tensors = {f"minibatch/{name}": column.cpu().numpy() for name, column in columns.items()}
    raise NonFinite(
        f"the loss or its gradient is not finite in epoch {epoch}, minibatch {minibatch} of the update (loss "
        f"{float(record[0]):g}, gradient norm {float(record[-2]):g})",
        {"epoch": epoch, "minibatch": minibatch, "stepped": stepped, "records": [*terms, *NORMS]},
        {**tensors, "records": torch.stack(records).cpu().numpy()},
    )


def summary(records: torch.Tensor, terms: tuple[str, ...], learning_rate: float) -> dict[str, float]:
    """Metrics of one update from its ``records`` [steps, terms + 2]: means over its gradient steps, read back once."""
    metrics = {"learning_rate": learning_rate, "loss/gradient_steps": float(len(records))}
    if len(records):
        columns = records.cpu().numpy().T
        metrics |= {f"loss/{name}": float(column.mean()) for name, column in zip(terms, columns, strict=False)}
        metrics["loss/grad_norm"] = float(columns[-2].mean())
        metrics["loss/grad_norm_clipped"] = float(columns[-1].max())
    return metrics
