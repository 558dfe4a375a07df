"""Trace the operations of each line of a script, in a run that `paceline verify` repeats to find the line of a fault.

A TorchFunctionMode sees every call of torch, sys.settrace sees every line of the user's script, and some functions are
replaced. The tracer records events, in order. Each event has the innermost line of the user's script that was running.
The kinds of events:

op         a call returns a tensor; the event has the call's name, inputs, number arguments and values
write      an in-place op or an assignment writes a parameter, a buffer, a gradient or optimizer state; or the script
           removes or replaces the state that an optimizer keeps for a parameter
root       a loss is passed to a backward call; the event has the op that made the loss
hook       a hook is registered on a gradient or a module
seed       a generator is seeded; the event has the seed
option     an option of an optimizer, such as the learning rate, has changed
parameter  a module gets a parameter after the models were prepared
set        a module gets a number, a bool or a string as an attribute
ask        the script queries its rank or the world size
loader     the script makes a training loader

The values of a tensor are recorded as scalar products with fixed weights. They show whether two tensors are equal, and
which example differs. A tensor has one value per example if one of its first two dimensions is the examples of this
yield. Otherwise it has a single value.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.observe.digests import finite, projections
from paceline.observe.patching import Patches
from paceline.observe.records import RecordFile
from paceline.observe.script_stack import Place, anywhere
from paceline.run import RunParts
from paceline.verify.worker.call_site import call_site

_MAX_EVENTS = 60_000
_MAX_EXTERNAL_ELEMENTS = 1 << 16  # the maximum size of a recorded input that no traced op made
_SEEDS: tuple[tuple[Any, str], ...] = (
    (torch, "manual_seed"), (torch, "seed"), (random, "seed"), (np.random, "seed"), (np.random, "default_rng"),
)  # fmt: skip
BACKWARD_HOOKS = (  # functions that register hooks on gradients
    (torch.Tensor, "register_hook"), (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"), (torch.Tensor, "register_post_accumulate_grad_hook"),
)  # fmt: skip
_HOOKS = (
    *BACKWARD_HOOKS, (nn.Module, "register_forward_hook"), (nn.Module, "register_forward_pre_hook"),
)  # fmt: skip


class ScriptTracer:
    """Records the events of one rank. The Recorder creates it.

    Args:
        path: the file for the events.
        first: ops are recorded before the first step, and from step `first` - 1 on.
    """

    def __init__(self, parts: RunParts, path: str, first: int, patches: Patches) -> None:
        self._parts, self._path, self._first = parts, path, first
        self.events: list[dict[str, Any]] = []
        self._step, self._yield = -1, -1  # -1: before the first
        self._examples: int | None = None  # the number of examples in this yield
        self._backward = False  # whether a backward call is running
        # The id of a tensor -> (the number of the event that made it, the tensor). The reference keeps the tensor
        # alive, so that no other tensor gets its id.
        self._made_by: dict[int, tuple[int, Tensor]] = {}
        self._options: dict[tuple[int, int, str], Any] = {}  # (optimizer, group, option) -> its last value
        self._states: dict[str, tuple[int, ...]] = {}  # parameter -> the ids of its optimizer state
        self._optimizers: list[Any] = []  # all optimizers of the script
        self._prepared_tensors: dict[int, str] = {}  # the addresses that tensors had before run.prepare -> their names
        self._last_lines: dict[int, int] = {}  # the id of a running frame of the script -> its current line
        self._mode = _Mode(self)
        self._watch_functions(patches)
        self._mode.__enter__()
        self._previous_trace = sys.gettrace()
        if self._previous_trace is None:
            self._trace_running_frames()

    # --- called by the recorder

    def begin_step(self, step: int) -> None:
        self._step, self._yield, self._examples = step, -1, None

    def begin_yield(self, examples: int) -> None:
        self._yield, self._examples = self._yield + 1, examples
        self._made_by.clear()

    def begin_backward(self, roots: Iterable[Any]) -> None:
        at, _ = call_site(from_recorder=True)
        for root in roots:
            if isinstance(root, Tensor):
                self._record("root", at, "loss", of=self._event_of(root), values=self._values(root)[1])
        self._backward = True

    def end_backward(self) -> None:
        self._backward = False

    def register_models(self, models: Iterable[nn.Module], first: int) -> None:
        """Remember the addresses of the models' tensors before run.prepare moves them. Earlier writes went to these."""
        for number, model in enumerate(models, start=first):
            prefix = f"{number}/" if number else ""
            for name, tensor in (*model.named_buffers(), *model.named_parameters()):
                kind = "weights" if isinstance(tensor, nn.Parameter) else "buffers"
                self._prepared_tensors[tensor.untyped_storage().data_ptr()] = f"{kind}:{prefix}{name}"

    def record_loader(self, dataset: Any, options: dict[str, Any]) -> None:
        at, _ = call_site(from_recorder=True)
        sized = len(dataset) if hasattr(dataset, "__len__") else None
        self._record("loader", at, type(dataset).__name__, values=[sized, sorted(options)])

    def record_rank_query(self, at: Place) -> None:
        self._record("ask", at, "")

    def close(self) -> None:
        """Stop tracing and write the events."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None  # type: ignore[assignment]
        if self._previous_trace is None:
            sys.settrace(None)
        for event in self.events:
            address = event.pop("address", None)
            if event["k"] == "write" and event.get("target") is None:
                event["target"] = self._prepared_tensors.get(address)
        file = RecordFile(self._path + ".part")
        for event in self.events:
            file.write(event)
        file.close()
        os.replace(self._path + ".part", self._path)

    # --- events

    def _record(self, kind: str, at: Place | None, name: str, **more: Any) -> int:
        """Add an event if it has a line. Return the number of the last event."""
        if at is not None and len(self.events) < _MAX_EVENTS:
            self.events.append({"k": kind, "at": at, "name": name, "step": self._step, "yield": self._yield, **more})
        return len(self.events) - 1

    def record_call(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record a call of torch: an op, a write, or neither."""
        name = getattr(function, "__name__", "")
        if name == "__set__":
            self._record_assignment(getattr(getattr(function, "__self__", None), "__name__", ""), args)
            return
        results = [one for one in _flat(out) if isinstance(one, Tensor)]
        in_place = (name.endswith("_") and not name.startswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
        if name in ("__get__", "detach", "requires_grad_") or not (results or in_place):
            if name in ("__get__", "detach") and results and args and isinstance(args[0], Tensor):
                self._record_alias(results[0], args[0])
            return
        at, inside = call_site()
        if at is None:
            return
        if in_place and not inside:
            given = _flat((args[:1], [(kwargs or {}).get(key) for key in ("out", "tensor", "input")]))
            self._record_writes(name, at, [one for one in given if _is_tensor(one)])
        if not results or "empty" in name or inside or (0 <= self._step < self._first - 1):
            return
        self._record_op(name, at, results, args, kwargs)

    def _record_op(self, name: str, at: Place, results: list[Tensor], args: Any, kwargs: Any) -> None:
        inputs = [one for one in _flat((args, kwargs)) if isinstance(one, Tensor)]
        numbers = [one for one in _flat((args, kwargs)) if isinstance(one, (int, float)) and not isinstance(one, bool)]
        shape, values = self._values(results[0])
        number = self._record(
            "op",
            at,
            name,
            backward=self._backward,
            inputs=[self._event_of(one) for one in inputs],
            outer=[self._external_input(one) for one in inputs],
            numbers=[float(one) for one in numbers[:8]],
            shape=shape,
            values=values,
        )
        for result in results:
            self._made_by[id(result)] = (number, result)

    def _record_assignment(self, attribute: str, args: Any) -> None:
        at, inside = call_site()
        if at is None or inside or attribute not in ("grad", "data") or not args:
            return
        target = self._name_of(args[0])
        if target is None and attribute == "data":
            self._record(
                "write", at, "data", address=args[0].untyped_storage().data_ptr(), values=self._digest(args[1])
            )
        elif target is not None:
            kind = "gradient" if attribute == "grad" else "weights"
            name = target.partition(":")[2]
            made = self._digest(args[1]) if isinstance(args[1], Tensor) else None
            if made is not None:  # clearing gradients does not count
                self._record("write", at, "assigned", target=f"{kind}:{name}", values=made)

    def _record_writes(self, name: str, at: Place, targets: list[Tensor]) -> None:
        known: dict[int, str] | None = None
        for tensor in targets:
            address = tensor.untyped_storage().data_ptr()
            known = _tensors_by_address(self._parts) if known is None else known
            target = known.get(address)
            if target is None and self._step >= 0 and self._event_of(tensor) is not None:
                continue  # an op of this yield made it
            self._record("write", at, name, target=target, address=address, values=self._digest(tensor))

    def _name_of(self, tensor: Any) -> str | None:
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            return None
        return _tensors_by_address(self._parts).get(tensor.untyped_storage().data_ptr())

    def _record_alias(self, made: Tensor, of: Tensor) -> None:
        """Record that the event that made `of` also made `made`, because they share memory."""
        if id(of) in self._made_by:
            self._made_by[id(made)] = (self._made_by[id(of)][0], made)

    def _event_of(self, tensor: Tensor) -> int | None:
        """The number of the event that made a tensor in this yield; None if there is none."""
        found = self._made_by.get(id(tensor))
        return None if found is None else found[0]

    def _external_input(self, tensor: Tensor) -> dict[str, Any] | None:
        """Describe an input that no op of this yield made: the batch, a parameter, or state that the script keeps."""
        if self._event_of(tensor) is not None or tensor.numel() > _MAX_EXTERNAL_ELEMENTS or tensor.is_meta:
            return None
        shape, values = self._values(tensor)
        return {"shape": shape, "values": values, "size": tensor.numel()}

    def _digest(self, tensor: Tensor) -> list[float]:
        return projections(tensor.detach().reshape(1, -1)) if tensor.numel() else []

    def _values(self, tensor: Tensor) -> tuple[str, list[float]]:
        """Return (shape, values) of a tensor.

        The shape is "rows" (one value per example), "scalar" (the number itself), "all" (one value for the whole
        tensor) or "none" (no value).
        """
        examples, tensor = self._examples, tensor.detach()
        if type(tensor) is not Tensor and hasattr(tensor, "full_tensor"):
            return "none", []
        if not tensor.ndim:
            return "scalar", [finite(tensor.item())]
        if not tensor.numel():
            return "none", []
        if examples and tensor.shape[0] % examples == 0:
            return "rows", projections(tensor.reshape(examples, -1))
        if examples and tensor.ndim > 1 and tensor.shape[1] == examples:
            return "rows", projections(tensor.transpose(0, 1).reshape(examples, -1))
        return "all", projections(tensor.reshape(1, -1))

    # --- replaced functions

    def _watch_functions(self, patches: Patches) -> None:
        for owner, name in _SEEDS:
            patches.around(owner, name, partial(self._around_seeding, name))
        for owner, name in _HOOKS:
            patches.before(owner, name, partial(self._before_hook, name))
        patches.after(torch.optim.Optimizer, "__init__", self._after_optimizer_init)
        patches.after(nn.Module, "__setattr__", self._after_set_attribute)
        patches.replace(torch, "Generator", self._watched_generator(torch.Generator))

    def _after_optimizer_init(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self._optimizers.append(optimizer)
        self._record_changed_options(call_site()[0])

    def _after_set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and self._prepared_tensors:
            self._record("parameter", call_site()[0], name)
        if isinstance(value, (bool, int, float, str)) and not name.startswith("_") and name != "training":
            at, inside = call_site()
            if not inside:
                self._record("set", at, f"{type(module).__name__}.{name}", values=[str(value)])

    def _around_seeding(self, name: str, /, *args: Any, **options: Any) -> Generator[None, Any, None]:
        at, inside = call_site()
        yield
        if not inside:
            given = [str(one) for one in (*args, *options.values()) if isinstance(one, (int, float, str))]
            self._record("seed", at, name, values=given)

    def _before_hook(self, name: str, own: Any, /, hook: Any, *_: Any, **__: Any) -> None:
        at, inside = call_site()
        if not inside:
            code = getattr(hook, "__code__", None)
            body = [code.co_filename, code.co_firstlineno] if code is not None else None
            self._record("hook", at, name, target=self._name_of(own), values=[body])

    def _watched_generator(self, base: Any) -> Any:
        tracer = self

        class Kind(type(base)):  # type: ignore[misc]
            def __instancecheck__(cls, one: Any) -> bool:
                return isinstance(one, base)

        class Generator(base, metaclass=Kind):
            def manual_seed(self, seed: int) -> Any:
                tracer._record("seed", call_site()[0], "manual_seed", values=[str(seed)])
                return super().manual_seed(seed)

            def seed(self) -> int:
                found: int = super().seed()
                tracer._record("seed", call_site()[0], "seed", values=[str(found)])
                return found

        return Generator

    # --- lines

    def _trace_running_frames(self) -> None:
        """Trace the lines of the user's script, in future frames and in frames that are already running."""
        sys.settrace(self._on_call)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # frames that are already running
            if anywhere.owns(frame.f_code.co_filename):
                frame.f_trace = self._on_line
                self._last_lines[id(frame)] = frame.f_lineno
            frame = frame.f_back

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace the lines of a function that is called, if it belongs to the user's script."""
        if not anywhere.owns(frame.f_code.co_filename):
            return None
        self._last_lines[id(frame)] = frame.f_lineno
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        """Record the changes of a line when it ends: the next line begins, or the function returns."""
        if event in ("line", "return"):
            before = self._last_lines.get(id(frame))
            if self._optimizers and before is not None:
                self._record_changed_options((frame.f_code.co_filename, before))
                self._record_replaced_states((frame.f_code.co_filename, before))
            self._last_lines[id(frame)] = frame.f_lineno
            if event == "return":
                self._last_lines.pop(id(frame), None)
        return self._on_line

    def accept_options(self) -> None:
        """Accept the current options: changes by Paceline do not count as changes by the script."""
        self._options, self._states = dict(self._read_options()), self._read_states()

    def _read_states(self) -> dict[str, tuple[int, ...]]:
        """The optimizers' state of each parameter, by identity: the keys, and the objects of the values."""
        names = self._parts.names
        return {
            names[parameter]: tuple(id(one) for pair in state.items() for one in pair)
            for optimizer in self._parts.optimizers
            for parameter, state in optimizer.state.items()
            if parameter in names and state
        }

    def _record_replaced_states(self, at: Place | None) -> None:
        """Record that the script removed or replaced optimizer state. In-place ops are recorded separately."""
        found = self._read_states()
        for name in [name for name in (*self._states, *found) if self._states.get(name) != found.get(name)]:
            self._record("write", at, "state", target=f"state:{name}", values=[float(name in found)])
        self._states = found

    def _read_options(self) -> Iterator[tuple[tuple[int, int, str], Any]]:
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(getattr(optimizer, "param_groups", ())):
                for key, value in group.items():
                    if key != "params" and isinstance(value, (bool, int, float, tuple)):
                        yield (number, index, key), value

    def _record_changed_options(self, at: Place | None) -> None:
        """Record options that have changed since they were last read."""
        for key, value in self._read_options():
            if self._options.get(key) != value:
                self._options[key] = value
                self._record("option", at, key[2], values=[repr(value)])


class _Mode(TorchFunctionMode):
    """Passes every call of torch to the tracer."""

    def __init__(self, tracer: ScriptTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError, TypeError):
            # Tensor types that cannot be read raise one of these errors: their events are left out.
            self._tracer.record_call(func, args, kwargs or {}, out)
        return out


def _tensors_by_address(parts: RunParts) -> dict[int, str]:
    """Memory address -> the name of its tensor: parameters, buffers, gradients, and the optimizers' state."""
    found: dict[int, str] = {}
    for number, model in enumerate(parts.models):
        prefix = f"{number}/" if number else ""
        for name, buffer in model.named_buffers():
            found[_storage_address(buffer)] = f"buffers:{prefix}{name}"
        for name, parameter in model.named_parameters():
            found[_storage_address(parameter)] = f"weights:{prefix}{name}"
            if not parts.runs_closure and (grad := parameter.grad) is not None:
                found.setdefault(_storage_address(grad), f"gradient:{prefix}{name}")
    names = parts.names
    for optimizer in parts.optimizers:
        for own, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and own in names:
                    found.setdefault(_storage_address(value), f"state:{names[own]}")
    found.pop(0, None)
    return found


def _storage_address(tensor: Tensor) -> int:
    """The memory address of a tensor; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _flat(one)
    else:
        yield value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta
