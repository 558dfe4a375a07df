"""Refusing to pickle what one process holds of a model that is in slices.

`if run.main: torch.save(model.state_dict(), path)` is in every script for several processes. Of a model in slices it
would write rank 0's, and nobody would notice before the file is needed. Python's own table of how to pickle a class
(copyreg) is asked before the class itself: the first slice, or sharded module, that comes into a pickle says so.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from paceline.errors import UsageError


class NoPickles:
    """Of slices, and of the classes that torch makes of sharded modules, until `close`."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._before: dict[type, Any] = {}

    def guard(self, modules: Iterable[nn.Module] = ()) -> None:
        """Call it when models are in slices. modules: of classes that torch has made for this."""
        for kind in (DTensor, *map(type, modules)):
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
