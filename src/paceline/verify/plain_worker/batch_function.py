"""The function of a script that makes its batches, if they come from no DataLoader: found, recorded and replaced.

In the subject run, the function that last returned or yielded the tensors of the model's first forward, or tensors that
share their memory, is the batch function, such as `get_batch` in nanoGPT. All tensors and numbers that it returns are
recorded, so masks and lengths too. In a run of one process the function runs as it is. Then its tensors are replaced by
those of all ranks, joined along their first dimension. If all ranks get equal tensors, as under tensor or context
parallelism, they are not joined.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from paceline.observe.digests import tensors_in
from paceline.observe.script_stack import ScriptStack

_KEPT = 64  # returned values, until the function is found
_DEPTH = 4

Name = dict[str, Any]
"""The file, first line and qualified name of a function."""


class BatchFunctionFinder:
    """Finds the batch function of a run.

    Args:
        begin: called when the function begins to make a batch.
        store: called with (tensors and numbers, in order) for each batch.
        evaluating: the context of calls without gradients. They draw no random numbers of a training step.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        store: Callable[[list[Any]], None],
        evaluating: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._begin, self._store, self._evaluating = begin, store, evaluating
        self._evaluations: list[AbstractContextManager[Any]] = []  # under way
        self._code: types.CodeType | None = None
        self._returned: deque[tuple[types.CodeType, Any]] = deque(maxlen=_KEPT)
        self.searching = True

    @property
    def name(self) -> Name | None:
        code = self._code
        if code is None:
            return None
        return {"file": code.co_filename, "line": code.co_firstlineno, "name": code.co_qualname}

    def on_call(self, frame: types.FrameType) -> None:
        """A function of the script is called, or continues."""
        if frame.f_code is not self._code:
            return
        if torch.is_grad_enabled():
            self._begin()
        else:
            self._evaluations.append(self._evaluating())
            self._evaluations[-1].__enter__()

    def on_return(self, frame: types.FrameType, value: Any) -> None:
        """A function of the script has returned or yielded a value."""
        if frame.f_code is self._code and self._evaluations:
            self._evaluations.pop().__exit__(None, None, None)
        if value is None or not torch.is_grad_enabled():
            return
        if self.searching:
            if any(True for _ in _parts(value)):
                self._returned.append((frame.f_code, value))
        elif frame.f_code is self._code:
            self._store(list(_parts(value)))

    def find(self, inputs: Any) -> bool:
        """Look for the function that has made these inputs of a forward. Returns whether it was found."""
        self.searching = False
        wanted = {_storage(tensor) for tensor in tensors_in(inputs)}
        made = [code for code, value in self._returned if any(_storage(t) in wanted for t in _tensors(value))]
        self._code = next((code for code in reversed(made) if not code.co_name.startswith("<")), None)
        for code, value in self._returned:
            if code is self._code:
                self._store(list(_parts(value)))
        self._returned.clear()
        return self._code is not None


class BatchFunctionReplacer:
    """Replaces the batch function of a run of one process.

    Args:
        name: the function.
        batches: yields the tensors and numbers of each batch.
        stack: finds the script's frames.
        active: returns whether to replace batches now.
        calling: the context of the function's calls. They draw no random numbers of a training step.
    """

    def __init__(
        self,
        name: Name,
        batches: Callable[[], list[Any]],
        stack: ScriptStack,
        active: Callable[[], bool],
        calling: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._name, self._batches, self._stack, self._active = name, batches, stack, active
        self._calling = calling
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if stack.owns(frame.f_code.co_filename):
                frame.f_trace = self._trace_line
            frame = frame.f_back
        sys.settrace(self._trace_call)

    def _trace_call(self, frame: types.FrameType, event: str, _: Any) -> Any:
        return self._trace_line if self._stack.owns(frame.f_code.co_filename) else None

    def _trace_line(self, frame: types.FrameType, event: str, _: Any) -> Any:
        function = self._look_in(frame)
        if function is None:
            return self._trace_line
        sys.settrace(None)
        _replace_code(function, self._call)
        return None

    def _look_in(self, frame: types.FrameType) -> types.FunctionType | None:
        """The function, if it is defined by now in the module or the call of this frame."""
        if frame.f_code.co_filename != self._name["file"]:
            return None
        outer, _, inner = self._name["name"].rpartition(".<locals>.")
        if outer and frame.f_code.co_qualname != outer:
            return None
        name, *parts = inner.split(".")
        found: Any = (frame.f_locals if outer else frame.f_globals).get(name)
        for part in parts:
            found = inspect.getattr_static(found, part, None)
        found = getattr(found, "__func__", found)  # a class method
        while found is not None:
            code = getattr(found, "__code__", None)
            if code is not None and code.co_firstlineno == self._name["line"]:
                return found if isinstance(found, types.FunctionType) else None
            found = getattr(found, "__wrapped__", None)
        return None

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with self._calling():
            result = original(*args, **options)
        if isinstance(result, types.GeneratorType):
            return self._yields(result)
        return self._replaced(result)

    def _yields(self, values: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._calling():
                try:
                    value = next(values)
                except StopIteration:
                    return
            yield self._replaced(value)

    def _replaced(self, value: Any) -> Any:
        if not self._active() or not torch.is_grad_enabled() or not any(True for _ in _parts(value)):
            return value
        return _rebuilt(value, iter(self._batches()), 0)


def _replace_code(function: types.FunctionType, call: Callable[..., Any]) -> None:
    """Make calls of the function run `call(original, args, options)`. Who holds the function does not matter."""
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    hook = f"_paceline_{id(function)}"
    function.__globals__[hook] = lambda args, options: call(original, args, options)
    # the new code needs as many closure cells as the old one
    cells = "".join(f"{cell}, " for cell in function.__code__.co_freevars)
    lines = (
        f"def make({cells}):",
        "  def stub(*args, **options):",
        f"    ({cells})",
        f"    return {hook}(args, options)",
        "  return stub",
    )
    found: dict[str, Any] = {}
    exec("\n".join(lines), found)
    made = found["make"](*[None] * len(function.__code__.co_freevars))
    function.__code__ = made.__code__
    function.__defaults__ = function.__kwdefaults__ = None


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _parts(value: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors and numbers in a value, in order; nothing if it contains no tensor."""
    if not depth and next(_tensors(value), None) is None:
        return
    if isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
        yield value.detach() if isinstance(value, Tensor) else value
    elif depth < _DEPTH:
        for inner in _inside(value):
            yield from _parts(inner, depth + 1)


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEPTH:
        for inner in _inside(value):
            yield from _tensors(inner, depth + 1)


def _inside(value: Any) -> list[Any]:
    """The values in a container, or in an object with attributes such as a dataclass."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (torch.nn.Module, type, types.ModuleType)) or callable(value):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _rebuilt(value: Any, parts: Iterator[Any], depth: int) -> Any:
    """The value with its tensors and numbers replaced, in the order of `_parts`."""
    if isinstance(value, Tensor):
        return next(parts).to(value.device)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return next(parts)
    if depth >= _DEPTH:
        return value
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            value[key] = _rebuilt(inner, parts, depth + 1)
        return value
    if isinstance(value, (list, tuple)):
        made = [_rebuilt(inner, parts, depth + 1) for inner in value]
        if isinstance(value, list):
            return made
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    for name, inner in zip(list(getattr(value, "__dict__", {})), _inside(value)):
        object.__setattr__(value, name, _rebuilt(inner, parts, depth + 1))
    return value
