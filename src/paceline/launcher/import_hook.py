"""Run code around the execution of a module, however the script comes to import it. Imports no torch.

Many libraries look for torch (`importlib.util.find_spec("torch")`) before they import it, or import it lazily. So a
hook acts when the module is executed, not when it is looked up:

1. A finder in sys.meta_path asks the other finders for the module.
2. It puts its own loader into the spec that they return.
3. When Python executes the module, that loader puts the original one back and runs it within the registered contexts.

The finder stays: a module that is reloaded, or imported anew after a failure, is executed within the contexts again.
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
    """Execute the module `name` within `around(module)`, each time that it is executed from now on."""
    _arounds[name].append(around)
    _put_first()


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` as soon as the module has been executed: at once if it has been already."""

    @contextmanager
    def around(module: ModuleType) -> Iterator[None]:
        yield
        then(module)

    around_import(name, around)
    module = sys.modules.get(name)
    if module is not None:
        then(module)


def stay_first() -> None:
    """From now on put the finder first again, just before an `import` of one of its modules, where the script has moved
    it or taken it out of sys.meta_path. For the rest of the process, each audit event of Python costs a call."""

    def audit(event: str, args: Sequence[Any]) -> None:
        if event == "import" and args[0] in _arounds:
            _put_first()

    sys.addaudithook(audit)


def _put_first() -> None:
    if sys.meta_path[0] is not _finder:
        sys.meta_path[:] = [_finder, *(finder for finder in sys.meta_path if finder is not _finder)]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules in `_arounds`, by the other finders."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _arounds:
            return None
        asked: set[str] = self._thread.__dict__.setdefault("asked", set())
        if name in asked:  # another hook that we ask uses importlib.util.find_spec
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
    """Executes a module by its own loader, within the contexts that are registered for it."""

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
        """The other methods of the module's own loader, such as get_source and get_data."""
        return getattr(object.__getattribute__(self, "_loader"), name)


_finder = _Finder()
