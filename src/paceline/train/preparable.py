"""What `run.prepare` takes, and what it says to the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from paceline.errors import UsageError
from paceline.strategies.replicated import unknown_parameters
from paceline.train.sources import DATALOADER_OPTIONS


def check_preparable(thing: Any) -> None:
    """Raises UsageError unless it is a model, an optimizer, a scheduler that `run.step` can move, or a DataLoader."""
    kinds = (nn.Module, torch.optim.Optimizer, LRScheduler, DataLoader)
    if not isinstance(thing, kinds) or isinstance(thing, ReduceLROnPlateau):
        raise UsageError(_not_prepared(thing))


def check_optimizer(optimizer: torch.optim.Optimizer, names: Collection[Tensor]) -> None:
    """Raises UsageError unless its parameters are among these."""
    foreign = unknown_parameters(optimizer, names)
    if foreign:
        raise UsageError(
            f"run.prepare: {type(optimizer).__name__} updates {foreign} that no prepared model has. Prepare the model "
            "that it was made for, with or before it; a parameter of its own, such as a temperature, belongs into a "
            "module."
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot be called without one, as that of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_scheduler(scheduler: LRScheduler, optimizers: Collection[torch.optim.Optimizer]) -> None:
    """Raises UsageError unless it moves one of these."""
    if scheduler.optimizer not in optimizers:
        raise UsageError(
            f"run.prepare: {type(scheduler).__name__} moves an optimizer that is not prepared. Prepare them together."
        )


def with_loaders(objects: Sequence[Any], make: Callable[..., Any], taken: bool) -> tuple[Any, ...]:
    """The same objects, with a DataLoader among them made anew by `make`. taken: whether there is a training loader."""
    if sum(isinstance(thing, DataLoader) for thing in objects) + taken > 1:
        raise UsageError(
            "run.prepare(DataLoader): it makes the training loader, of which this run has one or is given several. For "
            "evaluation write run.loader(dataset, global_batch=..., train=False), for a second one to train on "
            "run.loader(dataset, global_batch=..., name=...)."
        )
    return tuple(make(**loader_arguments(thing)) if isinstance(thing, DataLoader) else thing for thing in objects)


def loader_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """What `run.loader` is to be given for a DataLoader of a script for one device. The order of a shuffle is then that
    of the run's seed, not of the DataLoader's generator. Raises UsageError for one without batches."""
    if loader.batch_sampler is None and loader.batch_size is None:
        raise UsageError(
            "run.prepare(DataLoader(batch_size=None)): its data set makes batches itself, which cannot be cut over the "
            "processes. Let it give single examples, and the DataLoader a batch_size."
        )
    found = {name: getattr(loader, name) for name in sorted(DATALOADER_OPTIONS) if getattr(loader, name, None)}
    if isinstance(loader.dataset, IterableDataset):
        return {"dataset": loader.dataset, "global_batch": loader.batch_size, "drop_last": loader.drop_last, **found}
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return {"dataset": loader.dataset, "batch_sampler": loader.batch_sampler, **found}
    found |= {"dataset": loader.dataset, "global_batch": loader.batch_size, "drop_last": loader.drop_last}
    own = loader.sampler
    if type(own) is RandomSampler and not own.replacement and own.num_samples == len(own.data_source):
        return {**found, "shuffle": True}
    return found if type(own) is SequentialSampler else {**found, "sampler": own}


def _not_prepared(thing: Any) -> str:
    if isinstance(thing, ReduceLROnPlateau):
        return (
            "run.prepare(ReduceLROnPlateau): it needs a metric at each step, which run.step does not have. Keep it "
            "out of prepare, step it yourself, and track it: run.track(plateau=scheduler)."
        )
    return f"run.prepare takes models, optimizers, schedulers and DataLoaders, not {type(thing).__name__}."
