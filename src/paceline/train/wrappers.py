"""Models that another library, or torch itself, has wrapped already: unwrapped where that changes nothing, else named.

torch.compile's wrapper computes as the model does. It is taken off, and what it compiled by stays with the model. Those
that make a model parallel do what a run does, in their own way: their reducers average gradients that the run sums.
"""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError
from paceline.torch_private.core import compile_inside, compiled_wrapper, inside_compiled

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
"""The classes of torch, Accelerate, Lightning Fabric and DeepSpeed that hold a plain object, and where."""


def unwrapped(model: Any) -> Any:
    """The module in a wrapper of torch.compile; else the same object."""
    wrapper = compiled_wrapper()
    while wrapper is not None and isinstance(model, wrapper):
        model = inside_compiled(model)
    return model


def taken_off(thing: Any) -> Any:
    """What `run.prepare` is to take of an object that it is given: of a wrapper of torch.compile the module in it,
    which is then compiled by itself, in the same way. Raises UsageError for wrappers that make things parallel."""
    if unwrapped(thing) is not thing:
        compile_inside(thing)
        return taken_off(inside_compiled(thing))
    _check(thing)
    return thing


def _check(thing: Any) -> None:
    kinds = {kind.__name__: kind.__module__ for kind in type(thing).__mro__}
    name = next((name for name in _INSIDE if kinds.get(name, "").startswith(_LIBRARIES)), None)
    if name is not None:
        library = kinds[name].partition(".")[0]
        raise UsageError(
            f"run.prepare({name}): {library} has prepared this for several devices already, which a run does itself. "
            f"Delete the call that made it, and prepare the plain object, which it holds as .{_INSIDE[name]}."
        )


_LIBRARIES = ("torch.", "accelerate.", "lightning.", "lightning_fabric.", "deepspeed.")
