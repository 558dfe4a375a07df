"""The loss that a model computes itself, as Hugging Face's models do: `fit(model, None, ...)`.

The model is called as model(**batch), and its output has .loss. The weight of a loss in the global batch is the number
of items that the loss averages over. With integer labels, these are the labels other than -100: one class per example,
or one per token. A causal language model shifts its labels by one token. No name in the model reliably distinguishes
these cases. So ModelLoss computes the mean for each case from the first batch's logits, and compares it with the loss.
It uses a weight only after this check.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError, warn
from paceline.metrics.predict import LABELS
from paceline.step.loss import Total

IGNORED = -100
"""The label that losses ignore, in PyTorch and in Hugging Face's collators."""
_TOLERANCE = 2e-2  # relative, between the model's loss and our mean: logits may have a lower precision
_FARTHER = 10.0  # accept the nearest mean only if the other is at least this many times as far from the loss
_ROUNDING = 1e-5  # relative; lower bound for the distance of the nearest mean


class ModelLoss:
    """loss_fn(model, batch) for a model that computes its loss. Returns the loss, with the count that it averages over
    if that is known."""

    def __init__(self) -> None:
        self._shift: int | None = None  # number of positions that labels are shifted by; None: not known yet
        self._warned = False

    def __call__(self, model: Any, batch: Any) -> Total | Tensor:
        loss, logits = _loss_and_logits(model, batch)
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.is_floating_point():
            return loss  # regression, or classes that are not exclusive: a mean over the examples
        if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
            self._warn_once(labels)
            return loss
        shift = self._shift
        if shift is None:
            shift = self._find_shift(loss.detach(), logits.detach(), labels)
        count = (labels[..., shift:] != IGNORED).sum()
        # If no label counts, the loss is NaN. Leave it out.
        return Total(torch.where(count > 0, loss, 0.0) * count, count)

    def _find_shift(self, loss: Tensor, logits: Tensor, labels: Tensor) -> int:
        """The number of positions that the model shifts its labels by. Raises UsageError if the loss is not a mean over
        the labels.

        Waits for the device, so it is called only until the answer is certain, usually in the first step. (For an
        untrained model, both means are close to each other and to the loss.)
        """
        means = {shift: _mean(logits, labels, shift) for shift in ((0, 1) if labels.dim() > 1 else (0,))}
        if all(mean != mean for mean in means.values()):
            return 0  # no label counts: decide in the next batch
        value = loss.item()
        if not math.isfinite(value):
            return 0  # decide in a later batch; the update is skipped, or ends the run
        distances = {shift: abs(mean - value) for shift, mean in means.items() if mean == mean}
        nearest = min(distances, key=lambda shift: distances[shift])
        if distances[nearest] > _TOLERANCE * max(abs(value), 1e-3):
            listed = " or ".join(f"{mean:.4g}" for mean in means.values())
            raise UsageError(
                f"loss_fn=None: the model's own loss is {value:.4g}, but the mean cross-entropy over its labels is "
                f"{listed}. So Paceline does not know what the loss averages over (it may have further terms, class "
                "weights or label smoothing), nor its weight in the global batch. Pass "
                "loss_fn=lambda model, batch: model(**batch).loss if it is a mean over the examples, or return "
                "paceline.Total(sum, count)."
            )
        least = _FARTHER * max(distances[nearest], _ROUNDING * abs(value))
        if all(distance > least for shift, distance in distances.items() if shift != nearest):
            self._shift = nearest
        return nearest

    def _warn_once(self, labels: Any) -> None:
        if self._warned:
            return
        self._warned = True
        reason = "the batch has no 'labels'" if labels is None else "its logits and labels have different shapes"
        warn(
            f"loss_fn=None: Paceline does not know what the model's own loss averages over ({reason}). It treats the "
            "loss as a mean over the examples. If it is not, pass a loss_fn that returns paceline.Total(sum, count).",
        )


def _loss_and_logits(model: Any, batch: Any) -> tuple[Tensor, Any]:
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"loss_fn=None uses the model's own loss, model(**batch).loss, but the batch is a {type(batch).__name__}. "
            "Pass a collate_fn that makes dicts, such as Hugging Face's, or a loss_fn."
        )
    outputs = model(**batch)
    loss = field_of(outputs, "loss")
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"loss_fn=None uses the model's own loss, but {type(model).__name__} returned no loss for a batch with "
            f"the keys {', '.join(map(str, batch))}. Add the labels that its loss needs, or pass a loss_fn."
        )
    return loss, field_of(outputs, "logits")


def field_of(outputs: Any, name: str) -> Any:
    """A field of a model's output, which is a dict or has attributes. None if there is no such field."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


@torch.no_grad()
def _mean(logits: Tensor, labels: Tensor, shift: int) -> float:
    """The mean cross-entropy over the labels that count, computed row by row: all logits in float32 could take
    gigabytes."""
    top, count = 0.0, 0
    for row, wanted in zip(logits, labels, strict=True):
        if shift:
            row, wanted = row[:-shift], wanted[shift:]
        known = int((wanted != IGNORED).sum())
        if known:
            flat = row.reshape(-1, row.shape[-1]).float()
            top += F.cross_entropy(flat, wanted.reshape(-1), ignore_index=IGNORED, reduction="sum").item()
            count += known
    return top / count if count else float("nan")


def used_columns(dataset: Any, model: nn.Module) -> Any:
    """Remove the columns of a Hugging Face `datasets` data set that the model's forward does not accept, such as text,
    which no collator can turn into a tensor. Returns other data sets unchanged."""
    names, remove = getattr(dataset, "column_names", None), getattr(dataset, "remove_columns", None)
    if not isinstance(names, list) or not callable(remove):
        return dataset
    base: Any = model
    if hasattr(model, "get_base_model"):
        base = base.get_base_model()  # the forward of a PEFT model takes only *args, **kwargs
    taken = {*inspect.signature(base.forward).parameters, *LABELS}
    unused = [name for name in names if name not in taken]
    return remove(unused) if unused and len(unused) < len(names) else dataset
