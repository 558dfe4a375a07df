"""The loader yields this process's shard of each global batch, the same number of times on every rank.

A loader has a name, an epoch and a step. A checkpoint stores no other position: the order of an epoch is a function
(order.order_of), so the examples of step k are known without reading earlier examples.
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
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.comm import generators
from paceline.comm.mesh import world_group
from paceline.data import randomness
from paceline.data.batch_plan import Fetched, Request
from paceline.data.foreign_names import of_loader
from paceline.data.noise import Noise
from paceline.data.order import VERSION
from paceline.data.sources import ADDED_LATER, Source
from paceline.data.zero_rows import ZERO_ROWS
from paceline.errors import SettingError, UsageError


class LoopExit(NamedTuple):
    """The place where a loop over a loader was left early."""

    request: Request  # the current yield
    code: CodeType  # the function with the loop
    line: int  # the current line


class Loader:
    """This process's view of a data set. Created by `run.loader`, which documents its arguments.

    `len(loader)` is the number of yields per epoch on this process.
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
        """later: {first epoch: source} for later epochs, if the global batch changes between epochs."""
        self.name, self.train, self._device, self.noise = source.name, source.train, device, noise
        self._source, self._on_yield, self._on_end = source, on_yield, on_end
        self._on_body_end = on_body_end  # called when a training loop asks for the next yield; may raise
        self._sources = {0: source, **(later or {})}  # first epoch -> source
        self.streams = source.streams
        source.probing = self.train and world_group().size > 1 and source.plan().in_step
        self.epoch = 0  # the current epoch; between epochs, the next one
        self.current: Request | None = None  # the current yield; None outside a pass
        self.loop_exit: LoopExit | None = None  # exit of the last loop that was left early
        self.ended = 0  # epochs that have ended since the process started
        self._start = 0  # the first step of the next pass
        self._plan = source.plan()  # the plan of the current pass
        self._iteration = 0  # number of iterators made
        self._pass: Callable[[], Generator[Any, None, None] | None] = lambda: None  # weakref to the latest iterator
        self._used = False  # has an optimizer used a global batch of the current pass?
        self.presented: Any = None  # the batch that the current yield of a training pass gave to the script
        self.stepped = False  # has the optimizer used the current global batch?
        self.waited = 0.0  # total seconds that this process has waited for data
        self.key = 0  # key of the current global batch's Python and NumPy streams, the same for all its shards
        self.fetched_at = 0.0  # time.perf_counter() when the current yield's data arrived

    @property
    def probing(self) -> bool:
        """Whether the processes still have to compare their data."""
        return self._source.probing

    @probing.setter
    def probing(self, value: bool) -> None:
        self._source.probing = value

    @property
    def dataset(self) -> Any:
        """The whole data set, as passed to `run.loader`."""
        return self._source.dataset

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(of_loader(name))

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch. Raises TypeError if the length of the data is not known."""
        return self._source.steps()

    @property
    def global_batch(self) -> int | None:
        """Examples per optimizer step, over all processes. None if a batch sampler makes the batches."""
        return self._source.global_batch or self._source.sampled_batch or None

    def same_sizes(self, other: Loader) -> bool:
        """Whether the global batches of both loaders have the same size throughout, or the same sizes in each epoch.
        Also True if the sizes are not known in advance."""
        try:
            mine, others = ([s.batch_sizes() for s in loader._sources.values()] for loader in (self, other))
        except TypeError:
            return True
        sizes = {size for epoch in mine + others for size, number in epoch.items() if number}
        return len(sizes) <= 1 or mine == others

    @property
    def split_alone(self) -> tuple[int, int] | None:
        """(global batch, micro_batch) if a run with one process would split the global batch of any epoch into
        micro-batches; else None. Checks that refuse micro-batches use this, because a refusal must not depend on the
        number of processes."""
        micro_batch = self._source.micro_batch
        if micro_batch is None:
            return None
        sizes = [source.global_batch or 0 for source in self._sources.values()]
        largest = max([*sizes, 0 if self.current is None else self.current.total])
        return (largest, micro_batch) if largest > micro_batch else None

    @property
    def step(self) -> int:
        """The current optimizer step in the epoch, from 0; between epochs, the first step of the next one."""
        return self.current.step if self.current is not None else self._start

    @property
    def indices(self) -> tuple[int, ...]:
        """The data set indices of this process's examples in the current yield."""
        return self.current.indices if self.current is not None else ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The positions of this process's examples in the global batch, from 0."""
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
        """End a pass that the script has left open, as in `batch = next(iter(loader))`. Otherwise the interpreter would
        end it at exit, after the modules that it needs are gone."""
        latest = self._pass()
        if latest is not None and inspect.getgeneratorstate(latest) != inspect.GEN_RUNNING:
            latest.close()

    def _training(self) -> Generator[Any, None, None]:
        """One training pass. It counts as an epoch if it was read to its end or if an optimizer step was made. Reading
        only a first batch does not use up an epoch."""
        self._iteration += 1
        mine, epoch, start, whole = self._iteration, self.epoch, self._start, False
        self._used = False
        try:
            request = None
            for request, batches in self._fetch(epoch, start):
                self._begin_yield(request)
                self.presented = self._plan.present(request, batches, self._device)
                if self.noise is None:
                    yield self.presented
                else:
                    self.noise.begin_yield(self.streams, request, self._plan.part(request))
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
        """Record the line where `break` or an exception left the loop, for excepthook.py."""
        frame: Any = sys._getframe(2)
        self.loop_exit = None if request is None else LoopExit(request, frame.f_code, frame.f_lineno)

    def _evaluating(self) -> Generator[Any, None, None]:
        """One evaluation pass. It is always epoch 0. At its end the generators are restored, so that training continues
        undisturbed."""
        before = generators.get_state(self._device)
        request, whole = None, False
        try:
            with nullcontext() if self.noise is None else self.noise.suspended():
                for request, batches in self._fetch(0, 0):
                    self._begin_yield(request)
                    yield self._plan.present(request, batches, self._device)
            whole = True
        finally:
            ZERO_ROWS.end_yield(self)
            self.current = None
            if not whole:
                self._note_exit(request)
            generators.set_state(before, self._device)
        self._on_end(self, True)

    def _fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        """The source's batches. Measures the time spent waiting for them."""
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
                raise UsageError(_cannot_be_sent(self.name, error)) from error  # raised while a worker was started
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

    def mark_stepped(self, request: Request) -> None:
        """Record that the optimizer has used the global batch of `request`: a checkpoint continues with the next global
        batch. `request` is of the current global batch, unless the script has prefetched."""
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
        progress = self._source.progress(self.epoch) if step else {}
        return {"epoch": self.epoch, "step": step, "order": order, **self._source.identity(), **progress}

    def _begin_at(self, epoch: int, step: int) -> None:
        """Let the next pass start at this epoch and step."""
        self.epoch, self._start = epoch, step
        source = self._sources[max(first for first in self._sources if first <= epoch)]
        source.probing, self._source = self._source.probing, source

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin_at(int(state["epoch"]), int(state["step"]))
        if state["step"]:
            self._begin_in_order(int(state.get("order", 1)))  # checkpoints of version 1 do not have this key
            self._source.resume(self.epoch, state)
        identity = self._source.identity()
        for key, value in identity.items():
            if state["step"] and (key in state or key not in ADDED_LATER) and state.get(key) != value:
                raise UsageError(
                    f"loader {self.name!r}: the checkpoint was written in mid-epoch with {key}={state.get(key)}, but "
                    f"this script has {key}={value}, so the rest of the epoch is undefined. Use the checkpoint's "
                    "value, or resume from a checkpoint at the end of an epoch."
                )

    def _begin_in_order(self, version: int) -> None:
        """Read the rest of the epoch in its original order."""
        if version not in (1, VERSION):
            raise UsageError(
                f"loader {self.name!r}: the checkpoint was written in mid-epoch by a newer Paceline, which orders the "
                f"examples in a different way (order {version}). This Paceline knows orders 1 and {VERSION}. Install "
                "the newer Paceline, or resume from a checkpoint at the end of an epoch."
            )
        self._source.first_order_epoch = self.epoch if version == 1 else None


def current_examples(latest: Loader | None, training: Iterable[Loader]) -> int:
    """Number of examples on this process that a mean computed now averages over.

    These are the examples of the latest loader's current yield. After an evaluation inside a training loop, they are
    the examples of the training loader's current yield. Returns 1 before the first yield. Raises UsageError if no
    loader is being iterated.
    """
    for loader in (latest, *training):
        if loader is not None and loader.current is not None:
            return loader.examples
    if latest is None:
        return 1
    raise UsageError(
        "run.mean of a number averages over the examples of the current batch, but no loader is being iterated. Pass "
        "the sum and the count: run.ratio(total, examples); or pass a tensor with one row per example."
    )


def _cannot_be_sent(loader: str, error: BaseException) -> str:
    return (
        f"loader {loader!r}: num_workers starts processes that are not forked from this one (spawn or forkserver), and "
        f"the data set, collate_fn or worker_init_fn cannot be sent to them: {error}. The usual reason is a lambda, or "
        "a function or class defined inside another. Define it at the top level of a module, or use num_workers=0 or "
        "multiprocessing_context='fork'."
    )
