"""The inputs of a torchmetrics metric: predictions and targets, from a model's output and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from paceline.errors import SettingError, UsageError, suggest
from paceline.fitting.model_loss import field_of

Target = str | Callable[[Any, Any], tuple[Any, Any]] | None
"""A name in the batch; a function of (outputs, batch) that returns (predictions, targets); None: the usual names."""


def check_target(target: Any) -> None:
    """Raises SettingError unless `target` is a name, a function or None."""
    if target is not None and not isinstance(target, str) and not callable(target):
        raise SettingError(
            f"target={target!r}: pass the name of the targets in the batch, such as 'labels', or a function of "
            "(outputs, batch) that returns (predictions, targets)."
        )


def predictions_and_target(name: str, target: Target, outputs: Any, batch: Any) -> tuple[Any, Any]:
    """Return (predictions, targets) for the metric `name`. Raises UsageError if they cannot be found."""
    if callable(target):
        found = target(outputs, batch)
        if not isinstance(found, tuple) or len(found) != 2:
            raise UsageError(
                f"target returned a {type(found).__name__} for the metric {name!r}. Return (predictions, targets)."
            )
        return found
    key = "labels" if target is None else target
    if isinstance(batch, Mapping):
        if key not in batch:
            raise UsageError(f"the metric {name!r} needs {key!r} in the batch. {suggest(key, map(str, batch))}")
        return _predictions(name, outputs), batch[key]
    if target is not None:
        raise UsageError(
            f"target={target!r} for the metric {name!r}: the batch is a {type(batch).__name__}, which has no names. "
            "Pass a function: target=lambda outputs, batch: (outputs, batch[1])."
        )
    return _predictions(name, outputs), batch[1]


def _predictions(name: str, outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs
    logits = field_of(outputs, "logits")
    if logits is not None:
        return logits
    what = f"a dict with {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else type(outputs).__name__
    raise UsageError(
        f"the metric {name!r}: the model returned {what}, and Paceline does not know which part contains the "
        "predictions. Pass target=lambda outputs, batch: (outputs[...], batch[...])."
    )
