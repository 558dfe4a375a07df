"""Run code around the execution of a module, regardless of how the script imports it. Does not import torch.

Many libraries look for torch (`importlib.util.find_spec("torch")`) before they import it, or import it lazily. So a
hook acts when the module is executed, not when it is looked up:

1. A finder in sys.meta_path asks the other finders for the module.
2. In the spec that they return, it replaces the loader by a _Loader.
3. When Python executes the module, the _Loader restores the original loader, which then executes the module within the
   registered contexts.

The finder stays installed. So a module that is reloaded, or imported again after a failure, is executed within the
contexts again.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

Around = Callable[[ModuleType], AbstractContextManager[None]]

_arounds: dict[str, list[Around]] = defaultdict(list)  # module -> its contexts, the innermost first


def around_import(name: str, around: Around) -> None:
    """From now on, execute the module `name` within `around(module)`."""
    _arounds[name].append(around)
    _put_first()


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` after each execution of the module, and now if the module is already imported."""

    @contextmanager
    def around(module: ModuleType) -> Iterator[None]:
        yield
        then(module)

    around_import(name, around)
    module = sys.modules.get(name)
    if module is not None:
        then(module)


def stay_first() -> None:
    """Move the finder back to the front of sys.meta_path before each import of a registered module.

    This costs one function call per Python audit event, until the process ends.
    """

    def audit(event: str, args: Sequence[Any]) -> None:
        if event == "import" and args[0] in _arounds:
            _put_first()

    sys.addaudithook(audit)


def _put_first() -> None:
    if sys.meta_path[0] is not _finder:
        sys.meta_path[:] = [_finder, *(finder for finder in sys.meta_path if finder is not _finder)]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules in `_arounds` through the other finders, and replaces their loaders."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _arounds:
            return None
        asked: set[str] = self._thread.__dict__.setdefault("asked", set())
        if name in asked:  # another finder called importlib.util.find_spec
            return None
        asked.add(name)
        try:
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            specs = (finder.find_spec(name, path, target) for finder in others)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            asked.remove(name)
        if spec is not None and hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, _Loader):
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Executes a module with the module's original loader, within the contexts that are registered for the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        for holder, attribute in ((module.__spec__, "loader"), (module, "__loader__")):
            if getattr(holder, attribute, None) is self:
                setattr(holder, attribute, self._loader)
        with ExitStack() as stack:
            for around in reversed(_arounds[module.__name__]):
                stack.enter_context(around(module))
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        """Forward other methods, such as get_source and get_data, to the module's loader."""
        return getattr(object.__getattribute__(self, "_loader"), name)


_finder = _Finder()
