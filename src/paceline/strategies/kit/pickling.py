"""Refuses to pickle what one process holds of a sharded model.

`if run.main: torch.save(model.state_dict(), path)` is in every script for several processes. Of a sharded model it
would write rank 0's shards, and nobody would notice before the file is needed. Pickle asks Python's table of reducers
(copyreg) before the class itself: the guard puts a function there that raises.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.errors import UsageError


def refuse_deepcopy(module: nn.Module, error: Exception) -> None:
    """copy.deepcopy(module), as for an average of the weights, raises this error. It asks the object for
    __deepcopy__."""

    def refuse(_: Any) -> Any:
        raise error

    vars(module)["__deepcopy__"] = refuse


class PickleGuard:
    """Refuses to pickle DTensors, and modules of the classes that torch makes of sharded ones, until `close`."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._before: dict[type, Any] = {}

    def install(self, models: Iterable[nn.Module] = ()) -> None:
        """Call it when models are sharded. models: those that have modules of classes which torch has made."""
        sharded: set[type] = {
            type(module) for model in models for module in model.modules() if isinstance(module, FSDPModule)
        }
        for kind in (DTensor, *sharded):
            if kind not in self._before:
                self._before[kind] = copyreg.dispatch_table.get(kind)
                copyreg.dispatch_table[kind] = self._refuse

    def _refuse(self, thing: Any) -> Any:
        what = f"this {type(thing).__name__}" if isinstance(thing, nn.Module) else "this tensor"
        raise UsageError(
            f"strategy {self._strategy}: {what} is in slices, of which each process holds its own: torch.save would "
            "write one process's. All processes call, so outside of `if run.main`: run.export(path, model), which "
            "writes the whole model for plain PyTorch; run.save(directory), for a checkpoint with optimizers; or "
            "{name: p.full_tensor() for name, p in model.state_dict().items()}, for whole tensors."
        )

    def close(self) -> None:
        for kind, before in self._before.items():
            if before is None:
                copyreg.dispatch_table.pop(kind, None)
            else:
                copyreg.dispatch_table[kind] = before
        self._before = {}
