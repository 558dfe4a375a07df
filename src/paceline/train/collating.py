"""A loader's collate function: what it draws, and what it may be handed.

A collate function is called on this process's part of a global batch, so that what it draws must not depend on the
part. Three kinds of draws are told apart:

1. torch's, with a row for each example: each row is its example's own (draws.py).
2. Any other of torch's, NumPy's or Python's: a choice for the whole batch. The generators are keyed by (seed, loader,
   epoch, step), alike for all parts, and so are those that the collate function holds itself.
3. Draws that are made example by example, or that mix examples. On a part they are others than on the whole.

The third kind is recognised when a loader draws for the first time: the same example is collated once, four times and
once, under the same keys. What then depends on the number, without being a row for each, is refused where a global
batch is cut. A collate function that cannot be asked so, or answers differently each time, is believed.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import default_collate

from paceline.errors import UsageError
from paceline.strategies.batch_plan import Part, Request
from paceline.train.draws import Call, ExampleDraws, RowKeys
from paceline.train.empty import empty_batch
from paceline.train.made_batches import Made
from paceline.train.randomness import mix, mix_each, seed_all, tag
from paceline.train.rows import take_rows
from paceline.train.sampler_rng import generators_of

Collate = Callable[[list[Any]], Any]

SCOPES = ("example", "global", "shard")
"""What collate= of `run.loader` may be."""

_COPIES = 4
_SEEDED = 624  # where both Mersenne Twisters stand when they have been seeded


class Streams:
    """The keys of one loader's draws."""

    def __init__(self, seed: int, name: str) -> None:
        self.name = name
        self.backwards = False  # a trial of `paceline verify`: examples come in reverse order, with their own draws
        self._example = mix(seed, tag("example"), tag(name))
        self._collate = mix(seed, tag("collate"), tag(name))
        self._rows = mix(seed, tag("rows"), tag(name))
        self._noise = mix(seed, tag("noise"), tag(name))
        self._yield = mix(seed, tag("yield"), tag(name))

    def for_example(self, epoch: int, index: int) -> None:
        """Before a data set makes one example."""
        seed_all(mix(self._example, epoch, index))

    def collate_key(self, request: Request, part: Part | None) -> int:
        """While examples are collated: choices for the whole batch. part: with collate="shard", other ones on each."""
        if part is None:
            return mix(self._collate, request.epoch, request.step)
        return mix(self._collate, request.epoch, request.step, part.shard, part.micro)

    def collate_rows(self, request: Request, part: Part) -> RowKeys:
        """While examples are collated: the streams of these examples."""
        return self._row_keys(self._rows, request, part)

    def noise_rows(self, request: Request, part: Part) -> RowKeys:
        """While a micro-batch is computed: the streams of these examples."""
        return self._row_keys(self._noise, request, part)

    def torch_key(self, request: Request, shard: int, micro: int) -> int:
        """While a micro-batch is computed: other noise on every shard and micro-batch."""
        return mix(self._yield, request.epoch, request.step, shard, micro)

    def python_key(self, request: Request) -> int:
        """While a global batch is computed: choices that all shards must agree on."""
        return mix(self._yield, request.epoch, request.step)

    def _row_keys(self, purpose: int, request: Request, part: Part) -> RowKeys:
        keys = mix_each(mix(purpose, request.epoch), np.asarray(part.indices, dtype=np.int64))
        keys = mix_each(keys, np.asarray(part.visits, dtype=np.int64)) if part.visits else keys
        return RowKeys(keys[::-1].copy() if self.backwards else keys)


class Found(NamedTuple):
    """What is known of a collate function's draws. whole: the shapes of torch's draws that are choices for the whole
    batch, by their number. refusal: why its draws depend on how the batch is cut; None where they do not."""

    whole: dict[int, tuple[int, ...]] = {}  # noqa: RUF012 (never written to)
    refusal: str | None = None


class Collating:
    """scope: one of SCOPES."""

    def __init__(self, collate: Collate, streams: Streams, scope: str = "example") -> None:
        self.collate, self.streams, self.scope = collate, streams, scope
        self._plain = getattr(collate, "__wrapped__", collate)  # what a trial has wrapped: its own calls are no batch
        self._found: Found | None = None if scope == "example" else Found()
        self._due = True  # whether the next batch is looked at
        self._forms: tuple[Any, Any] | None = None  # with scope "global": a batch of one example, and of four
        self._last: tuple[tuple[int, int], Any] | None = None  # with scope "global": the whole batch of a step

    def batch(self, request: Request, part: Part, examples: list[Any]) -> Any:
        """The examples of a part, collated. Raises UsageError for draws that depend on the cut."""
        if self.collate is default_collate:
            return default_collate(examples)
        if self.scope == "shard":
            self._seed(self.streams.collate_key(request, part))
            return self.collate(examples)
        examples = examples[:: -1 if self.streams.backwards else 1]
        keys = self.streams.collate_rows(request, part)
        if self._found is not None:
            batch = self._run(request, keys, examples)[0]
        else:
            batch = self._first(request, keys, examples)
        if self._found is not None and self._found.refusal and len(examples) != request.total:
            raise UsageError(self._found.refusal)
        return batch

    def _first(self, request: Request, keys: RowKeys, examples: list[Any]) -> Any:
        """A batch of a loader that has not drawn yet. If it draws now, that is looked into: at the first batch at once,
        later with the next one, since only copies that were made beforehand are as the examples were."""
        spare = _spare(examples) if self._due else None
        batch, drawing, drew = self._run(request, keys, examples)
        if spare is not None and drew:
            self._found = self._look(request, spare[0])
            if any(drawing.shapes.get(number) == shape for number, shape in self._found.whole.items()):
                batch = self._run(request, keys, spare, self._plain)[0]
        elif self._due and drew:
            self._found = Found()
        self._due = drew
        return batch

    def empty(self, request: Request, part: Part, example: Any) -> Any:
        """The zero-length batch of a part without examples, in the form that this example gives."""

        def collate(examples: list[Any]) -> Any:
            if self.scope == "shard":
                self._seed(self.streams.collate_key(request, part))
                return self.collate(examples)
            return self._run(request, self._copies_of(request, len(examples)), _spare(examples) or examples)[0]

        return empty_batch(collate, example)

    def rows(self, request: Request, part: Part, examples: Callable[[], list[Any]]) -> Any:
        """With scope "global": a part's rows of the whole global batch, whose examples are asked for where they are
        needed. Raises UsageError for a batch that cannot be cut by examples."""
        step = (request.epoch, request.step)
        if self._last is None or self._last[0] != step:
            given = examples()[:: -1 if self.streams.backwards else 1]
            if self._forms is None:
                one, several = ([_spare(given[:1]) or given[:1] for _ in range(n)] for n in (1, _COPIES))
                self._forms = self._form(request, one), self._form(request, several)
            self._last = (step, self._run(request, None, given)[0])
        assert self._forms is not None
        low, high = part.start, part.start + len(part.indices)
        if self.streams.backwards:
            low, high = request.total - high, request.total - low
        return take_rows(*self._forms, self._last[1], low, high, request.total, many=_COPIES)

    def _form(self, request: Request, examples: list[list[Any]]) -> Any:
        return self._run(request, None, [example for own in examples for example in own], self._plain)[0]

    # --- draws

    def _copies_of(self, request: Request, count: int) -> RowKeys:
        """Streams for so many copies of the global batch's first example."""
        return self.streams.collate_rows(request, Part(0, 0, (request.first,) * count, 0, tuple(range(count))))

    def _seed(self, key: int) -> None:
        seed_all(key)
        for number, handle in enumerate(generators_of(_holder(self._plain))):
            handle.seed(mix(key, number))

    def _run(
        self, request: Request, keys: RowKeys | None, examples: list[Any], collate: Collate | None = None
    ) -> tuple[Any, _Drawing, bool]:
        """(the batch; how torch drew; whether anything was drawn). keys: None where no row is an example's own."""
        self._seed(self.streams.collate_key(request, None))
        held = [] if self._found else [(handle, handle.get()) for handle in generators_of(_holder(self._plain))]
        drawing = _Drawing(RowKeys(np.empty(0, np.uint64)) if keys is None else keys, self._found or Found())
        with drawing:
            batch = (collate or self.collate)(examples)
        if self._found is not None:
            return batch, drawing, True
        drew = bool(drawing.calls) or _python_drew() or any(not _same(handle.get(), was) for handle, was in held)
        return batch, drawing, drew

    def _look(self, request: Request, example: Any) -> Found:
        def run(count: int) -> tuple[list[tuple[bool, tuple[int, ...]]], Any]:
            examples = [copy.deepcopy(example) for _ in range(count)]
            _, drawing, _ = self._run(request, self._copies_of(request, count), examples, self._plain)
            states = [handle.get() for handle in generators_of(_holder(self._plain))]
            return drawing.calls, (random.getstate(), np.random.get_state(), states)

        try:
            (one, before), (many, after), (again, still) = run(1), run(_COPIES), run(1)
        except Exception:  # it cannot take other counts: whatever a function of the user's says to them
            return Found()
        if one != again or not _same(before, still):
            return Found()  # it has a state of its own
        if not _same(before, after):
            return Found(refusal=self._refusal(_BY_EXAMPLE, "NumPy's or Python's generators"))
        if len(one) != len(many):
            return Found(refusal=self._refusal(_BY_EXAMPLE, "torch's generators"))
        whole: dict[int, tuple[int, ...]] = {}
        for number, ((mixes, first), (_, second)) in enumerate(zip(one, many, strict=True)):
            if first == second:
                whole[number] = first
            elif mixes:
                return Found(refusal=self._refusal(_MIXES))
            elif (first[:1], second[:1]) != ((1,), (_COPIES,)):
                return Found(refusal=self._refusal(_BY_EXAMPLE, "torch's generators"))
        return Found(whole)

    def _refusal(self, why: str, what: str = "") -> str:
        name = getattr(self._plain, "__qualname__", type(self._plain).__qualname__)
        return f"loader {self.streams.name!r}: the collate function {name} {why.format(what=what)} {_REMEDY}"


_BY_EXAMPLE = (
    "draws from {what} as often as the batch has examples. It is handed a part of each global batch, so that the "
    "parts would draw the same numbers for other examples, and the model would depend on how the batch is cut over "
    "devices and micro-batches."
)
_MIXES = (
    "draws an order of the examples, as mixup does. It is handed a part of each global batch, so that the model would "
    "depend on how the batch is cut over devices and micro-batches."
)
_REMEDY = (
    'Say run.loader(..., collate="global"): it is then handed the whole global batch on every process, which keeps its '
    "own rows. Or draw with torch and a row for each example, such as torch.rand(len(examples), length), or in the "
    'data set\'s __getitem__. With collate="shard" each part draws for itself, which changes the model.'
)


class _Drawing(ExampleDraws):
    """Other draws come from the default generator, which is keyed alike for all parts, whichever one was given."""

    def __init__(self, keys: RowKeys, found: Found) -> None:
        super().__init__(keys, lambda call, number: call.plain())
        self._found = found

    def is_whole(self, call: Call, number: int) -> bool:
        return self._found.whole.get(number) == call.shape

    @property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Of the draws that had a row for each example."""
        return {k: shape for k, (_, shape) in enumerate(self.calls) if shape[:1] == (len(self.keys),)}


def _holder(collate: Any) -> Any:
    """The object whose attributes a collate function's generators may be."""
    while isinstance(collate, (functools.partial, Made)):
        collate = collate.function if isinstance(collate, Made) else collate.func
    return getattr(collate, "__self__", collate)


def _python_drew() -> bool:
    """Whether NumPy's or Python's generator was drawn from since `seed_all`."""
    state = np.random.get_state(legacy=False)
    return random.getstate()[1][-1] != _SEEDED or state["state"]["pos"] != _SEEDED


def _spare(examples: Sequence[Any]) -> list[Any] | None:
    """Copies, since a collate function may change what it is given; None of what cannot be copied."""
    try:
        return [copy.deepcopy(example) for example in examples]
    except Exception:  # whatever a class of the user's says to it
        return None


def _same(one: Any, other: Any) -> bool:
    """Of states of generators: trees of numbers and arrays."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    same = one == other
    return bool(same) if isinstance(same, bool) else bool(np.all(np.asarray(same)))
