"""Loading torch faster, and the interpreter's end after it. Imports no torch.

torch brings some hundred thousand objects, of which none ever becomes garbage. Python's collector looks at them several
times while torch is loaded, and twice when the interpreter ends: together a third of the processor time of a process
that loads torch and ends. So the collector pauses while torch is loaded, and leaves alone what is there then
(`gc.freeze`). What comes later is collected as ever; no tensor can be older than torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def faster() -> Iterator[None]:
    """Within it torch may be loaded. Where it is loaded already, nothing changes."""
    with contextlib.nullcontext() if "torch" in sys.modules else _paused():
        yield


class FasterTorch(importlib.abc.MetaPathFinder):
    """In sys.meta_path it makes the script's first `import torch` a faster one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)  # by the other finders, of which doctor may have one
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                with _paused():
                    execute(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one spec
        return spec


@contextlib.contextmanager
def _paused() -> Iterator[None]:
    """A pause of the collector, which leaves alone what it finds afterwards. Where it is off, nothing changes."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
