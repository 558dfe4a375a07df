"""Check and unwrap the arguments of `run.prepare`."""

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
    """Raises UsageError unless this is a model, an optimizer, a DataLoader, or a scheduler that `run.step` can step."""
    if isinstance(thing, ReduceLROnPlateau):
        raise UsageError(
            "run.prepare(ReduceLROnPlateau): it needs a metric at each step, which run.step does not have. Do not "
            "prepare it: step it yourself, and track it with run.track(plateau=scheduler)."
        )
    if not isinstance(thing, (nn.Module, torch.optim.Optimizer, LRScheduler, DataLoader)):
        raise UsageError(
            f"run.prepare takes models, optimizers, schedulers and DataLoaders, not {type(thing).__name__}."
        )


def check_optimizer(optimizer: torch.optim.Optimizer, names: Collection[Tensor]) -> None:
    """Raises UsageError unless all parameters of the optimizer are in `names`, those of the prepared models."""
    foreign = unknown_parameters(optimizer, names)
    if foreign:
        raise UsageError(
            f"run.prepare: {type(optimizer).__name__} updates {foreign} that no prepared model has. Prepare its model "
            "with it or before it. Put a separate parameter, such as a temperature, into a module and prepare that."
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step needs a closure, as that of LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_scheduler(scheduler: LRScheduler, optimizers: Collection[torch.optim.Optimizer]) -> None:
    """Raises UsageError unless the scheduler belongs to one of these optimizers."""
    if scheduler.optimizer not in optimizers:
        raise UsageError(
            f"run.prepare: {type(scheduler).__name__} belongs to an optimizer that is not prepared. Prepare both "
            "together."
        )


def with_loaders(objects: Sequence[Any], make: Callable[..., Any], has_loader: bool) -> tuple[Any, ...]:
    """Replace a DataLoader among these objects by a loader from `make`.

    has_loader: whether the run already has a training loader. Raises UsageError for a second training loader.
    """
    if sum(isinstance(thing, DataLoader) for thing in objects) + has_loader > 1:
        raise UsageError(
            "run.prepare(DataLoader) makes the training loader, and this would be a second one. For evaluation write "
            "run.loader(dataset, global_batch=..., train=False); for a second training loader write "
            "run.loader(dataset, global_batch=..., name=...)."
        )
    return tuple(make(**loader_arguments(thing)) if isinstance(thing, DataLoader) else thing for thing in objects)


def loader_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of `run.loader` that correspond to a DataLoader of a script for one device.

    In a run, a shuffled order depends on the run's seed, not on the DataLoader's generator. pin_memory is copied,
    including its default of False. Raises UsageError for a DataLoader with batch_size=None.
    """
    if loader.batch_sampler is None and loader.batch_size is None:
        raise UsageError(
            "run.prepare(DataLoader(batch_size=None)): the data set returns whole batches, which cannot be sharded "
            "over the processes. Return single examples from the data set, and give the DataLoader a batch_size."
        )
    options = {name: getattr(loader, name, None) for name in sorted(DATALOADER_OPTIONS)}
    found = {name: value for name, value in options.items() if value is not None}
    if isinstance(loader.dataset, IterableDataset):
        return {"dataset": loader.dataset, "global_batch": loader.batch_size, "drop_last": loader.drop_last, **found}
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return {"dataset": loader.dataset, "batch_sampler": loader.batch_sampler, **found}
    found |= {"dataset": loader.dataset, "global_batch": loader.batch_size, "drop_last": loader.drop_last}
    order = loader.sampler
    if type(order) is RandomSampler and not order.replacement and order.num_samples == len(order.data_source):
        return {**found, "shuffle": True}
    return found if type(order) is SequentialSampler else {**found, "sampler": order}


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
"""The names of the modules that define these classes begin with one of these strings."""


def unwrapped(model: Any) -> Any:
    """The module inside torch.compile's wrapper; any other object is returned unchanged."""
    wrapper = compiled_wrapper()
    while wrapper is not None and isinstance(model, wrapper):
        model = inside_compiled(model)
    return model


def without_wrapper(thing: Any) -> Any:
    """The object for `run.prepare` to prepare.

    For a wrapper of torch.compile this is the wrapped module, after compiling it in place with the same options. Raises
    UsageError for another library's wrapper: that wrapper would average gradients that the run already sums.
    """
    if unwrapped(thing) is not thing:
        compile_inside(thing)
        return without_wrapper(inside_compiled(thing))
    kinds = {kind.__name__: kind.__module__ for kind in type(thing).__mro__}
    name = next((name for name in _INSIDE if kinds.get(name, "").startswith(_LIBRARIES)), None)
    if name is not None:
        library = kinds[name].partition(".")[0]
        raise UsageError(
            f"run.prepare({name}): {library} has already prepared this object for several devices, which Paceline "
            f"does itself. Delete the call that made the {name}, and prepare the plain object (its attribute "
            f".{_INSIDE[name]})."
        )
    return thing


def modules_of(tree: Any) -> Iterator[nn.Module]:
    """The models in a module, or in a tuple, list or dict of modules."""
    if isinstance(tree, nn.Module):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from modules_of(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from modules_of(item)
