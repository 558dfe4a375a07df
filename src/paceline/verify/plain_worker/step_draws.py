"""Random numbers of a training step that do not depend on how its examples are split over processes.

A script's compute draws random numbers: dropout, the noise of a diffusion model, a mixing coefficient. Each rank draws
for its own examples, so one process that computes all of them would draw other numbers. Here every row of a draw comes
from the stream of its example (data/draws.py), as with noise="example". The key of an example is its content. If a
rank has an example several times in a batch, each has its own stream.

Draws that have no row per example get the same numbers in every process of every run. A permutation of the batch is
drawn for each rank's examples separately. Other draws cannot be matched, and are counted.

Draws that choose the data are not changed: the generators of Python, NumPy and torch have one state while a
loader works, and another while a step is computed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from paceline.data.draws import DrawCall, ExampleDraws, RowKeys
from paceline.data.noise import MicroBatchDraws, Noise
from paceline.data.randomness import mix

_STEP = 0x5EED  # the seed of the generators while a step is computed
_ASIDE = 1 << 31  # the number of the first draw in `aside`


class StepDraws(Noise):
    """The draws of a script's steps.

    Attributes:
        sizes: the number of examples of each rank in the current batch, in order.
        unmatched: draws that depend on the number of processes.
    """

    def __init__(self) -> None:
        self._started = False  # a script that uses Paceline has draws of its own, and never begins a batch here
        super().__init__()
        self.sizes: Sequence[int] = ()
        self.unmatched: list[str] = []
        self._yields = 0
        self._data_state: Any = None  # of the generators, for the loaders

    def _enter_mode(self) -> None:
        if self._started:
            super()._enter_mode()

    def begin_batch(self, number: int, keys: np.ndarray, sizes: Sequence[int]) -> None:
        """A batch is about to be computed. number: of the batch, as each rank counts. keys: (examples,) uint64."""
        self._started = True
        self._enter_mode()
        seed = mix(_STEP, number)
        self._drawn_before, self._drawn = {}, {}  # two ranks draw the same tokens
        self.sizes = sizes
        rows = RowKeys(len(keys), lambda: keys)
        self._latest = self._thread.micro_batch = MicroBatchDraws(rows, seed, is_whole=False)
        self._data_state = _generator_states()
        seed_generators(seed)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Draw without a shift of the numbers of later draws: only some ranks may evaluate before a training step."""
        micro_batch = self._thread.micro_batch
        if micro_batch is None:
            yield
            return
        before, micro_batch.next = micro_batch.next, _ASIDE
        try:
            yield
        finally:
            micro_batch.next = before

    def begin_loading(self) -> None:
        """A loader is about to work: restore the generators that it uses."""
        self._thread.micro_batch = None
        if self._data_state is not None:
            _set_generator_states(self._data_state)
            self._data_state = None

    def drawing(self, micro_batch: MicroBatchDraws, layout: str) -> AbstractContextManager[Any]:
        return _StepDrawing(self, micro_batch, layout)

    def warn(self, kind: str, what: str) -> None:
        """Nothing: the script does not use Paceline."""


def own_keys(keys: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """The keys of the rows' draws: those of the examples. A rank may have an example several times in a batch, as when
    it generates several answers to a prompt: each of them then has its own draws.

    keys: of the examples. sizes: the number of examples of each rank, in order. Returns (examples,) uint64.
    """
    own = np.asarray(keys, np.uint64).copy()
    ends = list(accumulate(sizes)) if sum(sizes) == len(keys) else [len(keys)]
    for first, end in zip([0, *ends], ends, strict=False):
        times: Counter[int] = Counter()
        for row in range(first, end):
            if times[keys[row]]:
                own[row] = mix(keys[row], times[keys[row]])
            times[keys[row]] += 1
    return own


class RowDraws(ExampleDraws):
    """Draws each row from the stream of its example. sizes: the number of examples of each rank, in order."""

    def __init__(self, keys: RowKeys, sizes: Sequence[int], unmatched: list[str], layout: str = "rows") -> None:
        super().__init__(keys, self._draw_other, layout=layout)
        self.sizes, self.unmatched = sizes, unmatched

    def _draw_other(self, call: DrawCall, number: int) -> Any:
        if call.name == "randperm" and call.shape == (sum(self.sizes),):
            return self._permute_by_rank(call, number)
        if call.mixes and call.shape[:1] == (sum(self.sizes),):
            self.unmatched.append(call.name)
        return call.plain(mix(_STEP, number))

    def _permute_by_rank(self, call: DrawCall, number: int) -> Any:
        """Permute the examples of each rank among themselves."""
        found, first = [], 0
        for size in self.sizes:
            draw = torch.Generator().manual_seed(mix(_STEP, number))
            found.append(torch.randperm(size, generator=draw) + first)
            first += size
        dtype = call.values.get("dtype")
        return torch.cat(found).to(device=call.device, dtype=dtype if isinstance(dtype, torch.dtype) else torch.int64)


class _StepDrawing(RowDraws):
    """The draws of one function call in a step."""

    def __init__(self, draws: StepDraws, micro_batch: MicroBatchDraws, layout: str) -> None:
        super().__init__(micro_batch.keys, draws.sizes, draws.unmatched, layout)
        self._draws, self._micro_batch = draws, micro_batch

    def number(self, call: DrawCall) -> int:
        self._micro_batch, number = self._draws.numbered(call.device, self._micro_batch)
        self.keys = self._micro_batch.keys
        return number


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def _generator_states() -> Any:
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), device


def _set_generator_states(state: Any) -> None:
    python, numpy, cpu, device = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if device is not None:
        torch.cuda.set_rng_state(device)


class generators_kept:  # used as a context
    """Restore the generators at the end of the context."""

    def __enter__(self) -> None:
        self._state = _generator_states()

    def __exit__(self, *_: object) -> None:
        _set_generator_states(self._state)
