"""Refuse to pickle one process's part of a sharded model.

`if run.main: torch.save(model.state_dict(), path)` is in every multi-process script. With a sharded model it would
write only rank 0's shards, and the missing shards would go unnoticed until the file is needed. Pickle looks up a class
in Python's table of reducers (copyreg) first, so the guard registers a function in this table that raises.
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
    """Make copy.deepcopy(module) raise this error. Averages of weights use deepcopy.

    deepcopy looks up __deepcopy__ on the object.
    """

    def refuse(_: Any) -> Any:
        raise error

    vars(module)["__deepcopy__"] = refuse


class PickleGuard:
    """Until `close`, refuses to pickle DTensors, and modules of classes that torch generates for sharded modules."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._before: dict[type, Any] = {}

    def install(self, models: Iterable[nn.Module] = ()) -> None:
        """Start to refuse. Call it when models are sharded. models: the models with modules of generated classes."""
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
            f"strategy {self._strategy}: {what} is sharded, and torch.save would write only this process's shard. Call "
            "one of these on all processes, outside of `if run.main`: run.export(path, model), which writes the whole "
            "model for plain PyTorch; run.save(directory), for a checkpoint with optimizers; or "
            "{name: p.full_tensor() for name, p in model.state_dict().items()}, for whole tensors."
        )

    def close(self) -> None:
        for kind, before in self._before.items():
            if before is None:
                copyreg.dispatch_table.pop(kind, None)
            else:
                copyreg.dispatch_table[kind] = before
        self._before = {}
