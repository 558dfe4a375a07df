"""The loader: it yields this process's part of each global batch, equally often on every rank.

A loader has a name, an epoch and a step. These are all that a checkpoint holds of it: the order of an epoch is a
function (order.order_of), so the examples of step k are known without reading those before it.
"""

from __future__ import annotations

import inspect
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing import reduction
from operator import attrgetter
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import collectives, generators
from paceline.data import randomness
from paceline.data.batch_plan import Fetched, Piece, Request
from paceline.data.elsewhere import of_loader
from paceline.data.noise import Noise
from paceline.data.order import VERSION
from paceline.data.placement import move
from paceline.data.sources import ADDED_LATER, Source
from paceline.data.zero_rows import ZERO_ROWS
from paceline.errors import SettingError, UsageError

_CANNOT_BE_UNPACKED = (
    "this batch holds several collated batches, since the chosen strategy computes several shards or micro-batches at "
    "once (with `reproducible`, where the model has batch norm over the global batch): it cannot be unpacked in the "
    "loop. Move the loss into a function,\n"
    "    def loss_fn(model, batch): images, labels = batch; return F.cross_entropy(model(images), labels)\n"
    "and call\n"
    "    loss = run.forward_backward(loss_fn, model, batch)\n"
    "in place of the forward and run.backward; or choose a strategy with one replica a process, such as ddp, without "
    "`reproducible`."
)


class Bundle:
    """A yield of several collated batches, where this process computes several shards or micro-batches at once.

    A script cannot look into it. It hands the bundle to `run.forward_backward`.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces

    def _refuse(self, *_: Any) -> Any:
        raise UsageError(_CANNOT_BE_UNPACKED)

    __iter__ = __getitem__ = __len__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise UsageError(_CANNOT_BE_UNPACKED)


_device_of = attrgetter("device")


class LoopExit(NamedTuple):
    """Where a loop over a loader was left before its end."""

    request: Request  # the yield that was being computed
    code: CodeType  # the function with the loop
    line: int  # the line that was being run


class Loader:
    """This process's view of a data set. Made by `run.loader`, which documents its arguments.

    `len(loader)` is the number of yields of an epoch on this process.
    """

    def __init__(
        self,
        source: Source,
        *,
        device: torch.device,
        on_yield: Callable[[Loader], None],
        on_end: Callable[[Loader, bool], None] = lambda loader, whole: None,
        on_body_end: Sequence[Callable[[Loader], None]] = (),
        noise: Noise | None = None,
        later: Mapping[int, Source] | None = None,
    ) -> None:
        """later: the sources from certain epochs on, where the global batch changes."""
        self.name, self.train, self._device, self.noise = source.name, source.train, device, noise
        self._source, self._on_yield, self._on_end = source, on_yield, on_end
        self._on_body_end = on_body_end  # called when a training loop comes back for the next yield; may raise
        self._sources = {0: source, **(later or {})}  # by the epoch from which on each is read
        self.streams = source.streams
        source.probing = self.train and collectives.size_of() > 1 and source.plan().in_step
        self.epoch = 0  # the current epoch; between epochs the next one
        self.current: Request | None = None  # the current yield; None outside a pass
        self.loop_exit: LoopExit | None = None  # of the last pass that was left before its end
        self.ended = 0  # epochs that have ended since the process started
        self._start = 0  # the step at which the next pass begins
        self._plan = source.plan()  # the plan by which the current pass is fetched
        self._iteration = 0  # how many iterators were made
        self._pass: Callable[[], Generator[Any, None, None] | None] = lambda: None  # the latest of them, weakly
        self._used = False  # whether an optimizer has acted on a global batch of the current pass
        self.presented: Any = None  # what the script got at the current yield of a training pass
        self.stepped = False  # whether the optimizer has acted on the current global batch
        self.waited = 0.0  # seconds that this process has waited for data, in total
        self.key = 0  # of the current global batch's Python and NumPy streams, the same for all its shards
        self.fetched_at = 0.0  # when the current yield's data were there, by time.perf_counter

    @property
    def probing(self) -> bool:
        """Whether the processes have yet to compare their data."""
        return self._source.probing

    @probing.setter
    def probing(self, value: bool) -> None:
        self._source.probing = value

    @property
    def dataset(self) -> Any:
        """The whole data set, as `run.loader` was given it."""
        return self._source.dataset

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(of_loader(name))

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch. TypeError where the length of the data is not known."""
        return self._source.steps()

    @property
    def global_batch(self) -> int | None:
        """Examples of one optimizer step over all processes. None where a batch sampler makes the batches."""
        return self._source.global_batch or self._source.sampled_batch or None

    def same_sizes(self, other: Loader) -> bool:
        """Whether all global batches of both loaders have one size, or each epoch's have the same sizes in the same
        order. True too where the sizes are not known beforehand."""
        try:
            mine, its = ([s.batch_sizes() for s in loader._sources.values()] for loader in (self, other))
        except TypeError:
            return True
        sizes = {size for epoch in mine + its for size, number in epoch.items() if number}
        return len(sizes) <= 1 or mine == its

    @property
    def cut_alone(self) -> tuple[int, int] | None:
        """(global batch, micro_batch) if a process alone would cut the global batch of any epoch into micro-batches;
        else None. Whether several processes cut it depends on their number: what is refused must not."""
        micro_batch = self._source.micro_batch
        if micro_batch is None:
            return None
        sizes = [source.global_batch or 0 for source in self._sources.values()]
        largest = max([*sizes, 0 if self.current is None else self.current.total])
        return (largest, micro_batch) if largest > micro_batch else None

    @property
    def step(self) -> int:
        """The current optimizer step in the epoch, from 0; between epochs, the step at which the next epoch starts."""
        return self.current.step if self.current is not None else self._start

    @property
    def indices(self) -> tuple[int, ...]:
        """The data set indices of the examples in the current yield on this process."""
        return self.current.indices if self.current is not None else ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The positions of these examples in the global batch, from 0: which part of it this yield is."""
        parts = self.current.parts if self.current is not None else ()
        return tuple(place for part in parts for place in range(part.start, part.start + len(part.indices)))

    @property
    def examples(self) -> int:
        """Examples in the current yield on this process."""
        return self.current.examples if self.current is not None else 0

    def __len__(self) -> int:
        return self._source.yields()

    def __iter__(self) -> Iterator[Any]:
        made = self._training() if self.train else self._evaluating()
        self._pass = weakref.ref(made)
        return made

    def close(self) -> None:
        """End a pass that the script has left open, as `batch = next(iter(loader))` does. Else it would be ended when
        the interpreter exits, when modules that it needs are gone."""
        latest = self._pass()
        if latest is not None and inspect.getgeneratorstate(latest) != inspect.GEN_RUNNING:
            latest.close()

    def _training(self) -> Generator[Any, None, None]:
        """One pass for training. The epoch counts when it was read to its end, or when a step was made on it: to look
        at a first batch costs no epoch."""
        self._iteration += 1
        mine, epoch, start, whole = self._iteration, self.epoch, self._start, False
        self._used = False
        try:
            request = None
            for request, batches in self._fetch(epoch, start):
                self._begin_yield(request)
                batch = batches[0]
                flat = type(batch) is list and {*map(type, batch)} == {Tensor} and not self._plan.bundled
                there = flat and {*map(_device_of, batch)} == {self._device}  # as what default_collate makes for a CPU
                self.presented = batch if there else self._on_device(request, batches)
                if self.noise is None:
                    yield self.presented
                else:
                    part = None if self._plan.bundled else request.parts[0]
                    self.noise.begin_yield(self.streams, request, part)
                    yield self.presented
                    self.noise.end_yield()
                for hook in self._on_body_end:
                    hook(self)
            whole = True
            if request is None and start == 0 and (self._plan.in_step or not self.steps):
                raise SettingError(self._source.why_empty())
        finally:
            ZERO_ROWS.end_yield(self)
            if self.noise is not None:
                self.noise.end_yield()
            if mine == self._iteration:  # else a newer pass has begun, and this one is closed late
                self.current, self.stepped = None, False
                if whole or self._used:
                    self._begin_at(epoch + 1, 0)
                    self.ended += 1
                if not whole:
                    self._note_exit(request)
                    self._on_end(self, False)
        if mine == self._iteration:
            self._on_end(self, True)

    def _note_exit(self, request: Request | None) -> None:
        """The loop is left by `break` or an exception. excepthook.py asks where, when the loop is gone."""
        frame: Any = sys._getframe(2)
        self.loop_exit = None if request is None else LoopExit(request, frame.f_code, frame.f_lineno)

    def _evaluating(self) -> Generator[Any, None, None]:
        """One pass for evaluation. It is always epoch 0, and puts the generators back at its end, so that training goes
        on undisturbed."""
        before = generators.get_state(self._device)
        request, whole = None, False
        try:
            with nullcontext() if self.noise is None else self.noise.suspended():
                for request, batches in self._fetch(0, 0):
                    self._begin_yield(request)
                    yield self._on_device(request, batches)
            whole = True
        finally:
            ZERO_ROWS.end_yield(self)
            self.current = None
            if not whole:
                self._note_exit(request)
            generators.set_state(before, self._device)
        self._on_end(self, True)

    def _fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        """The source's batches; the time spent waiting for them is measured."""
        self._plan = self._source.plan()
        try:
            began = time.perf_counter()
            for item in self._source.fetch(epoch, start):
                self.fetched_at = time.perf_counter()
                self.waited += self.fetched_at - began
                yield item
                began = time.perf_counter()
            self.fetched_at = time.perf_counter()
            self.waited += self.fetched_at - began
        except Exception as error:
            if any(frame.f_code is reduction.dump.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
                raise UsageError(_cannot_be_sent(self.name, error)) from error  # while a worker was started
            raise

    def _begin_yield(self, request: Request) -> None:
        self.current, self.stepped = request, False
        part = request.parts[0]
        empty = not part.indices if len(request.parts) == 1 else () in [its.indices for its in request.parts]
        if empty or ZERO_ROWS.left:
            ZERO_ROWS.begin_yield(self, empty)
        self.key = randomness.seed_yield(
            self.streams.of_yields, request.epoch, request.step, part.shard, part.micro, self._device
        )
        self._on_yield(self)

    def _on_device(self, request: Request, batches: list[Any]) -> Any:
        """What the script gets: a batch on the device, or a Bundle, whose batches the strategy moves."""
        if not self._plan.bundled:
            return move(batches[0], self._device)
        parts = zip(request.parts, batches, strict=True)
        return Bundle([Piece(part.shard, part.micro, len(part.indices), batch) for part, batch in parts])

    def mark_stepped(self, request: Request) -> None:
        """The optimizer has acted on the global batch of `request`, so a checkpoint goes on with the next one. This is
        the current global batch, unless the script has fetched ahead."""
        current = self.current
        if current is request:
            self._used = self.stepped = True
        elif current is not None and current.epoch == request.epoch:
            self._used = True
            self.stepped = self.stepped or current.step == request.step
        if self._source.probing:
            self._source.check_same_data(request)

    def state_dict(self) -> dict[str, Any]:
        step = self._start if self.current is None else self.current.step + int(self.stepped)
        order = self._source.order_version(self.epoch)
        return {"epoch": self.epoch, "step": step, "order": order, **self._source.identity()}

    def _begin_at(self, epoch: int, step: int) -> None:
        """The next pass is of this epoch, from this step on."""
        self.epoch, self._start = epoch, step
        source = self._sources[max(first for first in self._sources if first <= epoch)]
        source.probing, self._source = self._source.probing, source

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin_at(int(state["epoch"]), int(state["step"]))
        if state["step"]:
            self._begin_in_order(int(state.get("order", 1)))  # checkpoints of version 1 do not name it
        own = self._source.identity()
        for key, value in own.items():
            if state["step"] and (key in state or key not in ADDED_LATER) and state.get(key) != value:
                raise UsageError(
                    f"loader {self.name!r}: the checkpoint was written in mid-epoch with {key}={state.get(key)}, but "
                    f"this script has {key}={value}, so that the rest of the epoch is not defined. Use what the "
                    "checkpoint had, or resume from a checkpoint at the end of an epoch."
                )

    def _begin_in_order(self, version: int) -> None:
        """The rest of the epoch is read in the order in which it was begun."""
        if version not in (1, VERSION):
            raise UsageError(
                f"loader {self.name!r}: the checkpoint was written in mid-epoch by a newer Paceline, with order "
                f"{version} of the examples, and this one knows 1 and {VERSION}. Install it, or resume from a "
                "checkpoint at the end of an epoch."
            )
        self._source.first_order_epoch = self.epoch if version == 1 else None


def current_examples(latest: Loader | None, training: Iterable[Loader]) -> int:
    """How many examples on this process a number that the script computes now is a mean over: those of the latest
    loader's current yield; after an evaluation in a training loop, of the training loader's. 1 before the first yield.
    Raises UsageError where no loader is being iterated."""
    for loader in (latest, *training):
        if loader is not None and loader.current is not None:
            return loader.examples
    if latest is None:
        return 1
    raise UsageError(
        "run.mean of a number is its mean over the examples of the current batch, and no loader is being iterated. "
        "Give the sum and the count: run.ratio(total, examples); or a tensor with a row for each example."
    )


def _cannot_be_sent(loader: str, error: BaseException) -> str:
    return (
        f"loader {loader!r}: num_workers starts processes that are not forked from this one (the spawn or forkserver "
        f"method), and its data set, collate_fn or worker_init_fn cannot be sent to them: {error}. A lambda, or a "
        "function or class that is defined within another, is the usual reason: define it at the top of a module, or "
        "write num_workers=0, or multiprocessing_context='fork'."
    )
