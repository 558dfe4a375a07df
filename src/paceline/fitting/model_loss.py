"""The loss that a model computes itself, as those of Hugging Face do: `fit(model, None, ...)`.

The model is called as model(**batch), and its output has .loss. How much it weighs in the global batch depends on what
it is a mean over. Of whole-number labels those count that are not -100: the classes of the examples, or tokens,
which a causal language model shifts by one. Which of these it is, no name tells for sure. So the mean over each is
computed once, from the first batch's logits, and compared with the loss: a weight that is used is one that was checked.
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
"""The label that a loss leaves out, in PyTorch and in Hugging Face's collators."""
_TOLERANCE = 2e-2  # relative, between the model's loss and ours: logits may be of a lower precision
_FARTHER = 10.0  # times as far from the loss as the nearest mean must the other be, for the nearest to be the one
_ROUNDING = 1e-5  # relative: a nearest mean is taken to be at least so far from the loss


class ModelLoss:
    """loss_fn(model, batch) for a model that computes its loss: with the count of what it is a mean over, if known."""

    def __init__(self) -> None:
        self._shift: int | None = None  # by how many places labels are shifted; None: not known yet
        self._warned = False

    def __call__(self, model: Any, batch: Any) -> Total | Tensor:
        loss, logits = _loss_and_logits(model, batch)
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.is_floating_point():
            return loss  # of a regression, or of classes that do not exclude each other: a mean over the examples
        if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
            self._tell(labels)
            return loss
        shift = self._shift
        if shift is None:
            shift = self._find_shift(loss.detach(), logits.detach(), labels)
        count = (labels[..., shift:] != IGNORED).sum()
        # The mean over nothing is NaN, and left out.
        return Total(torch.where(count > 0, loss, 0.0) * count, count)

    def _find_shift(self, loss: Tensor, logits: Tensor, labels: Tensor) -> int:
        """By how many places the model shifts the labels of its loss. Raises UsageError where the loss is no mean over
        the labels. It waits for the device, until it has found out: usually in the first step. (Of an untrained model
        the two means are close to each other, and both to the loss.)"""
        means = {shift: _mean(logits, labels, shift) for shift in ((0, 1) if labels.dim() > 1 else (0,))}
        if all(mean != mean for mean in means.values()):
            return 0  # no label counts: the next batch will tell
        value = loss.item()
        if not math.isfinite(value):
            return 0  # tells nothing, and the update is left out, or ends the run
        apart = {shift: abs(mean - value) for shift, mean in means.items() if mean == mean}
        nearest = min(apart, key=lambda shift: apart[shift])
        if apart[nearest] > _TOLERANCE * max(abs(value), 1e-3):
            told = " or ".join(f"{mean:.4g}" for mean in means.values())
            raise UsageError(
                f"loss_fn=None: the model's own loss is {value:.4g}, and the mean of the cross-entropy over its labels "
                f"{told}. So what the loss is a mean over is not known (it has further terms, class weights or label "
                "smoothing), nor what it weighs in the global batch. Say it: "
                "loss_fn=lambda model, batch: model(**batch).loss if it is a mean over the examples, or return "
                "paceline.Total(sum, count)."
            )
        least = _FARTHER * max(apart[nearest], _ROUNDING * abs(value))
        if all(distance > least for shift, distance in apart.items() if shift != nearest):
            self._shift = nearest
        return nearest

    def _tell(self, labels: Any) -> None:
        if self._warned:
            return
        self._warned = True
        what = "the batch has no 'labels'" if labels is None else "its logits have another shape than its labels"
        warn(
            f"loss_fn=None: what the model's own loss is a mean over is not known ({what}). It counts as a mean over "
            "the examples, which is exact if it is one. Else give a loss_fn that returns paceline.Total(sum, count).",
        )


def _loss_and_logits(model: Any, batch: Any) -> tuple[Tensor, Any]:
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"loss_fn=None is the model's own loss, model(**batch).loss, and the batch is a {type(batch).__name__}. "
            "Give a collate_fn that makes dicts, as those of Hugging Face, or a loss_fn."
        )
    outputs = model(**batch)
    loss = field_of(outputs, "loss")
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"loss_fn=None is the model's own loss, and {type(model).__name__} returned none for a batch with "
            f"{', '.join(map(str, batch))}. Give it the labels that its loss needs, or a loss_fn."
        )
    return loss, field_of(outputs, "logits")


def field_of(outputs: Any, name: str) -> Any:
    """The field of an output that is a dict, or has attributes; None where there is none."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


@torch.no_grad()
def _mean(logits: Tensor, labels: Tensor, shift: int) -> float:
    """The mean cross-entropy over the labels that count, row by row: in float32 all logits at once can be gigabytes."""
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
    """A data set of Hugging Face's `datasets` without the columns that the model's forward does not take, such as the
    text, which no collator makes a tensor of. Anything else as it is."""
    names, remove = getattr(dataset, "column_names", None), getattr(dataset, "remove_columns", None)
    if not isinstance(names, list) or not callable(remove):
        return dataset
    base: Any = model
    if hasattr(model, "get_base_model"):
        base = base.get_base_model()  # a PEFT model takes *args, **kwargs
    taken = {*inspect.signature(base.forward).parameters, *LABELS}
    unused = [name for name in names if name not in taken]
    return remove(unused) if unused and len(unused) < len(names) else dataset
