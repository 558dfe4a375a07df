"""Collators call a loader's collate function, so that its random draws do not depend on how the batch is split.

The collate function is called with this process's part of a global batch. There are three kinds of random draws:

1. Draws of torch with one row per example. Each row comes from the stream of its example (draws.py).
2. Any other draw of torch, NumPy or Python, as a choice for the whole batch. The generators, also those stored in the
   collate function, are keyed by (seed, loader, epoch, step), which is the same for all parts.
3. Draws made example by example, or draws that mix examples. Their values depend on the part.

The third kind is detected when a loader draws for the first time: copies of one example are collated in batches of 1, 4
and again 1, under the same keys. If a draw depends on the number of examples and has no row per example, it is refused
when the global batch is split. Some collate functions cannot be checked: they fail for other numbers of examples, or
their draws differ each time. These are trusted.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import default_collate

from paceline.data.batch_plan import Part, Request
from paceline.data.batch_rows import SEVERAL, empty_batch, slice_examples
from paceline.data.draws import DrawCall, ExampleDraws, RowKeys
from paceline.data.randomness import drawn_from, just_seeded, mix, mix_each, seed_all, tag
from paceline.data.sampler_rng import GeneratorHandle, generators_of, seed_generators
from paceline.data.user_batches import RowCollate
from paceline.errors import UsageError

Collate = Callable[[list[Any]], Any]

SCOPES = ("example", "global", "shard")
"""Values of the argument `collate` of `run.loader`, documented there."""


class Streams:
    """The keys of one loader's random streams."""

    def __init__(self, seed: int, name: str) -> None:
        self.name = name
        self.backwards = False  # set by `paceline verify`: collate examples in reverse order, each with its draws
        self._example = mix(seed, tag("example"), tag(name))
        self._collate = mix(seed, tag("collate"), tag(name))
        self._rows = mix(seed, tag("rows"), tag(name))
        self._noise = mix(seed, tag("noise"), tag(name))
        self.of_yields = mix(seed, tag("yield"), tag(name))

    def seed_example(self, epoch: int, index: int) -> None:
        """Seed the global generators for one example, before it is read from the data set."""
        seed_all(mix(self._example, epoch, index))

    def example_keys(self, epoch: int, indices: Sequence[int]) -> list[int]:
        """The keys that `seed_example` uses for these examples."""
        found: list[int] = mix_each(mix(self._example, epoch), np.asarray(indices, dtype=np.int64)).tolist()
        return found

    def collate_key(self, request: Request, part: Part | None) -> int:
        """The key of draws for the whole batch during collating. With collate="shard" each part draws separately;
        otherwise `part` is None."""
        if part is None:
            return mix(self._collate, request.epoch, request.step)
        return mix(self._collate, request.epoch, request.step, part.shard, part.micro)

    def collate_rows(self, request: Request, part: Part) -> RowKeys:
        """The random streams of a part's examples, for draws in the collate function."""
        return self._row_keys(self._rows, request, part)

    def noise_rows(self, request: Request, part: Part) -> RowKeys:
        """The streams of a part's examples, for the model's computation."""
        return self._row_keys(self._noise, request, part)

    def torch_key(self, request: Request, shard: int, micro: int) -> int:
        """The key of torch's generators while the model computes a micro-batch: noise differs between shards."""
        return mix(self.of_yields, request.epoch, request.step, shard, micro)

    def python_key(self, request: Request) -> int:
        """The key of Python's and NumPy's generators while the model computes, the same for all shards."""
        return mix(self.of_yields, request.epoch, request.step)

    def _row_keys(self, purpose: int, request: Request, part: Part) -> RowKeys:
        def make() -> np.ndarray:
            keys = mix_each(mix(purpose, request.epoch), np.asarray(part.indices, dtype=np.int64))
            keys = mix_each(keys, np.asarray(part.visits, dtype=np.int64)) if part.visits else keys
            return keys[::-1].copy() if self.backwards else keys

        return RowKeys(len(part.indices), make)


class CollateDraws(NamedTuple):
    """Facts about the draws of a collate function."""

    # Shapes of torch's draws that are choices for the whole batch, by the number of the draw.
    batch_level: dict[int, tuple[int, ...]] = {}  # noqa: RUF012 (never written to)
    refusal: str | None = None  # why the draws depend on how the batch is split; None if they do not


class Collator:
    """Collates the parts of one loader's global batches. `scope` is one of SCOPES."""

    def __init__(self, collate: Collate, streams: Streams, scope: str = "example") -> None:
        self.collate, self.streams, self.scope = collate, streams, scope
        # The user's function without the wrapper of `paceline verify`, which records each call as a batch.
        self._plain = getattr(collate, "__wrapped__", collate)
        # None until the collate function has drawn for the first time.
        self._draws: CollateDraws | None = None if scope == "example" else CollateDraws()
        self._copy_next = True  # copy the next batch's examples before collating, to inspect the draws?
        self._samples: tuple[Any, Any] | None = None  # scope "global": a batch of one example, and of several copies
        self._last: tuple[tuple[int, int], Any] | None = None  # scope "global": (epoch, step) and its whole batch

    def collate_part(self, request: Request, part: Part, read: Callable[[Sequence[int]], list[Any]]) -> Any:
        """The collated batch of a part. `read` returns the examples with given indices.

        Raises UsageError for draws that depend on how the batch is split, and for a batch that cannot be split."""
        if request.whole:
            return self._rows_of_whole(request, part, read)
        if not part.indices:
            return self._empty(request, part, read([request.first])[0])
        return self.batch(request, part, read(part.indices))

    def batch(self, request: Request, part: Part, examples: list[Any]) -> Any:
        """The collated examples of a part. Raises UsageError for draws that depend on how the batch is split."""
        if self.collate is default_collate:
            return default_collate(examples)
        if self.scope == "shard":
            seed_generators(self.streams.collate_key(request, part), self._held())
            return self.collate(examples)
        examples = examples[:: -1 if self.streams.backwards else 1]
        keys = self.streams.collate_rows(request, part)
        if self._draws is not None:
            batch = self._call(request, keys, examples)[0]
        else:
            batch = self._inspected_batch(request, keys, examples)
        if self._draws is not None and self._draws.refusal and len(examples) != request.total:
            raise UsageError(self._draws.refusal)
        return batch

    def _inspected_batch(self, request: Request, keys: RowKeys, examples: list[Any]) -> Any:
        """Collate a batch of a loader that has not drawn yet. If the collate function draws now, inspect its draws with
        copies of the examples. The copies are made before collating, since the function may change the examples. The
        first batch is copied, and later only a batch that follows a batch with draws."""
        copies = _copied(examples) if self._copy_next else None
        batch, drawing, drew = self._call(request, keys, examples)
        if copies is not None and drew:
            self._draws = self._inspect(request, copies[0])
            if any(drawing.shapes.get(number) == shape for number, shape in self._draws.batch_level.items()):
                batch = self._call(request, keys, copies, self._plain)[0]
        elif self._copy_next and drew:
            self._draws = CollateDraws()
        self._copy_next = drew
        return batch

    def _empty(self, request: Request, part: Part, example: Any) -> Any:
        """The zero-length batch of a part without examples. `example` is a template for shapes and types."""

        def collate(examples: list[Any]) -> Any:
            if self.scope == "shard":
                seed_generators(self.streams.collate_key(request, part), self._held())
                return self.collate(examples)
            return self._call(request, self._keys_of_copies(request, len(examples)), _copied(examples) or examples)[0]

        return empty_batch(collate, example)

    def _rows_of_whole(self, request: Request, part: Part, read: Callable[[Sequence[int]], list[Any]]) -> Any:
        """With scope "global": a part's rows of the whole global batch. Raises UsageError for a batch that cannot be
        split by example."""
        step = (request.epoch, request.step)
        if self._last is None or self._last[0] != step:
            examples = read(request.whole)[:: -1 if self.streams.backwards else 1]
            if self._samples is None:
                self._samples = self._sample(request, examples[:1], 1), self._sample(request, examples[:1], SEVERAL)
            self._last = (step, self._call(request, None, examples)[0])
        assert self._samples is not None
        low, high = part.start, part.start + len(part.indices)
        if self.streams.backwards:
            low, high = request.total - high, request.total - low
        return slice_examples(*self._samples, self._last[1], low, high, request.total)

    def _sample(self, request: Request, one: list[Any], count: int) -> Any:
        """The collated batch of `count` copies of one example."""
        copies = [example for _ in range(count) for example in _copied(one) or one]
        return self._call(request, None, copies, self._plain)[0]

    # --- draws

    def _keys_of_copies(self, request: Request, count: int) -> RowKeys:
        """Streams for `count` copies of the global batch's first example."""
        return self.streams.collate_rows(request, Part(0, 0, (request.first,) * count, 0, tuple(range(count))))

    def _held(self) -> list[GeneratorHandle]:
        """The generators stored in the collate function."""
        return generators_of(_owner(self._plain))

    def _call(
        self, request: Request, keys: RowKeys | None, examples: list[Any], collate: Collate | None = None
    ) -> tuple[Any, _Drawing, bool]:
        """Call the collate function. Returns (the batch, torch's draws, whether anything was drawn). keys: None if no
        draw may have one row per example."""
        generators = self._held()
        seed_generators(self.streams.collate_key(request, None), generators)
        held = [] if self._draws else [(handle, handle.get()) for handle in generators]
        keys = RowKeys(0, lambda: np.empty(0, np.uint64)) if keys is None else keys
        drawing = _Drawing(keys, self._draws or CollateDraws())
        seeded = None if self._draws is not None else just_seeded()
        with drawing:
            batch = (collate or self.collate)(examples)
        if seeded is None:
            return batch, drawing, True
        drew = bool(drawing.calls or drawn_from(seeded)) or any(
            not _equal(handle.get(), before) for handle, before in held
        )
        return batch, drawing, drew

    def _inspect(self, request: Request, example: Any) -> CollateDraws:
        """Find the kinds of draws of the collate function: collate 1, SEVERAL and again 1 copies of an example."""

        def run(count: int) -> tuple[list[tuple[bool, tuple[int, ...]]], Any]:
            examples = [copy.deepcopy(example) for _ in range(count)]
            _, drawing, _ = self._call(request, self._keys_of_copies(request, count), examples, self._plain)
            states = [handle.get() for handle in self._held()]
            return drawing.calls, (random.getstate(), np.random.get_state(), states)

        try:
            (one, before), (many, after), (again, still) = run(1), run(SEVERAL), run(1)
        except Exception:  # a user's function may raise anything if it does not support other counts
            return CollateDraws()
        if one != again or not _equal(before, still):
            return CollateDraws()  # it has state, so it cannot be checked
        if not _equal(before, after):
            return CollateDraws(refusal=self._refusal(_BY_EXAMPLE, "NumPy's or Python's generators"))
        if len(one) != len(many):
            return CollateDraws(refusal=self._refusal(_BY_EXAMPLE, "torch's generators"))
        batch_level: dict[int, tuple[int, ...]] = {}
        for number, ((mixes, first), (_, second)) in enumerate(zip(one, many, strict=True)):
            if first == second:
                batch_level[number] = first
            elif mixes:
                return CollateDraws(refusal=self._refusal(_MIXES))
            elif (first[:1], second[:1]) != ((1,), (SEVERAL,)):
                return CollateDraws(refusal=self._refusal(_BY_EXAMPLE, "torch's generators"))
        return CollateDraws(batch_level)

    def _refusal(self, why: str, what: str = "") -> str:
        name = getattr(self._plain, "__qualname__", type(self._plain).__qualname__)
        return f"loader {self.streams.name!r}: the collate function {name} {why.format(what=what)} {_REMEDY}"


_BY_EXAMPLE = (
    "draws from {what} once per example. It gets a part of each global batch, so the parts would draw the same "
    "numbers for different examples, and the model would depend on how the batch is split over devices and "
    "micro-batches."
)
_MIXES = (
    "draws a permutation of the examples, as mixup does. It gets a part of each global batch, so the model would "
    "depend on how the batch is split over devices and micro-batches."
)
_REMEDY = (
    'Use run.loader(..., collate="global"): the function then gets the whole global batch on every process, and each '
    "process keeps its rows. Or draw one row per example with torch, such as torch.rand(len(examples), length), or in "
    'the data set\'s __getitem__. With collate="shard" each part draws separately, which changes the model.'
)


class _Drawing(ExampleDraws):
    """torch's draws in a collate function. Draws without a row per example always come from the default generator, even
    if the function passes a different generator. The default generator has the same key for all parts."""

    def __init__(self, keys: RowKeys, known: CollateDraws) -> None:
        super().__init__(keys, lambda call, number: call.plain())
        self._known = known

    def is_batch_level(self, call: DrawCall, number: int) -> bool:
        return self._known.batch_level.get(number) == call.shape

    @property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """The shapes of the draws with one row per example, by the number of the draw."""
        return {k: shape for k, (_, shape) in enumerate(self.calls) if shape[:1] == (len(self.keys),)}


def _owner(collate: Any) -> Any:
    """The object that may hold a collate function's generators as attributes."""
    while isinstance(collate, (functools.partial, RowCollate)):
        collate = collate.function if isinstance(collate, RowCollate) else collate.func
    return getattr(collate, "__self__", collate)


def _copied(examples: Sequence[Any]) -> list[Any] | None:
    """Copies of the examples, since a collate function may change them. None if they cannot be copied."""
    try:
        return [copy.deepcopy(example) for example in examples]
    except Exception:  # a user's class may raise anything
        return None


def _equal(one: Any, other: Any) -> bool:
    """Are these states of generators (trees of numbers and arrays) equal?"""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    same = one == other
    return bool(same) if isinstance(same, bool) else bool(np.all(np.asarray(same)))
