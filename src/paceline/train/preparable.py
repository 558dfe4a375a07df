"""What `run.prepare` takes, and what it says to the rest."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import UsageError


def check_preparable(thing: Any) -> None:
    """Raises UsageError unless it is a model, an optimizer or a scheduler that `run.step` can move."""
    if not isinstance(thing, (nn.Module, torch.optim.Optimizer, LRScheduler)) or isinstance(thing, ReduceLROnPlateau):
        raise UsageError(_not_prepared(thing))


def check_optimizer(optimizer: torch.optim.Optimizer, names: Collection[Tensor]) -> None:
    """Raises UsageError unless it takes one gradient a step, of these parameters."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"run.prepare: {type(optimizer).__name__} computes the loss several times in a step, through a "
            "closure, which run.step does not have. Use an optimizer that takes one gradient a step, such as AdamW."
        )
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        raise UsageError(
            f"run.prepare: {type(optimizer).__name__} updates {len(foreign)} parameter(s) that no prepared model "
            f"has (shapes {shapes}). Prepare the model that it was made for, with or before it; a parameter of its "
            "own, such as a temperature, belongs into a module."
        )


def _not_prepared(thing: Any) -> str:
    if isinstance(thing, ReduceLROnPlateau):
        return (
            "run.prepare(ReduceLROnPlateau): it needs a metric at each step, which run.step does not have. Keep it "
            "out of prepare, step it yourself, and track it: run.track(plateau=scheduler)."
        )
    if isinstance(thing, torch.utils.data.DataLoader):
        return (
            "run.prepare(DataLoader): a loader is made by run.loader(dataset, global_batch=...), which cuts each "
            "global batch over the processes."
        )
    return f"run.prepare takes models, optimizers and schedulers, not {type(thing).__name__}."
