"""Runs a pipeline stage as a part of the user's closure, from one layer call to another.

Users' models may have keyword arguments, masks that depend on values, objects as outputs, or a layer that is called
many times. So models are not taken apart: each process runs the whole closure on the same examples, and computes only
its stage:

    stage 0       computes up to the call where stage 1 begins, sends the input of this call, and ends its run
    stage 1       skips the earlier layers (they return placeholders: placeholders.py), fills the placeholder input of
                  this call with the received tensor, and computes this call and all that follow
    last stage    computes to the end of the closure, including the loss

Every stage computes the code between layers (masks, positions, labels) from the examples. One tensor is sent between
two stages.

Phase 1, the record, once for each form of the examples (structure, shapes, dtypes): the closure runs with placeholders
  for all parameters, so nothing is computed. The record contains the layer calls with their outputs, the uses of
  parameters, and the possible cuts. A cut is possible at a layer call if a single earlier tensor is used later, and
  that tensor is the layer's input. A layer that needs values (for routing, say) runs on zeros instead. If the closure
  needs values of the model's output, recording stops, and the whole output of the model counts as used later.
Phase 2, the cut: at layers that the user names; by default, the number of parameters in the largest stage is minimal. A
  layer that is called in several parts of the model counts in each part.
Phase 3, the runs of the stages. A parameter that several stages use (tied weights, or a layer that is called on both
  sides of a cut) belongs to the first of them (`stage_parameters.py`).
"""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import ModelError, SettingError, UsageError, suggest
from paceline.strategies.base import Term
from paceline.strategies.kit.outputs import holds, mapped
from paceline.strategies.pipeline.placeholders import (
    Placeholder,
    PlaceholderParameters,
    ValuesNeededError,
    form,
    placeholder,
    restoring_buffers,
)
from paceline.torch_private.core import COMPILED_CALL, NormBase, compiled_call, parameters_of, plain_call, version_of

Call = tuple[int, int]
"""(number of the module in `named_modules`, number of its call in a run of the closure, from 1)."""
END = float("inf")


class Span(NamedTuple):
    """A recorded call of a module. Time is the number of operations on placeholders so far."""

    start: float  # time of its start
    end: float  # time of its end
    inner: Counter[int]  # module -> number of its calls within this call, including this call
    given: list[tuple[tuple[int, ...], torch.dtype]]  # forms of its placeholder arguments
    output: Any  # the returned value, with a form in place of each placeholder; None: the call cannot be skipped


class _Form:
    """The form of a returned tensor. argument: if the call returned a placeholder argument, its index; otherwise -1."""

    __slots__ = ("argument", "device", "dtype", "shape")

    def __init__(self, one: Tensor, argument: int) -> None:
        self.shape, self.dtype, self.device, self.argument = tuple(one.shape), one.dtype, one.device, argument


class Cut(NamedTuple):
    """A call where a stage can begin."""

    call: Call
    name: str  # name of the layer; with #n if the layer is called several times
    at: float  # time of the call
    where: int | str  # the argument that is sent: its position, or its keyword
    shape: tuple[int, ...]  # of this argument
    dtype: torch.dtype


class Record(NamedTuple):
    """The result of phase 1."""

    spans: dict[Call, Span]
    cuts: list[Cut]  # the possible cuts, in order
    uses: list[tuple[float, Tensor]]  # (time, parameter) of each use of a parameter
    written: set[Tensor]  # buffers that were changed


class _Ended(BaseException):
    """Ends a run once the stage has computed its output. Not an Exception, which the user's code may catch."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class _Run:
    """One run of the closure. called: handles each call of a module."""

    def __init__(self, called: Callable[[Call, nn.Module, Any, Any], Any]) -> None:
        self.called = called
        self.counts: Counter[int] = Counter()  # module -> its calls so far


class Calls:
    """Intercepts a model's module calls. It can record or skip them, and a run can begin or end at a call."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.names = dict(enumerate(name for name, _ in model.named_modules()))
        self._modules = dict(enumerate(model.modules()))
        self._device = device
        self._placeholders = {id(p): placeholder(p.shape, p.dtype, device) for p in model.parameters()}
        self._by_placeholder = {id(self._placeholders[id(p)]): p for p in model.parameters()}
        for one in self._placeholders.values():
            one.of_parameter = True
        self._run: _Run | None = None
        self._compiled: dict[nn.Module, Any] = {}

    @property
    def running(self) -> bool:
        """Whether the closure is running for a stage, or for a record."""
        return self._run is not None

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Within the block the closure may run for a stage, or for a record. Calls inside a compiled layer are not
        intercepted."""
        self._compiled = {m: compiled_call(m) for m in self._modules.values() if compiled_call(m) is not None}
        within = {inner for m in self._compiled if m is not self.model for inner in m.modules() if inner is not m}
        seen = {number: m for number, m in self._modules.items() if m not in within}
        for number, module in seen.items():  # nn.Module.__call__ calls this instead of hooks and forward
            vars(module)[COMPILED_CALL] = partial(self._called, number, module)
        try:
            yield
        finally:
            for module in seen.values():
                del vars(module)[COMPILED_CALL]
                if module in self._compiled:
                    vars(module)[COMPILED_CALL] = self._compiled[module]

    def _called(self, number: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return self._compute(module, args, kwargs)
        run.counts[number] += 1
        return run.called((number, run.counts[number]), module, args, kwargs)

    def _compute(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the module without interception. The whole model is called uncompiled, since a stage has only some of
        its layers."""
        compiled = None if module is self.model else self._compiled.get(module)
        return (compiled or plain_call(module))(*args, **kwargs)

    @contextmanager
    def _running(self, called: Callable[[Call, nn.Module, Any, Any], Any]) -> Iterator[_Run]:
        self._run = run = _Run(called)
        try:
            yield run
        finally:
            self._run = None

    # --- phase 1

    def record(self, compute: Callable[[], Any]) -> Record:
        """Run the closure with placeholders for all parameters. Raises ModelError if it needs values."""
        clock = [0.0]
        created: dict[int, float] = {}  # id of a placeholder -> time of its creation
        used: dict[int, float] = {}  # id of a placeholder -> time of its last use
        alive: list[Placeholder] = []  # all placeholders, so that ids stay unique
        uses: list[tuple[float, Tensor]] = []
        spans: dict[Call, Span] = {}
        entries: list[tuple[float, Call, list[tuple[int | str, Placeholder]], Sequence[Call]]] = []
        open_calls: list[Call] = []
        outputs: list[Any] = []  # the model's outputs

        def operation(inputs: Sequence[Placeholder], made: Sequence[Placeholder]) -> None:
            clock[0] += 1
            for one in inputs:
                parameter = self._by_placeholder.get(id(one))
                if parameter is None:
                    used[id(one)] = clock[0]
                else:
                    uses.append((clock[0], parameter))
            for one in made:
                alive.append(one)
                created[id(one)] = clock[0]

        def called(call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
            start, before, given = clock[0], run.counts.copy(), _placeholders_in(args, kwargs)
            entries.append((start, call, given, tuple(open_calls)))
            inside = len(entries)
            open_calls.append(call)
            try:
                if module is not self.model and module in self._compiled:
                    raise ValuesNeededError
                output = plain_call(module)(*args, **kwargs)
            except ValuesNeededError:
                if module is self.model:
                    raise
                for _, earlier, _, _ in entries[inside:]:
                    spans.pop(earlier, None)
                del entries[inside:]
                run.counts = before.copy()
                output = self._of_zeros(run, module, args, kwargs)
                made: list[Placeholder] = []
                mapped(output, Placeholder, made.append)
                operation([*(one for _, one in given), *(self._placeholders[id(p)] for p in module.parameters())], made)
            finally:
                open_calls.pop()
            if module is self.model:
                outputs.append(output)
            inner = run.counts - before
            inner[call[0]] += 1
            spans[call] = Span(
                start, clock[0], inner, [form(one) for _, one in given], _as_forms(output, [one for _, one in given])
            )
            return output

        versions = {buffer: version_of(buffer) for buffer in self.model.buffers()}
        norms = [m for m in self._modules.values() if isinstance(m, NormBase) and m.training]
        for norm in norms:  # a batch norm in training mode would communicate with other replicas
            norm.training = False
        try:
            with (
                torch.random.fork_rng(devices=[]),
                restoring_buffers(list(versions)),
                torch.no_grad(),
                PlaceholderParameters(self._placeholders, operation),
                self._running(called) as run,
            ):
                try:
                    terms = compute()
                except ValuesNeededError:
                    if not outputs:
                        raise
                    mapped(outputs, Placeholder, lambda one: used.update({id(one): END}))
                    terms = []
                written = {buffer for buffer, before in versions.items() if version_of(buffer) != before}
        finally:
            for norm in norms:
                norm.training = True
        for norm in norms:
            written |= set(norm.buffers(recurse=False))
        for term in terms:
            if type(term.value) is Placeholder:
                used[id(term.value)] = END
        lives = sorted((moment, used[key], key) for key, moment in created.items() if key in used)
        cuts: list[Cut] = []
        for start, (number, count), given, outer in entries:
            needed = [key for moment, last, key in lives if moment <= start < last]
            found = [(where, one) for where, one in given if needed == [id(one)] and one.dtype.is_floating_point]
            if not found or (cuts and cuts[-1].at == start and cuts[-1].call in outer):
                continue
            (where, one), *_ = found
            cuts.append(Cut((number, count), self.names[number], start, where, tuple(one.shape), one.dtype))
        many = {number for number, count in run.counts.items() if count > 1}
        cuts = [cut._replace(name=f"{cut.name}#{cut.call[1]}") if cut.call[0] in many else cut for cut in cuts]
        return Record(spans, cuts, uses, written)

    def _of_zeros(self, run: _Run, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a layer with zeros as inputs and weights. Returns its output, with placeholders for all tensors."""
        called, modes = run.called, {inner: inner.training for inner in module.modules()}
        run.called = lambda call, inner, args, kwargs: plain_call(inner)(*args, **kwargs)
        state = {name: _zeros(self._placeholders[id(p)]) for name, p in module.named_parameters()}
        state |= {name: buffer.clone() for name, buffer in module.named_buffers()}
        args, kwargs = mapped((args, kwargs), Placeholder, _zeros)
        try:
            output = torch.func.functional_call(module.eval(), state, args, kwargs)
        finally:
            run.called = called
            for inner, was in modes.items():
                inner.training = was
        return mapped(output, Tensor, lambda one: placeholder(one.shape, one.dtype, one.device))

    # --- phase 3

    def stretch(
        self,
        record: Record,
        entry: tuple[Cut, Tensor] | None,
        exit: Cut | None,
        begin: Callable[[], None],
        compute: Callable[[], Any],
    ) -> Any:
        """Run the closure from the call `entry` (None: from its start), with the received input, to the call `exit`
        (None: to its end). Returns the input of `exit`, or the closure's result. begin(): called at `entry`."""
        begun = entry is None

        def called(call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal begun
            if exit is not None and begun and call == exit.call:
                raise _Ended(_argument(exit, args, kwargs, self.names[call[0]]))
            if begun:
                return self._compute(module, args, kwargs)
            assert entry is not None
            cut, received = entry
            if call == cut.call:
                one = _argument(cut, args, kwargs, self.names[call[0]])
                assert type(one) is Placeholder
                one.fill(received)
                begun = True
                begin()
                if isinstance(cut.where, int):
                    args = (*args[: cut.where], received, *args[cut.where + 1 :])
                else:
                    kwargs = {**kwargs, cut.where: received}
                return self._compute(module, args, kwargs)
            span = record.spans.get(call)
            if span is None or span.output is None or span.start <= cut.at < span.end:
                return self._compute(module, args, kwargs)
            return self._skip(run, call, span, args, kwargs)

        try:
            with self._running(called) as run:
                result = compute()
        except _Ended as ended:
            return ended.output
        if exit is not None or not begun:
            missed = exit if begun or entry is None else entry[0]
            assert missed is not None
            raise UsageError(
                f"strategy pipeline: a stage begins with {missed.name}, which was called for earlier examples of the "
                "same shapes, but not for these examples. Layer calls must not depend on the examples' values. "
                "Otherwise use strategy='ddp'."
            )
        return result

    def _skip(self, run: _Run, call: Call, span: Span, args: Any, kwargs: Any) -> Any:
        given = [one for _, one in _placeholders_in(args, kwargs)]
        if [form(one) for one in given] != span.given:
            raise UsageError(
                f"strategy pipeline: {self.names[call[0]]} is called with tensors of different shapes than for "
                "earlier examples of the same shapes. Shapes in a model must not depend on the examples' values. "
                "Otherwise use strategy='ddp'."
            )
        run.counts.update(span.inner)
        run.counts[call[0]] -= 1  # already counted at its start
        return _from_forms(span.output, given, lambda one: placeholder(one.shape, one.dtype, one.device))

    def zeros(self, record: Record, compute: Callable[[], Any]) -> Any:
        """Run the closure with zeros as the model's output, to get the counts of its terms."""
        within = False

        def called(call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal within
            span = record.spans.get(call)
            outermost, within = not within, True
            if span is not None and span.output is not None:
                output = self._skip(run, call, span, args, kwargs)
            else:
                output = self._compute(module, args, kwargs)
            if outermost:
                within = False
                output = mapped(output, Placeholder, _zeros)
            return output

        with self._running(called) as run:
            return compute()

    @contextmanager
    def seconds(self, cuts: Sequence[Cut]) -> Iterator[list[float]]:
        """Measure the closure's run within the block. Yields a list; after the block it holds the seconds of the parts
        between these cuts."""
        found: list[float] = []
        latest = time.perf_counter()
        places = {cut.call for cut in cuts}

        def called(call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal latest
            if call in places:
                now = time.perf_counter()
                found.append(now - latest)
                latest = now
            return self._compute(module, args, kwargs)

        with self._running(called):
            yield found
        found.append(time.perf_counter() - latest)

    # --- parameters of the stretches

    def stretches(self, record: Record) -> list[str]:
        """The names of the parts between possible cuts: the layer with which each part begins."""
        first = next(
            (self.names[number] for number, _ in record.spans if number and parameters_of(self._modules[number])), ""
        )
        return [first or "begin", *(cut.name for cut in record.cuts)]

    def sizes(self, record: Record) -> list[float]:
        """The number of parameters that each part uses."""
        bounds = [0.0, *(cut.at for cut in record.cuts), END]
        sizes = []
        for start, end in pairwise(bounds):
            used = {id(p): p for at, p in record.uses if start < at <= end}
            sizes.append(float(sum(p.numel() for p in used.values()) + 1))
        return sizes

    def holdings(self, record: Record, chosen: Sequence[Cut]) -> list[nn.Module]:
        """For each stage, a module with the parameters that it uses and the buffers of its layers."""
        bounds = [0.0, *(cut.at for cut in chosen), END]
        parts = []
        for start, end in pairwise(bounds):
            part = nn.Module()
            parameters = {id(p): p for at, p in record.uses if start < at <= end}
            for number, p in enumerate(parameters.values()):
                part.register_parameter(str(number), p)  # type: ignore[arg-type]
            buffers: dict[int, Tensor] = {}
            for (number, _), span in record.spans.items():
                if start <= span.start and span.end <= end and (span.start < end or end == END):
                    buffers |= {id(b): b for b in self._modules[number].buffers(recurse=False) if b in record.written}
            for number, buffer in enumerate(buffers.values()):
                part.register_buffer(f"b{number}", buffer)
            parts.append(part)
        return parts

    def lacking(self, record: Record, start: Cut | None, end: Cut | None, kept: Collection[Tensor]) -> list[str]:
        """Names of the parameters that are used between two cuts but are not in `kept`."""
        begin, until = 0.0 if start is None else start.at, END if end is None else end.at
        missing = {id(p) for at, p in record.uses if begin < at <= until and p not in kept}
        return [name for name, p in self.model.named_parameters() if id(p) in missing]

    @contextmanager
    def placeholder_parameters(self, kept: Collection[Tensor]) -> Iterator[None]:
        """Within the block, placeholders replace parameters outside `kept`, since code between layers may read them."""
        replaced = [
            (module, name, p)
            for module in self._modules.values()
            for name, p in parameters_of(module).items()
            if p is not None and p not in kept
        ]
        for module, name, p in replaced:
            parameters_of(module)[name] = self._placeholders[id(p)]
        try:
            yield
        finally:
            for module, name, p in replaced:
                parameters_of(module)[name] = p


def places_of(model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any) -> list[str]:
    """The layers with which stages of this model can begin, as names for `cut`. Runs the closure on one batch, without
    computing."""
    calls = Calls(model, torch.device("cpu"))
    terms: list[Term] = []

    def compute() -> list[Term]:
        mapped(loss_fn(model, batch), Placeholder, lambda one: terms.append(Term(one, None)))
        return terms

    with calls.intercepted():
        return calls.stretches(calls.record(compute))


def _zeros(one: Placeholder) -> Tensor:
    return torch.zeros(one.shape, dtype=one.dtype, device=one.device, requires_grad=one.dtype.is_floating_point)


def _placeholders_in(args: Any, kwargs: Any) -> list[tuple[int | str, Placeholder]]:
    """The arguments that are placeholders, with their positions or keywords."""
    found: list[tuple[int | str, Placeholder]] = [(i, one) for i, one in enumerate(args) if _is_placeholder(one)]
    return found + [(key, one) for key, one in kwargs.items() if _is_placeholder(one)]


def _is_placeholder(one: Any) -> bool:
    return type(one) is Placeholder and one.value is None


def _argument(cut: Cut, args: Any, kwargs: Any, name: str) -> Tensor:
    place = args if isinstance(cut.where, int) else kwargs
    try:
        tensor = place[cut.where]
    except (IndexError, KeyError):
        tensor = None
    if not isinstance(tensor, Tensor) or form(tensor) != (cut.shape, cut.dtype):
        raise UsageError(
            f"strategy pipeline: {name} is called with {tensor if tensor is None else form(tensor)}, but was called "
            f"with {(cut.shape, cut.dtype)} for earlier examples of the same shapes. Shapes in a model must not depend "
            "on the examples' values. Otherwise use strategy='ddp'."
        )
    return tensor


def _as_forms(output: Any, given: Sequence[Placeholder]) -> Any:
    """The output with a form in place of each placeholder. None if the call cannot be skipped: the output has no
    placeholder, or it has a real tensor or a number, which must be computed again for other examples."""
    places = {id(one): number for number, one in enumerate(given)}
    forms = 0

    def as_form(one: Placeholder) -> Any:
        nonlocal forms
        forms += 1
        return _Form(one, places.get(id(one), -1))

    found = mapped(output, Placeholder, as_form)
    return found if forms and not holds(found, (Tensor, int, float)) else None


def _from_forms(output: Any, given: Sequence[Tensor], make: Callable[[_Form], Tensor]) -> Any:
    def made(one: _Form) -> Tensor:
        return given[one.argument] if 0 <= one.argument < len(given) else make(one)

    return mapped(output, _Form, made)


def form_of(batch: Any) -> Any:
    """The form of examples: their structure, with shape and dtype in place of each tensor."""
    if isinstance(batch, Tensor):
        return form(batch)
    if isinstance(batch, Mapping):
        return tuple((key, form_of(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return tuple(form_of(value) for value in batch)
    if hasattr(batch, "__dict__") and not callable(batch):
        return tuple((key, form_of(value)) for key, value in vars(batch).items())
    return type(batch).__name__


def check_names(model: nn.Module, cut: str, stages: int) -> None:
    """Raises SettingError for an invalid `cut`, or ModelError for too few layers. Needs no examples."""
    layers = [
        name for name, module in model.named_modules() if name and next(iter(module.parameters()), None) is not None
    ]
    own = [name for name, module in model.named_modules() if parameters_of(module)]
    if len(own) < stages:
        raise ModelError(
            f"strategy pipeline: the model has {len(own)} layers ({', '.join(own[:8])}), too few for {stages} stages. "
            "Set stages, or start fewer processes."
        )
    parts = [part.strip() for part in cut.split(",")] if cut else []
    known = dict(model.named_modules())
    for part in parts:
        name, _, count = part.partition("#")
        if part.isdigit() or (name in known and (not count or count.isdigit())):
            continue
        near = suggest(name, layers) if len(layers) <= 12 else _nearest(name, layers)
        raise SettingError(
            f"strategy pipeline: cut={cut!r}: the model has no layer {part!r} at which a stage could begin. {near}"
        )
    if parts and len(parts) != stages - 1:
        raise SettingError(
            f"strategy pipeline: cut={cut!r}: {stages} stages need {stages - 1} split point(s), in order: names of "
            f"layers, such as {layers[len(layers) // 2]}."
        )


def _nearest(name: str, layers: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, layers, 3, 0.5)
    return f"Did you mean {' or '.join(near)}?" if near else f"Its layers are: {', '.join(layers[:12])} ..."
