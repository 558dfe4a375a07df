"""Find the lines of a script that change its weights and gradients, and its calls of collectives, in order.

Python's trace function (sys.settrace) is called for each line of the script's own code. If a watched tensor has changed
since the line before, that line has written it. This finds writes of any kind: in-place operations, `.data`, a new
`.grad`, and code of a library that the line calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import dtensor
from paceline.observe.patching import Patches
from paceline.observe.script_stack import Owner, ScriptStack
from paceline.torch_private.core import version_of

GRADIENT, WEIGHT, COLLECTIVE = "gradient", "weight", "collective"
EXCHANGE = "exchange"  # a collective that the script calls in a model's forward; SyncBatchNorm's are COLLECTIVE
_COLLECTIVES = [
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv"),
    "batch_isend_irecv",
]
_DIFFERENTIABLE = "torch.distributed.nn.functional"  # its collectives have a backward
_SAMPLED, _ELEMENTS = 4, 16  # tensors and elements that are also compared by value: `.data` has its own version
_MOST = 200  # entries in a step
_FRAMES = 8

Stack = list[list[Any]]
"""[file, line, id of the call] of the script's frames, innermost first."""


class WriteTracer:
    """Traces the current thread.

    Args:
        stack: finds the script's frames.
        parameters: returns the parameters to watch.
        active: returns whether to trace now.
        on_call: called with the frame when a function of the script is called, or a generator continues.
        on_return: called with the frame and the value when a function of the script returns or yields.
    """

    def __init__(
        self,
        stack: ScriptStack,
        parameters: Callable[[], Iterable[Tensor]],
        patches: Patches,
        active: Callable[[], bool],
        on_call: Callable[[FrameType], None],
        on_return: Callable[[FrameType, Any], None],
    ) -> None:
        self._stack, self._parameters, self._active = stack, parameters, active
        self._on_call, self._on_return = on_call, on_return
        self.entries: list[list[Any]] = []  # [kind, the name of the call or "", Stack]
        self._known: list[Any] = []
        self._line: Stack = []  # the line that runs now
        self._watched: list[Tensor] = []
        self.on = False
        self.in_forward = False  # set by the observer: whether a model's forward is under way
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                patches.before(dist, name, lambda *_, name=name, **__: self._note_call(name))

    def start(self) -> None:
        """Trace the calls under way, and later ones. Call it again when there are new parameters."""
        self._watched = [p for p in self._parameters() if not p.is_meta]
        self._known = self._state()
        if self.on:
            return
        if sys.gettrace() is not None:  # a debugger, or a measurement of coverage
            return
        self.on = True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._stack.owns(frame.f_code.co_filename):
                frame.f_trace = self._trace_line
            frame = frame.f_back
        sys.settrace(self._trace_call)

    def stop(self) -> None:
        if self.on:
            self.on = False
            sys.settrace(None)

    def take(self) -> list[list[Any]]:
        """Return the entries since the last call."""
        if self.on:
            self._compare()
        found, self.entries = self.entries[:_MOST], []
        return found

    def _note_call(self, name: str) -> None:
        if self.on and self._active():
            self._compare()
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and self._stack.owner_of(frame.f_code.co_filename) is Owner.PACELINE:
                frame = frame.f_back
            file = frame.f_code.co_filename if frame is not None else ""
            direct = self._stack.owns(file) or file == getattr(sys.modules.get(_DIFFERENTIABLE), "__file__", None)
            kind = EXCHANGE if self.in_forward and direct else COLLECTIVE
            self._add(kind, name, self._script_stack(frame))

    def _trace_call(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._stack.owns(frame.f_code.co_filename):
            return None
        if self.on and self._active():
            self._on_call(frame)
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, value: Any) -> Any:
        if not self.on:
            return None
        if self._active():
            if event == "return":
                self._on_return(frame, value)
            self._compare()
            self._line = self._script_stack(frame)
        return self._trace_line

    def _script_stack(self, frame: FrameType | None) -> Stack:
        found: Stack = []
        while frame is not None and len(found) < _FRAMES:
            if self._stack.owns(frame.f_code.co_filename):
                found.append([frame.f_code.co_filename, frame.f_lineno, id(frame)])
            frame = frame.f_back
        return found

    def _compare(self) -> None:
        """Add an entry for the line that has just run, if it has changed a tensor."""
        now = self._state()
        if now != self._known:
            for place, kind in enumerate((WEIGHT, GRADIENT)):
                if now[place] != self._known[place]:
                    self._add(kind, "", self._line)
            self._known = now

    def _add(self, kind: str, name: str, stack: Stack) -> None:
        if stack and len(self.entries) < _MOST:
            self.entries.append([kind, name, stack])

    def _state(self) -> list[Any]:
        """What changes when a weight or a gradient changes: [of the weights, of the gradients]."""
        weights = [version_of(dtensor.local(p)) for p in self._watched]
        grads = [(id(g), version_of(dtensor.local(g))) if (g := p.grad) is not None else None for p in self._watched]
        some = self._watched[:: max(1, len(self._watched) // _SAMPLED)]
        with torch.no_grad():
            values = [_value(p) for p in some]
            of_grads = [_value(p.grad) if p.grad is not None else 0.0 for p in some]
        return [(weights, values), (grads, of_grads)]


def _value(tensor: Tensor) -> float:
    flat = dtensor.local(tensor.detach()).reshape(-1)
    return float(flat[:_ELEMENTS].double().sum()) if flat.numel() and flat.layout is torch.strided else 0.0
