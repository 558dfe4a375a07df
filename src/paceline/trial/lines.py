"""What the lines of a script do, in a run that `paceline verify` makes once more to say where a fault is.

While it lasts, every call of torch's is seen by a TorchFunctionMode, every line of the user's by sys.settrace, and some
functions by others in their place. What they do is kept as events, in order, each with the innermost line of the user's
that was being run:

op      a call that gives a tensor: its name, its numbers that are no tensors, what it was made from, and its values
write   a parameter, a buffer, a gradient or an optimizer's state is written, by an op in place or by an assignment
root    a loss is handed to a backward call: of which op it is the result
hook    a hook is put on a gradient or a module
seed    a generator is seeded, and with what
option  a learning rate or another option of an optimizer has another value than before
parameter  a module gets a parameter after the models were prepared
set     a module gets a number, a bool or a text as an attribute, and which
ask     the script asks for its rank or for the number of processes
loader  the script makes a training loader

Values of a tensor are kept as one number for each example where one of its first two dimensions is the examples of
this yield, or as one number for all: the scalar product with fixed weights. So one knows whether two tensors
are alike, and of which example a difference is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.run import Run
from paceline.trial.plain import Patches
from paceline.trial.script import Place, kind_of, place

_MOST_EVENTS = 60_000
_MOST_OUTER = 1 << 16  # elements of an input that no op has made
_MOST_VALUES = 1 << 20  # of a tensor are looked at
_SEEDS: tuple[tuple[Any, str], ...] = (
    (torch, "manual_seed"), (torch, "seed"), (random, "seed"), (np.random, "seed"), (np.random, "default_rng"),
)  # fmt: skip
BACKWARD_HOOKS = (  # which see gradients on their way
    (torch.Tensor, "register_hook"), (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
)  # fmt: skip
_HOOKS = (
    *BACKWARD_HOOKS, (torch.Tensor, "register_post_accumulate_grad_hook"), (nn.Module, "register_forward_hook"),
    (nn.Module, "register_forward_pre_hook"),
)  # fmt: skip


class Lines:
    """Attached by the recorder. first: the step from which on ops are kept; what comes before the first step is too.
    named: what lies at an address now (parameters, buffers, gradients, the optimizer's state)."""

    def __init__(self, run: Run, path: str, first: int, named: Callable[[], dict[int, str]], patches: Patches) -> None:
        self._run, self._path, self._first, self._named = run, path, first, named
        self.events: list[dict[str, Any]] = []
        self._step, self._yield = -1, -1
        self._examples: int | None = None  # of this yield
        self._backward = False
        self._made: dict[int, tuple[int, Tensor]] = {}  # id of a tensor -> the event that made it; it is kept alive
        self._options: dict[tuple[int, int, str], Any] = {}
        self._optimizers: list[Any] = []
        self._known: dict[int, str] = {}  # addresses that the prepared models' tensors have had
        self._weights: dict[int, Tensor] = {}
        self._last: dict[int, int] = {}  # the line that each running frame of the user's is in
        self._mode = _Mode(self)
        self._patch(patches)
        self._mode.__enter__()
        self._before = sys.gettrace()
        if self._before is None:
            self._trace_frames()

    # --- when what is

    def begin_step(self, step: int) -> None:
        self._step, self._yield, self._examples = step, -1, None

    def begin_yield(self, examples: int) -> None:
        self._yield, self._examples = self._yield + 1, examples
        self._made.clear()

    def begin_backward(self, roots: Iterable[Any]) -> None:
        at, _ = place(recorded=True)
        for root in roots:
            if isinstance(root, Tensor):
                self._add("root", at, "loss", of=self._event_of(root), values=self._values(root)[1])
        self._backward = True

    def end_backward(self) -> None:
        self._backward = False

    def know(self, models: Iterable[nn.Module], first: int) -> None:
        """Models that are prepared: what was written into their tensors before lies at these addresses."""
        for number, model in enumerate(models, start=first):
            prefix = f"{number}/" if number else ""
            for name, tensor in (*model.named_buffers(), *model.named_parameters()):
                kind = "weights" if isinstance(tensor, nn.Parameter) else "buffers"
                self._known[tensor.untyped_storage().data_ptr()] = f"{kind}:{prefix}{name}"

    def loader(self, dataset: Any, options: dict[str, Any]) -> None:
        at, _ = place(recorded=True)
        sized = len(dataset) if hasattr(dataset, "__len__") else None
        self._add("loader", at, type(dataset).__name__, values=[sized, sorted(options)])

    def asked(self, at: Place) -> None:
        self._add("ask", at, "")

    def close(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None  # type: ignore[assignment]
        if self._before is None:
            sys.settrace(None)
        for event in self.events:
            address = event.pop("address", None)
            if event["kind"] == "write" and event.get("target") is None:
                event["target"] = self._known.get(address)
        with open(self._path + ".part", "w") as file:
            json.dump(self.events, file)
        os.replace(self._path + ".part", self._path)

    # --- events

    def _add(self, kind: str, at: Place | None, name: str, **more: Any) -> int:
        if at is not None and len(self.events) < _MOST_EVENTS:
            where = {"step": self._step, "yield": self._yield, "file": at[0], "line": at[1]}
            self.events.append({"kind": kind, "name": name, **where, **more})
        return len(self.events) - 1

    def op(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = getattr(function, "__name__", "")
        if name == "__set__":
            self._assigned(getattr(getattr(function, "__self__", None), "__name__", ""), args)
            return
        results = [one for one in _flat(out) if isinstance(one, Tensor)]
        in_place = (name.endswith("_") and not name.startswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
        if name in ("__get__", "detach", "requires_grad_") or not (results or in_place):
            if name in ("__get__", "detach") and results and args and isinstance(args[0], Tensor):
                self._alias(results[0], args[0])
            return
        at, inside = place()
        if at is None:
            return
        if in_place and not inside:
            self._written(
                name,
                at,
                [
                    one
                    for one in _flat((args[:1], [(kwargs or {}).get(key) for key in ("out", "tensor", "input")]))
                    if _is_tensor(one)
                ],
            )
        if not results or "empty" in name or inside or (0 <= self._step < self._first - 1):
            return
        self._computed(name, at, results, args, kwargs)

    def _computed(self, name: str, at: Place, results: list[Tensor], args: Any, kwargs: Any) -> None:
        inputs = [one for one in _flat((args, kwargs)) if isinstance(one, Tensor)]
        numbers = [one for one in _flat((args, kwargs)) if isinstance(one, (int, float)) and not isinstance(one, bool)]
        shape, values = self._values(results[0])
        number = self._add(
            "op",
            at,
            name,
            backward=self._backward,
            inputs=[self._event_of(one) for one in inputs],
            outer=[self._outer(one) for one in inputs],
            numbers=[float(one) for one in numbers[:8]],
            shape=shape,
            values=values,
        )
        for result in results:
            self._made[id(result)] = (number, result)

    def _assigned(self, attribute: str, args: Any) -> None:
        at, inside = place()
        if at is None or inside or attribute not in ("grad", "data") or not args:
            return
        target = self._name(args[0])
        if target is None and attribute == "data":
            self._add("write", at, "data", address=args[0].untyped_storage().data_ptr(), values=self._digest(args[1]))
        elif target is not None:
            kind = "gradient" if attribute == "grad" else "weights"
            name = target.partition(":")[2]
            made = self._digest(args[1]) if isinstance(args[1], Tensor) else None
            if made is not None:  # not where gradients are cleared
                self._add("write", at, "assigned", target=f"{kind}:{name}", values=made)

    def _written(self, name: str, at: Place, targets: list[Tensor]) -> None:
        known: dict[int, str] | None = None
        for tensor in targets:
            address = tensor.untyped_storage().data_ptr()
            known = self._named() if known is None else known
            target = known.get(address)
            if target is None and self._step >= 0 and self._event_of(tensor) is not None:
                continue  # what an op of this yield has made
            self._add("write", at, name, target=target, address=address, values=self._digest(tensor))

    def _name(self, tensor: Any) -> str | None:
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            return None
        return self._named().get(tensor.untyped_storage().data_ptr())

    def _alias(self, made: Tensor, of: Tensor) -> None:
        if id(of) in self._made:
            self._made[id(made)] = (self._made[id(of)][0], made)

    def _event_of(self, tensor: Tensor) -> int | None:
        found = self._made.get(id(tensor))
        return None if found is None else found[0]

    def _outer(self, tensor: Tensor) -> dict[str, Any] | None:
        """Of an input that no op of this yield has made: the batch, a parameter, or what the script has kept."""
        if self._event_of(tensor) is not None or tensor.numel() > _MOST_OUTER or tensor.is_meta:
            return None
        shape, values = self._values(tensor)
        return {"shape": shape, "values": values, "size": tensor.numel()}

    def _digest(self, tensor: Tensor) -> list[float]:
        return [self._product(tensor.detach().reshape(1, -1))[0]] if tensor.numel() else []

    def _values(self, tensor: Tensor) -> tuple[str, list[float]]:
        """("rows", one for each example), ("scalar", [it]) or ("all", one for all)."""
        examples, tensor = self._examples, tensor.detach()
        if type(tensor) is not Tensor and hasattr(tensor, "full_tensor"):
            return "none", []
        if not tensor.ndim:
            return "scalar", [_plain(tensor.item())]
        if not tensor.numel():
            return "none", []
        if examples and examples > 1 and tensor.shape[0] % examples == 0:
            return "rows", self._product(tensor.reshape(examples, -1))
        if examples and examples > 1 and tensor.ndim > 1 and tensor.shape[1] == examples:
            return "rows", self._product(tensor.transpose(0, 1).reshape(examples, -1))
        if examples == 1:
            return "rows", self._product(tensor.reshape(1, -1))
        return "all", self._product(tensor.reshape(1, -1))

    def _product(self, rows: Tensor) -> list[float]:
        if rows.is_complex():
            rows = torch.view_as_real(rows).flatten(1)
        rows = rows[:, :: max(1, rows.numel() // _MOST_VALUES)].to("cpu", torch.float64)
        width = rows.shape[1]
        if width not in self._weights:
            self._weights[width] = torch.cos(torch.arange(width, dtype=torch.float64) * 2.399963) + 1.5
        return [_plain(value) for value in (rows @ self._weights[width]).tolist()]

    # --- functions in the place of others

    def _patch(self, patches: Patches) -> None:
        for owner, name in _SEEDS:
            patches.put(owner, name, self._seeding(getattr(owner, name), name))
        for owner, name in _HOOKS:
            patches.put(owner, name, self._hooking(getattr(owner, name), name))
        patches.put(torch, "Generator", self._generator(torch.Generator))
        made, put = torch.optim.Optimizer.__init__, nn.Module.__setattr__
        lines = self

        def init(optimizer: Any, *args: Any, **options: Any) -> None:
            made(optimizer, *args, **options)
            lines._optimizers.append(optimizer)
            lines._look_at_options(place()[0])

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            put(module, name, value)
            if isinstance(value, nn.Parameter) and lines._known:
                lines._add("parameter", place()[0], name)
            if isinstance(value, (bool, int, float, str)) and not name.startswith("_") and name != "training":
                at, inside = place()
                if not inside:
                    lines._add("set", at, f"{type(module).__name__}.{name}", values=[str(value)])

        patches.put(torch.optim.Optimizer, "__init__", init)
        patches.put(nn.Module, "__setattr__", set_attribute)

    def _seeding(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def seeded(*args: Any, **options: Any) -> Any:
            at, inside = place()
            made = function(*args, **options)
            if not inside:
                given = [str(one) for one in (*args, *options.values()) if isinstance(one, (int, float, str))]
                self._add("seed", at, name, values=given)
            return made

        return seeded

    def _generator(self, base: Any) -> Any:
        lines = self

        class Kind(type(base)):  # type: ignore[misc]
            def __instancecheck__(cls, one: Any) -> bool:
                return isinstance(one, base)

        class Generator(base, metaclass=Kind):
            def manual_seed(self, seed: int) -> Any:
                lines._add("seed", place()[0], "manual_seed", values=[str(seed)])
                return super().manual_seed(seed)

            def seed(self) -> int:
                found: int = super().seed()
                lines._add("seed", place()[0], "seed", values=[str(found)])
                return found

        return Generator

    def _hooking(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def hooked(own: Any, hook: Any, *args: Any, **options: Any) -> Any:
            at, inside = place()
            if not inside:
                code = getattr(hook, "__code__", None)
                body = [code.co_filename, code.co_firstlineno] if code is not None else None
                self._add("hook", at, name, target=self._name(own), values=[body])
            return function(own, hook, *args, **options)

        return hooked

    # --- lines

    def _trace_frames(self) -> None:
        sys.settrace(self._called)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # those that are running already
            if kind_of(frame.f_code.co_filename) == "own":
                frame.f_trace = self._in_frame
                self._last[id(frame)] = frame.f_lineno
            frame = frame.f_back

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        if kind_of(frame.f_code.co_filename) != "own":
            return None
        self._last[id(frame)] = frame.f_lineno
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, _: Any) -> Any:
        """A line is over when the next one begins, or when its function returns."""
        if event in ("line", "return"):
            before = self._last.get(id(frame))
            if self._optimizers and before is not None:
                self._look_at_options((frame.f_code.co_filename, before))
            self._last[id(frame)] = frame.f_lineno
            if event == "return":
                self._last.pop(id(frame), None)
        return self._in_frame

    def allow_options(self) -> None:
        """What Paceline itself has changed, or taken over, is not the script's."""
        self._options = dict(self._read_options())

    def _read_options(self) -> Iterator[tuple[tuple[int, int, str], Any]]:
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(getattr(optimizer, "param_groups", ())):
                for key, value in group.items():
                    if key != "params" and isinstance(value, (bool, int, float, tuple)):
                        yield (number, index, key), value

    def _look_at_options(self, at: Place | None) -> None:
        for key, value in self._read_options():
            if self._options.get(key) != value:
                self._options[key] = value
                self._add("option", at, key[2], values=[repr(value)])


class _Mode(TorchFunctionMode):
    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError, TypeError):
            self._lines.op(func, args, kwargs or {}, out)  # of a kind of tensor that cannot be looked at: none is kept
        return out


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


def _plain(value: Any) -> float:
    number = float(value.real if isinstance(value, complex) else value)
    return number if math.isfinite(number) else 1e308  # JSON knows no other
