"""What `run.prepare` takes, what it unwraps first, and what it says to anything else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from paceline.data.sources import DATALOADER_OPTIONS
from paceline.errors import UsageError
from paceline.strategies.kit.named_parameters import unknown_parameters
from paceline.torch_private.core import compile_inside, compiled_wrapper, inside_compiled
from paceline.torch_private.core import compile_module as compile_module


def check_preparable(thing: Any) -> None:
    """Raises UsageError for anything but a model, an optimizer, a scheduler that `run.step` can move, a DataLoader."""
    if isinstance(thing, ReduceLROnPlateau):
        raise UsageError(
            "run.prepare(ReduceLROnPlateau): it needs a metric at each step, which run.step does not have. Keep it "
            "out of prepare, step it yourself, and track it: run.track(plateau=scheduler)."
        )
    if not isinstance(thing, (nn.Module, torch.optim.Optimizer, LRScheduler, DataLoader)):
        raise UsageError(
            f"run.prepare takes models, optimizers, schedulers and DataLoaders, not {type(thing).__name__}."
        )


def check_optimizer(optimizer: torch.optim.Optimizer, names: Collection[Tensor]) -> None:
    """Raises UsageError unless all its parameters are in `names`, those of the prepared models."""
    foreign = unknown_parameters(optimizer, names)
    if foreign:
        raise UsageError(
            f"run.prepare: {type(optimizer).__name__} updates {foreign} that no prepared model has. Prepare the model "
            "that it was made for, with or before it; a parameter of its own, such as a temperature, belongs into a "
            "module."
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step needs a closure, as that of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_scheduler(scheduler: LRScheduler, optimizers: Collection[torch.optim.Optimizer]) -> None:
    """Raises UsageError unless it moves one of these optimizers."""
    if scheduler.optimizer not in optimizers:
        raise UsageError(
            f"run.prepare: {type(scheduler).__name__} moves an optimizer that is not prepared. Prepare them together."
        )


def with_loaders(objects: Sequence[Any], make: Callable[..., Any], has_loader: bool) -> tuple[Any, ...]:
    """The same objects, with a loader that `make` makes in place of a DataLoader. has_loader: whether the run has a
    training loader. Raises UsageError for a second one."""
    if sum(isinstance(thing, DataLoader) for thing in objects) + has_loader > 1:
        raise UsageError(
            "run.prepare(DataLoader): it makes the training loader, of which this run has one or is given several. For "
            "evaluation write run.loader(dataset, global_batch=..., train=False), for a second one to train on "
            "run.loader(dataset, global_batch=..., name=...)."
        )
    return tuple(make(**loader_arguments(thing)) if isinstance(thing, DataLoader) else thing for thing in objects)


def loader_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of `run.loader` for a DataLoader of a script for one device. A shuffled order then depends on the
    run's seed, not on the DataLoader's generator. pin_memory is what the DataLoader has: one that was not told pins
    nothing, as without a run. Raises UsageError for a DataLoader without batches."""
    if loader.batch_sampler is None and loader.batch_size is None:
        raise UsageError(
            "run.prepare(DataLoader(batch_size=None)): its data set makes batches itself, which cannot be cut over the "
            "processes. Let it give single examples, and the DataLoader a batch_size."
        )
    options = {name: getattr(loader, name, None) for name in sorted(DATALOADER_OPTIONS)}
    found = {name: value for name, value in options.items() if value is not None}
    if isinstance(loader.dataset, IterableDataset):
        return {"dataset": loader.dataset, "global_batch": loader.batch_size, "drop_last": loader.drop_last, **found}
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return {"dataset": loader.dataset, "batch_sampler": loader.batch_sampler, **found}
    found |= {"dataset": loader.dataset, "global_batch": loader.batch_size, "drop_last": loader.drop_last}
    own = loader.sampler
    if type(own) is RandomSampler and not own.replacement and own.num_samples == len(own.data_source):
        return {**found, "shuffle": True}
    return found if type(own) is SequentialSampler else {**found, "sampler": own}


# --- wrappers of other libraries

_INSIDE = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "module",
    "_FabricOptimizer": "optimizer",
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "DataLoaderShard": "base_dataloader",
    "DataLoaderDispatcher": "base_dataloader",
    "_FabricDataLoader": "_dataloader",
}
"""Classes that wrap a plain object, and the attribute that holds it."""

_LIBRARIES = ("torch.", "accelerate.", "lightning.", "lightning_fabric.", "deepspeed.")
"""Beginnings of the modules that these classes are in."""


def unwrapped(model: Any) -> Any:
    """The module in a wrapper of torch.compile; any other object itself."""
    wrapper = compiled_wrapper()
    while wrapper is not None and isinstance(model, wrapper):
        model = inside_compiled(model)
    return model


def without_wrapper(thing: Any) -> Any:
    """The object that `run.prepare` is to prepare. For a wrapper of torch.compile it is the wrapped module, which is
    then compiled itself, in the same way. Raises UsageError for a wrapper that makes a model parallel, as a run does:
    its reducer would average gradients that the run sums."""
    if unwrapped(thing) is not thing:
        compile_inside(thing)
        return without_wrapper(inside_compiled(thing))
    kinds = {kind.__name__: kind.__module__ for kind in type(thing).__mro__}
    name = next((name for name in _INSIDE if kinds.get(name, "").startswith(_LIBRARIES)), None)
    if name is not None:
        library = kinds[name].partition(".")[0]
        raise UsageError(
            f"run.prepare({name}): {library} has prepared this for several devices already, which a run does itself. "
            f"Delete the call that made it, and prepare the plain object, which it holds as .{_INSIDE[name]}."
        )
    return thing


def modules_of(tree: Any) -> Iterator[nn.Module]:
    """The models that a script hands over as one, or as a tuple, list or dict of them."""
    if isinstance(tree, nn.Module):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from modules_of(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from modules_of(item)
