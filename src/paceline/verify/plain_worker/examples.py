"""The examples of a script's batches: recorded on each rank, and yielded together in one process.

In the subject run, each training batch is recorded as its examples, before the script's collate function joins them. A
run of one process yields, in place of its own batch n, the examples of batch n of all ranks, joined by its own collate
function. So it does not read the data set. It sees the same examples, with the same random augmentation.

Loaders are numbered by their first iteration. Iterations without gradients, such as evaluations, are not recorded. A
file `examples-L-P-Y-rR` holds batch Y of pass P over loader L on rank R.

If a script has no DataLoader, the positional inputs of its models' forwards are recorded and replayed instead, joined
along their first dimension, and so are the targets of torch's loss functions. These are batches of INPUTS and TARGETS.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from paceline.data.draws import RowKeys
from paceline.observe.digests import own_copy, tensors_in
from paceline.observe.patching import Patches
from paceline.torch_private.observed import persistent_iterator, pin_batch
from paceline.trials.spec import TrialEnded
from paceline.verify.plain_worker.step_draws import RowDraws, StepDraws, generators_kept, own_keys, seed_generators

_COLLATE = 0xC011A7E  # the seed of the generators in a collate function
MOST_BYTES = 1 << 30  # recorded examples of a rank
# instead of a loader's number: the inputs of forwards, the targets of loss functions, the script's batch function
INPUTS, TARGETS, FUNCTION = -1, -2, -3
_LOSSES = [
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss"),
]


class Recorded(NamedTuple):
    """The examples of one batch.

    examples: the list that the collate function gets; without automatic batching, one object.
    keys: the hash of each example's content.
    is_list: whether `examples` is a list.
    """

    examples: Any
    keys: list[int]
    is_list: bool


class Carried:
    """A batch and its recorded examples, on the way from a loader's worker."""

    def __init__(self, batch: Any, payload: bytes | None, keys: list[int], reason: str) -> None:
        self.batch, self.payload, self.keys, self.reason = batch, payload, keys, reason

    def pin_memory(self, *args: Any) -> Carried:
        """torch calls it for a loader with pin_memory=True."""
        self.batch = pin_batch(self.batch, *args)
        return self


class RecordingCollate:
    """Replaces a loader's collate function, in the process or the worker that calls it."""

    def __init__(self, collate: Callable[[Any], Any], is_list: bool) -> None:
        self.collate, self.is_list = collate, is_list

    def __call__(self, examples: Any) -> Carried:
        keys = [content_key(example) for example in examples] if self.is_list else [content_key(examples)]
        payload, reason = None, ""
        try:
            payload = dump(Recorded(examples, keys, self.is_list))
        except Exception as error:  # anything may be in a batch
            reason = f"{type(error).__name__}: {error}"
        return Carried(collated(self.collate, examples, keys, [len(keys)]), payload, keys, reason)


def collated(collate: Callable[[Any], Any], examples: Any, keys: Sequence[int], sizes: Sequence[int]) -> Any:
    """Call the collate function. Its random numbers depend on the examples only, not on the process."""
    rows = RowKeys(len(keys), lambda: own_keys(keys, sizes))
    with generators_kept():
        seed_generators(_COLLATE)
        with RowDraws(rows, sizes, []):
            return collate(examples)


class Loaders:
    """The DataLoaders of this process.

    Args:
        folder: of the run that records, or of the recorded run.
        rank: this process.
        draws: gets the examples of each batch.
        replay: yields recorded batches; None: record.
        active: returns whether to record or replay now.
    """

    def __init__(
        self,
        folder: str,
        rank: int,
        draws: StepDraws,
        patches: Patches,
        replay: Replay | None,
        active: Callable[[], bool],
    ) -> None:
        self._active = active
        self._folder, self._rank, self._draws, self._replay = folder, rank, draws, replay
        self._numbers: Any = WeakIdKeyDictionary()  # loader -> its number
        self._next_number = itertools.count()
        self._passes: dict[int, int] = {}
        self.passes: list[list[Any]] = []  # [loader, pass, batches, whether the pass has ended]
        self.yields = 0
        self.keys: list[list[Any]] = []  # [loader, the keys of the examples] of each batch since `take_keys`
        self.examples: list[list[Any]] = []  # [loader, pass, keys] of each recorded batch
        self.bytes = 0
        self.problem = ""  # why examples could not be recorded
        self.recording = True
        self._updated = False  # whether the script has made an update
        self._without_loaders: dict[int, Iterator[list[Recorded]]] = {}  # INPUTS and TARGETS to replay
        if replay is not None and replay.has_inputs:
            self._without_loaders = {number: replay.batches(number, 0) for number in (INPUTS, TARGETS)}
        self._of_function = replay.batches(FUNCTION, 0) if replay is not None else iter(())
        patches.wrap(DataLoader, "__iter__", self._wrap_iter)
        for name in _LOSSES:
            patches.wrap(torch.nn.functional, name, self._wrap_loss)

    def _wrap_iter(self, original: Any) -> Any:
        def __iter__(loader: Any) -> Any:
            if not self._active() or not self.recording or not torch.is_grad_enabled():
                return original(loader)
            if loader not in self._numbers:
                self._numbers[loader] = next(self._next_number)  # loaders that are gone keep their numbers
            number = self._numbers[loader]
            self._passes[number] = self._passes.get(number, -1) + 1
            place = [number, self._passes[number], 0, False]
            is_list = loader.batch_sampler is not None
            if self._replay is not None:
                return self._replayed(place, loader.collate_fn, is_list)
            if not self._updated and self._may_record_inputs():
                # forwards before training, such as one that shows the shapes of a layer
                self.passes, self.yields, self.keys = [], 0, []
            self.passes.append(place)
            collate = loader.collate_fn
            try:
                if not isinstance(collate, RecordingCollate) and persistent_iterator(loader) is None:
                    loader.collate_fn = RecordingCollate(collate, is_list)
                return _Recording(original(loader), self, place)
            finally:
                loader.collate_fn = collate

        return __iter__

    def record(self, carried: Any, place: list[Any]) -> Any:
        """Record a batch that the script is about to get. Returns what the script gets."""
        if not isinstance(carried, Carried):
            self.problem = self.problem or "a loader's batches come from a worker that was started earlier"
            return carried
        if carried.payload is None:
            self.problem = self.problem or f"an example cannot be stored ({carried.reason})"
            place[2] += 1
        else:
            self._store(place, carried.payload)
        self.examples.append([place[0], place[1], carried.keys])
        self._got(place[0], carried.keys, [len(carried.keys)])
        return carried.batch

    def _store(self, place: list[Any], payload: bytes) -> None:
        """Write the examples of a batch. place: the loader, the pass and the number of the batch."""
        if self.bytes + len(payload) > MOST_BYTES:
            self.problem = self.problem or f"the examples of the steps need more than {MOST_BYTES >> 20} MiB"
        else:
            self.bytes += len(payload)
            with open(examples_path(self._folder, place[0], place[1], place[2], self._rank), "wb") as file:
                file.write(payload)
        place[2] += 1

    def _got(self, number: int, keys: list[int], sizes: Sequence[int]) -> None:
        batch = self.yields // (self._replay.repeats if self._replay is not None else 1)
        self.yields += 1
        self.keys.append([number, keys])
        self._draws.begin_batch(batch, own_keys(keys, sizes), sizes)

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Record or replace the inputs of a model's forward, if the script has no DataLoader.

        Inputs with a gradient come from another model, as in a GAN.
        """
        if any(tensor.requires_grad for tensor in tensors_in(args)):
            return args
        if self._replay is not None:
            if not self._without_loaders:
                return args
            parts = next(self._without_loaders[INPUTS])
            args = joined([part.examples for part in parts])
            self.before_fetch()
            self._got(INPUTS, [key for part in parts for key in part.keys], [len(part.keys) for part in parts])
            return args
        if not self.recording or not self._may_record_inputs():
            return args
        if not self.passes:
            self.passes += [[INPUTS, 0, 0, False], [TARGETS, 0, 0, False]]
        keys = _row_keys(args)
        self.before_fetch()
        self._store(self.passes[0], dump(Recorded(args, keys, False)))
        self._got(INPUTS, keys, [len(keys)])
        return args

    def _may_record_inputs(self) -> bool:
        """Whether no loader has been iterated over, and no batch function is known."""
        return all(place[0] in (INPUTS, TARGETS) for place in self.passes)

    @property
    def has_targets(self) -> bool:
        """Whether the batches come from loaders, or the targets of the losses were recorded too."""
        counts = {place[0]: place[2] for place in self.passes}
        return INPUTS not in counts or counts[TARGETS] > 0

    def _wrap_loss(self, original: Any) -> Any:
        def loss(inputs: Any, target: Any, *args: Any, **options: Any) -> Any:
            if self.passes and torch.is_grad_enabled() and isinstance(target, Tensor) and not target.requires_grad:
                if self.recording and self._may_record_inputs() and self._replay is None:
                    self._store(self.passes[1], dump(Recorded((target,), [], False)))
            elif self._without_loaders and torch.is_grad_enabled() and isinstance(target, Tensor):
                found = next(self._without_loaders[TARGETS], None)
                if found is not None:
                    target = joined([part.examples[0] for part in found])
            return original(inputs, target, *args, **options)

        return loss

    @property
    def none_used(self) -> bool:
        """Whether no batch has been recorded."""
        return not self.passes

    def record_function(self, parts: list[Any]) -> None:
        """Record a batch of the script's batch function. parts: its tensors and numbers."""
        if not self.recording:
            return
        if not self.passes:
            self.passes.append([FUNCTION, 0, 0, False])
        keys = _row_keys(parts)
        self.before_fetch()
        self._store(self.passes[0], dump(Recorded(parts, keys, False)))
        self._got(FUNCTION, keys, [len(keys)])

    def function_batch(self) -> list[Any]:
        """The tensors and numbers of the batch function, for the next batch of all ranks."""
        assert self._replay is not None
        parts = next(self._of_function)
        self.before_fetch()
        if self._replay.replicated:
            parts = parts[:1]
        keys = [key for part in parts for key in part.keys]
        self._got(FUNCTION, keys, [len(part.keys) for part in parts])
        found = []
        for values in zip(*(part.examples for part in parts), strict=True):
            if isinstance(values[0], Tensor) and values[0].dim():
                found.append(joined(values))
            else:
                if any(bool(value != values[0]) for value in values[1:]):
                    self.problem = self.problem or "the script's batch function returns numbers that differ by rank"
                found.append(values[0])
        return found

    def before_fetch(self) -> None:
        self._draws.begin_loading()

    def take_keys(self) -> list[list[Any]]:
        """The examples of the batches since the last call."""
        self._updated = True
        found, self.keys = self.keys, []
        return found

    def _replayed(self, place: list[Any], collate: Callable[[Any], Any], is_list: bool) -> Iterator[Any]:
        assert self._replay is not None
        for parts in self._replay.batches(place[0], place[1]):
            self.before_fetch()
            keys = [key for part in parts for key in part.keys]
            sizes = [len(part.keys) for part in parts]
            if is_list:
                batch = collated(collate, [one for part in parts for one in part.examples], keys, sizes)
            else:
                batch = joined([collated(collate, part.examples, part.keys, [1]) for part in parts])
            self._got(place[0], keys, sizes)
            yield batch


class _Recording:
    """The iterator of a loader, with its batches recorded."""

    def __init__(self, inner: Any, loaders: Loaders, place: list[Any]) -> None:
        self._inner, self._loaders, self._place = inner, loaders, place

    def __iter__(self) -> _Recording:
        return self

    def __next__(self) -> Any:
        self._loaders.before_fetch()
        try:
            carried = next(self._inner)
        except StopIteration:
            self._place[3] = True
            raise
        if not self._loaders.recording:
            return carried.batch if isinstance(carried, Carried) else carried
        return self._loaders.record(carried, self._place)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Replay:
    """The batches of the subject run.

    Args:
        folder: of the subject run.
        passes: [loader, pass, batches, whether the pass has ended], of each rank.
        only_rank: yield only the examples of this rank; None: of all ranks.
        separately: the batches of the ranks come one after the other, instead of joined.
        reverse: the examples of each batch come in reverse order.
        common: the ranks divide a model. If their batches are equal, one of them is yielded.
        dispatched: rank 0 has read a batch for each rank.
    """

    def __init__(
        self,
        folder: str,
        passes: Sequence[Sequence[Sequence[Any]]],
        only_rank: int | None = None,
        separately: bool = False,
        reverse: bool = False,
        common: bool = False,
        dispatched: bool = False,
    ) -> None:
        self._folder, self._passes, self._common = folder, passes, common
        self._only, self._separately, self._reverse = only_rank, separately, reverse
        self.repeats = len(passes) if separately else 1  # batches of this process for a batch of each rank
        self._dispatched = dispatched
        readers = passes[:1] if dispatched else passes
        self.has_inputs = any(place[0] == INPUTS for places in readers for place in places)
        self.exhausted = False  # whether the script asked for more than was recorded

    @cached_property
    def replicated(self) -> bool:
        """Whether the script's batch function returns equal values on all ranks."""
        counts = [place[2] for places in self._passes for place in places if place[0] == FUNCTION]
        ranks = range(len(self._passes))
        return len(set(counts)) == 1 and all(
            len({tuple(found.keys) for rank in ranks if (found := self._read(FUNCTION, 0, batch, rank))}) == 1
            for batch in range(counts[0])
        )

    def _read(self, number: int, one_pass: int, batch: int, rank: int) -> Recorded | None:
        path = examples_path(self._folder, number, one_pass, batch, rank)
        if not os.path.exists(path):
            return None
        with open(path, "rb") as file:
            found: Recorded = pickle.load(file)  # from our own run, in a folder that only this user can write
        return found

    def batches(self, number: int, one_pass: int) -> Iterator[list[Recorded]]:
        """The batches of one pass over a loader. Each is the examples of each rank."""
        found = [
            [place for place in passes if place[:2] == [number, one_pass]] for passes in self._passes
        ]  # of each rank
        count, all_ranks = max((places[0][2] for places in found if places), default=0), range(len(self._passes))
        ranks = all_ranks if self._only is None else [self._only]
        for batch in range(0, count, len(all_ranks) if self._dispatched else 1):
            places = [(batch + rank, 0) if self._dispatched else (batch, rank) for rank in ranks]
            parts = [part for place in places if (part := self._read(number, one_pass, *place)) is not None]
            if self._common and len({tuple(part.keys) for part in parts}) == 1:
                parts = parts[:1]
            if self._reverse:
                parts = [self._reversed(part) for part in reversed(parts)]
            if parts:
                yield from ([part] for part in parts) if self._separately else [parts]
        if not found[0] or not found[0][0][3]:
            self.exhausted = True
            raise TrialEnded(0)

    @staticmethod
    def _reversed(part: Recorded) -> Recorded:
        return Recorded(part.examples[::-1], part.keys[::-1], True) if part.is_list else part


def examples_path(folder: str, number: int, one_pass: int, batch: int, rank: int) -> str:
    return os.path.join(folder, f"examples-{number}-{one_pass}-{batch}-r{rank}")


def joined(batches: Sequence[Any]) -> Any:
    """Join batches that a data set has made itself: tensors and arrays along their first dimension."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches)) if first.dim() else torch.stack(list(batches))
    if isinstance(first, np.ndarray):
        return np.concatenate(list(batches))
    if isinstance(first, Mapping):
        return {key: joined([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple):
        return tuple(joined(parts) for parts in zip(*batches, strict=True))
    if isinstance(first, list):
        if all(isinstance(one, Tensor) for one in first):
            return [joined(parts) for parts in zip(*batches, strict=True)]
        return [one for batch in batches for one in batch]
    return first


# --- pickling, and the hash of an example


class _Pickler(pickle.Pickler):
    """Stores of a tensor only its own elements: a row of a data set's tensor is a view of the whole."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided:
            value = value.detach()
            if value.dtype not in (torch.bfloat16, torch.complex32) and not value.is_quantized:
                return torch.from_numpy, (own_copy(value).numpy(),)
            if value.untyped_storage().nbytes() > value.nbytes:
                return _same, (value.clone(),)
        return NotImplemented


def _row_keys(args: Any) -> list[int]:
    """The hash of each row of the inputs of a forward."""
    tensors = [one for one in tensors_in(args) if one.dim()]
    rows = len(tensors[0]) if tensors else 1
    return [content_key([one[row] for one in tensors if len(one) == rows]) for row in range(rows)]


def _same(value: Any) -> Any:
    return value


def dump(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def content_key(example: Any) -> int:
    """A hash of an example's content, (uint64)."""
    made = hashlib.sha1(usedforsecurity=False)
    _add(made, example, 0)
    return int.from_bytes(made.digest()[:8], "little")


def _add(made: Any, value: Any, depth: int) -> None:
    made.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        value = own_copy(value)
        made.update(repr(tuple(value.shape)).encode() + value.view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        made.update(repr(value.shape).encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping) and depth < 8:
        for key, one in value.items():
            _add(made, key, depth + 1)
            _add(made, one, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 8:
        for one in value:
            _add(made, one, depth + 1)
    elif hasattr(value, "tobytes"):  # a Pillow image, NumPy's scalars
        made.update(value.tobytes())
    else:
        made.update(repr(value).encode())
