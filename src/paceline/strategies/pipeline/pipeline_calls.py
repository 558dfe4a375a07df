"""A pipeline's stages as stretches of the user's own closure and forward, from one call of a layer to another.

Models that people bring have keyword arguments, masks that are made by values, outputs as objects, or one layer that is
called many times. So nothing is taken apart. Each process runs the closure on the same examples, with the model's own
code, and computes only its stage:

    stage 0     computes up to the call with which stage 1 begins, and sends the input of this call; there the run ends
    stage 1     skips the layers before (they return Absent tensors: absent.py), fills the absent input of this call
                with what it receives, and computes from there on
    the last    computes to the end of the closure, and so the loss

Every stage computes what stands between layers (masks, positions, labels) from the examples. One tensor travels at a
cut.

Phase 1, once for each form of the examples: the closure runs with every parameter absent, so that nothing is computed.
  A record has which layer is called when and what it returns, which parameters are used when, and which tensors are
  used later. A cut is possible at the call of a layer where a single tensor is used later, and it is the layer's input.
  A layer that needs values (it routes by them, say) computes zeros instead. A closure that needs the model's output is
  looked at no further: all that the model returned counts as used later.
Phase 2, the cut: by names of layers, or so that the largest stretch has as few parameters as can be (a layer that is
  called many times counts each time).
Phase 3, the stages' runs. A parameter that several stages use (tied weights, a layer that is called on both sides of a
  cut) belongs to the first of them (`stage_parameters.py`).
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
from paceline.strategies.pipeline.absent import (
    Absent,
    AbsentParameters,
    ValuesNeededError,
    absent,
    form,
    restoring_buffers,
)
from paceline.torch_private.core import COMPILED_CALL, NormBase, compiled_call, parameters_of, plain_call, version_of

Call = tuple[int, int]
"""A module's number in `named_modules`, and which of its calls in a run of the closure, from 1 on."""
END = float("inf")


class Span(NamedTuple):
    """A recorded call of a module. Time is the number of operations with absent tensors so far."""

    start: float  # time of its begin
    end: float  # time of its end
    inner: Counter[int]  # module -> its calls within this call, itself included
    given: list[tuple[tuple[int, ...], torch.dtype]]  # forms of its absent arguments
    output: Any  # what it returned, with a form in the place of each absent tensor; None: it cannot be skipped


class _Form:
    """In the place of a tensor. argument: the index of the call's absent argument that it is (-1: none)."""

    __slots__ = ("argument", "device", "dtype", "shape")

    def __init__(self, one: Tensor, argument: int) -> None:
        self.shape, self.dtype, self.device, self.argument = tuple(one.shape), one.dtype, one.device, argument


class Cut(NamedTuple):
    """A call at which a stage can begin."""

    call: Call
    name: str  # of the layer; with #n where it is called several times
    at: float  # time of the call
    where: int | str  # the argument that travels: its position, or its keyword
    shape: tuple[int, ...]  # of this argument
    dtype: torch.dtype


class Record(NamedTuple):
    """The result of phase 1."""

    spans: dict[Call, Span]
    cuts: list[Cut]  # the possible ones, in order
    uses: list[tuple[float, Tensor]]  # time, parameter
    written: set[Tensor]  # buffers that were written to


class _Ended(BaseException):
    """Ends a run where the stage has computed its output. Not an Exception, which the user's code may catch."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class _Run:
    """One run of the closure. called: handles each call of a module."""

    def __init__(self, called: Callable[[Call, nn.Module, Any, Any], Any]) -> None:
        self.called = called
        self.counts: Counter[int] = Counter()  # module -> its calls so far


class Calls:
    """A model whose calls of modules can be recorded and skipped, and at which a run can begin or end."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.names = dict(enumerate(name for name, _ in model.named_modules()))
        self._modules = dict(enumerate(model.modules()))
        self._device = device
        self._absent = {id(p): absent(p.shape, p.dtype, device) for p in model.parameters()}
        self._by_absent = {id(self._absent[id(p)]): p for p in model.parameters()}
        for one in self._absent.values():
            one.of_parameter = True
        self._run: _Run | None = None
        self._compiled: dict[nn.Module, Any] = {}

    @property
    def running(self) -> bool:
        """Whether the closure is being run for a stage, or recorded."""
        return self._run is not None

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Within the block the closure may be run for a stage, or recorded. What a layer that was compiled calls is not
        seen."""
        self._compiled = {m: compiled_call(m) for m in self._modules.values() if compiled_call(m) is not None}
        within = {inner for m in self._compiled if m is not self.model for inner in m.modules() if inner is not m}
        seen = {number: m for number, m in self._modules.items() if m not in within}
        for number, module in seen.items():  # nn.Module.__call__ calls this in place of hooks and forward
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
        """What a call of the module computes without this class; of the model, of which a stage has some layers only,
        not compiled."""
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
        """Runs the closure with all parameters absent. Raises ModelError where it needs values."""
        clock = [0.0]
        created: dict[int, float] = {}  # identity of an absent tensor -> time
        used: dict[int, float] = {}  # and the time of its last use
        alive: list[Absent] = []  # all, so that no identity is used twice
        uses: list[tuple[float, Tensor]] = []
        spans: dict[Call, Span] = {}
        entries: list[tuple[float, Call, list[tuple[int | str, Absent]], Sequence[Call]]] = []
        open_calls: list[Call] = []
        outputs: list[Any] = []  # of the model

        def operation(inputs: Sequence[Absent], made: Sequence[Absent]) -> None:
            clock[0] += 1
            for one in inputs:
                parameter = self._by_absent.get(id(one))
                if parameter is None:
                    used[id(one)] = clock[0]
                else:
                    uses.append((clock[0], parameter))
            for one in made:
                alive.append(one)
                created[id(one)] = clock[0]

        def called(call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
            start, before, given = clock[0], run.counts.copy(), _absent_in(args, kwargs)
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
                made: list[Absent] = []
                mapped(output, Absent, made.append)
                operation([*(one for _, one in given), *(self._absent[id(p)] for p in module.parameters())], made)
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
        for norm in norms:  # in training one would communicate with other replicas
            norm.training = False
        try:
            with (
                torch.random.fork_rng(devices=[]),
                restoring_buffers(list(versions)),
                torch.no_grad(),
                AbsentParameters(self._absent, operation),
                self._running(called) as run,
            ):
                try:
                    terms = compute()
                except ValuesNeededError:
                    if not outputs:
                        raise
                    mapped(outputs, Absent, lambda one: used.update({id(one): END}))
                    terms = []
                written = {buffer for buffer, before in versions.items() if version_of(buffer) != before}
        finally:
            for norm in norms:
                norm.training = True
        for norm in norms:
            written |= set(norm.buffers(recurse=False))
        for term in terms:
            if type(term.value) is Absent:
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
        """What a layer returns for zeros, and of weights that are zero, with absent tensors in the place of all
        others."""
        called, modes = run.called, {inner: inner.training for inner in module.modules()}
        run.called = lambda call, inner, args, kwargs: plain_call(inner)(*args, **kwargs)
        state = {name: _zeros(self._absent[id(p)]) for name, p in module.named_parameters()}
        state |= {name: buffer.clone() for name, buffer in module.named_buffers()}
        args, kwargs = mapped((args, kwargs), Absent, _zeros)
        try:
            output = torch.func.functional_call(module.eval(), state, args, kwargs)
        finally:
            run.called = called
            for inner, was in modes.items():
                inner.training = was
        return mapped(output, Tensor, lambda one: absent(one.shape, one.dtype, one.device))

    # --- phase 3

    def stretch(
        self,
        record: Record,
        entry: tuple[Cut, Tensor] | None,
        exit: Cut | None,
        begin: Callable[[], None],
        compute: Callable[[], Any],
    ) -> Any:
        """Runs the closure from the call `entry` (None: from its begin), with the input that was received, to the call
        `exit` (None: to its end). Returns the input of `exit`, or what the closure returns. begin(): called at
        `entry`."""
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
                assert type(one) is Absent
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
                f"strategy pipeline: {missed.name}, with which a stage begins, was not called for these examples, and "
                "was for earlier ones of the same form. What is called must not depend on the examples' values; or use "
                "strategy='ddp'."
            )
        return result

    def _skip(self, run: _Run, call: Call, span: Span, args: Any, kwargs: Any) -> Any:
        given = [one for _, one in _absent_in(args, kwargs)]
        if [form(one) for one in given] != span.given:
            raise UsageError(
                f"strategy pipeline: {self.names[call[0]]} is called with tensors of other forms than for earlier "
                "examples of the same form. The forms in a model must not depend on the examples' values; or use "
                "strategy='ddp'."
            )
        run.counts.update(span.inner)
        run.counts[call[0]] -= 1  # it was counted when it began
        return _from_forms(span.output, given, lambda one: absent(one.shape, one.dtype, one.device))

    def zeros(self, record: Record, compute: Callable[[], Any]) -> Any:
        """Runs the closure with zeros in place of the model's output, for what it counts."""
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
                output = mapped(output, Absent, _zeros)
            return output

        with self._running(called) as run:
            return compute()

    @contextmanager
    def seconds(self, cuts: Sequence[Cut]) -> Iterator[list[float]]:
        """Measures a run of the closure within the block: the seconds from cut to cut, complete at its end."""
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
        """The stretches between possible cuts, by name."""
        first = next(
            (self.names[number] for number, _ in record.spans if number and parameters_of(self._modules[number])), ""
        )
        return [first or "begin", *(cut.name for cut in record.cuts)]

    def sizes(self, record: Record) -> list[float]:
        """How many parameters each stretch uses."""
        bounds = [0.0, *(cut.at for cut in record.cuts), END]
        sizes = []
        for start, end in pairwise(bounds):
            used = {id(p): p for at, p in record.uses if start < at <= end}
            sizes.append(float(sum(p.numel() for p in used.values()) + 1))
        return sizes

    def holdings(self, record: Record, chosen: Sequence[Cut]) -> list[nn.Module]:
        """For each stage a module with the parameters that it uses, and the buffers of its layers."""
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
        """Names of the parameters that the stretch between two cuts uses and that are not in `kept`."""
        begin, until = 0.0 if start is None else start.at, END if end is None else end.at
        missing = {id(p) for at, p in record.uses if begin < at <= until and p not in kept}
        return [name for name, p in self.model.named_parameters() if id(p) in missing]

    @contextmanager
    def absent_parameters(self, kept: Collection[Tensor]) -> Iterator[None]:
        """Within the block all parameters that are not in `kept` are absent: code between layers may name them."""
        replaced = [
            (module, name, p)
            for module in self._modules.values()
            for name, p in parameters_of(module).items()
            if p is not None and p not in kept
        ]
        for module, name, p in replaced:
            parameters_of(module)[name] = self._absent[id(p)]
        try:
            yield
        finally:
            for module, name, p in replaced:
                parameters_of(module)[name] = p


def places_of(model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any) -> list[str]:
    """The layers with which stages of this model can begin, for `cut`, found with one batch. Nothing is computed."""
    calls = Calls(model, torch.device("cpu"))
    terms: list[Term] = []

    def compute() -> list[Term]:
        mapped(loss_fn(model, batch), Absent, lambda one: terms.append(Term(one, None)))
        return terms

    with calls.intercepted():
        return calls.stretches(calls.record(compute))


def _zeros(one: Absent) -> Tensor:
    return torch.zeros(one.shape, dtype=one.dtype, device=one.device, requires_grad=one.dtype.is_floating_point)


def _absent_in(args: Any, kwargs: Any) -> list[tuple[int | str, Absent]]:
    """The arguments that are absent tensors, and their places."""
    found: list[tuple[int | str, Absent]] = [(i, one) for i, one in enumerate(args) if _is_absent(one)]
    return found + [(key, one) for key, one in kwargs.items() if _is_absent(one)]


def _is_absent(one: Any) -> bool:
    return type(one) is Absent and one.value is None


def _argument(cut: Cut, args: Any, kwargs: Any, name: str) -> Tensor:
    place = args if isinstance(cut.where, int) else kwargs
    try:
        tensor = place[cut.where]
    except (IndexError, KeyError):
        tensor = None
    if not isinstance(tensor, Tensor) or form(tensor) != (cut.shape, cut.dtype):
        raise UsageError(
            f"strategy pipeline: {name} is called with {tensor if tensor is None else form(tensor)} and was with "
            f"{(cut.shape, cut.dtype)} for earlier examples of the same form. The forms in a model must not depend on "
            "the examples' values; or use strategy='ddp'."
        )
    return tensor


def _as_forms(output: Any, given: Sequence[Absent]) -> Any:
    """The output with forms in place of absent tensors. None where it has values of these examples, which others need
    anew: a tensor that is not absent, or a number."""
    places = {id(one): number for number, one in enumerate(given)}
    forms = 0

    def as_form(one: Absent) -> Any:
        nonlocal forms
        forms += 1
        return _Form(one, places.get(id(one), -1))

    found = mapped(output, Absent, as_form)
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
    """Raises SettingError or ModelError for a cut that is wrong for any examples."""
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
            f"strategy pipeline: cut={cut!r}: the model has no layer {part!r} with which a stage could begin. {near}"
        )
    if parts and len(parts) != stages - 1:
        raise SettingError(
            f"strategy pipeline: cut={cut!r}: {stages} stages need {stages - 1} places where a new one begins, in "
            f"order: names of layers, such as {layers[len(layers) // 2]}."
        )


def _nearest(name: str, layers: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, layers, 3, 0.5)
    return f"Did you mean {' or '.join(near)}?" if near else f"Its layers are: {', '.join(layers[:12])} ..."
