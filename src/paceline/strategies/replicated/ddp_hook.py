"""torch's communication hook of ddp, where another reducer than the backend's own, or a codec, sums gradients.

torch's reducer calls it for each bucket as soon as its gradients are there:

Phase 1: the residuals, which are what this replica has not sent of earlier gradients, are added to the bucket.
Phase 2: reducer and codec turn the bucket into the sum over all replicas (comm/reducers.py, comm/codecs.py).
Phase 3: when the last bucket is reduced, what was not sent becomes the new residual. Where a sum is not finite all
  residuals stay as they were.

On a CPU this runs in a thread of its own, on an accelerator on a stream of its own, one bucket after the other, while
autograd goes on with the backward. (The last bucket on a CPU is reduced where the backward would wait for it: nothing
is left to go on with, and another thread would have to be woken.)

Residuals belong to parameters, since the layout of buckets may change. A residual has the gradient's size, in float32
where the gradient has 16 bits; while a backward runs there are two of it. Residuals are divided by the loss scale of
fp16, which may change from step to step.

A checkpoint holds, by name, the sum of all replicas' residuals: the difference between the sum of all gradients so far
and what the updates so far have applied of it. Each replica loads an equal part, so that nothing is lost on any number
of processes. A resumed run is not the same to the last bit as one that was never stopped: rounding and top-k choose by
what one replica holds. (PowerSGD is linear, and does not.)
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # re-exported from C++
from torch.futures import Future

from paceline.comm import codec_sums, codecs, collectives
from paceline.comm.codec_sums import NativeSums
from paceline.comm.codecs import Codec, State, Sums
from paceline.comm.reducers import REDUCERS
from paceline.comm.waits import waits
from paceline.errors import SettingError, suggest, warn
from paceline.strategies.base import Strategy
from paceline.torch_private.core import foreach_add_, foreach_div_
from paceline.world import World

DEFAULT, NATIVE = "default", "native"
"""Reducers that are none by themselves: the default, and the backend's own all-reduce in torch's reducer."""

KEY = "codec"
"""Under which a strategy's state holds what codecs kept: {"name", "residual": {name: tensor}, "q": {name: tensor}}."""


def check(reducer: str, codec: str) -> Codec | None:
    """The codec that is meant. Raises SettingError for what is not known."""
    known = (DEFAULT, NATIVE, codec_sums.SHARED_MEMORY, codec_sums.DIRECT, *REDUCERS)
    if reducer not in known:
        raise SettingError(f"strategy ddp: reducer={reducer!r} is not known. {suggest(str(reducer), known)}")
    try:
        chosen = codecs.parse(codec)
    except SettingError as error:
        raise SettingError(f"strategy ddp: {error}") from None
    if isinstance(chosen, codecs.TopK) and reducer not in (DEFAULT, NATIVE, "ring"):
        raise SettingError(
            f"strategy ddp: codec={codec!r} with reducer={reducer!r}: replicas choose different elements, which are "
            "gathered and not added on the way. Use reducer=native or ring."
        )
    return chosen


def make(strategy: Strategy, reducer: str, codec: str, world: World, device: torch.device) -> Reduction | None:
    """None where torch's own all-reduce is what is asked for. Raises SettingError for what is not known."""
    chosen = check(reducer, codec)
    if chosen is None and (reducer == NATIVE or (reducer == DEFAULT and not _on_cpus(world, device))):
        return None  # NCCL chooses by itself
    if chosen is None and reducer == DEFAULT:
        # By where and how many the processes are, so that a run that is done again adds in the same order.
        shared = codec_sums.shared_memory_sums() if world.size <= codec_sums.SHARING else None
        return None if shared is None else Reduction(strategy, shared, None, world, device)
    lossy = chosen is not None and (world.size > 1 or not isinstance(chosen, codecs.Rounding))
    if lossy and world.rank == 0:
        print(
            f"paceline: codec={codec} changes the mathematics: gradients are sent with errors, which later steps "
            "make up for. The model is not that of one device.",
            file=sys.stderr,
        )
    sums = codec_sums.make(NATIVE if reducer == DEFAULT else reducer, world.node, device)
    return Reduction(strategy, sums, chosen, world, device)


def _on_cpus(world: World, device: torch.device) -> bool:
    """Do several processes compute on CPUs?"""
    return world.size > 1 and device.type == "cpu"


def load(reduction: Reduction | None, state: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
    """Loads the residuals of a checkpoint. Where this run has no codec it warns that they are left out."""
    saved = state.get(KEY)
    if reduction is not None and reduction.codec is not None:
        reduction.load(saved or {"residual": {}, "q": {}}, names)
    elif saved is not None and collectives.rank_of() == 0:
        warn(
            f"the checkpoint's run had codec={saved['name']}, and this one has none: the parts of gradients that it "
            "had not sent yet are left out.",
        )


class Reduction:
    """One reducer and one codec, for all buckets of all of a strategy's bucket reducers."""

    def __init__(self, strategy: Strategy, sums: Sums, codec: Codec | None, world: World, device: torch.device) -> None:
        self.codec = codec
        self.names: dict[Tensor, str] = {}
        self.idle = False  # whether buckets are left as they are, without communication
        self._strategy, self._world, self._device = strategy, world, device
        self._sums = sums
        self._add = sums.memory.add if isinstance(sums, codec_sums.SharedMemorySums) else sums.add
        self._states: dict[Tensor, State] = {}
        self._next: list[tuple[State, State]] = []  # of this backward: states before, states after it
        self._finite: list[Tensor] = []  # of this backward: for each bucket, whether its sum is finite
        self._worker = _Worker() if device.type == "cpu" else None
        self._error: BaseException | None = None  # the first of this backward, in the worker
        self._busy = False  # whether the worker was given a bucket of this backward
        self._stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device)

    @property
    def takes_sparse(self) -> bool:
        return self.codec is None and isinstance(self._sums, NativeSums)

    @property
    def shares_memory(self) -> bool:
        return isinstance(self._sums, codec_sums.SharedMemorySums)

    # --- in a backward

    def start(self, bucket: GradBucket) -> Future[Tensor]:
        """The hook: returns at once where it can."""
        flat = bucket.buffer()
        if self._worker is None:
            return self._start_on_device(bucket)
        future: Future[Tensor] = Future()
        if self.idle:
            future.set_result(flat)
        elif not bucket.is_last():
            self._busy = True
            self._worker.put(lambda: self._fulfil(future, bucket))
        else:
            if self._busy:
                self._worker.wait()
            self._busy = False
            error, self._error = self._error, None
            if error is not None:
                raise error
            if self.codec is None and not flat.is_sparse:
                self._add(flat)
            else:
                self._reduce(bucket)
            future.set_result(flat)
        return future

    def _start_on_device(self, bucket: GradBucket) -> Future[Tensor]:
        """On an accelerator: on a stream of its own."""
        module = torch.get_device_module(self._device)
        future: Future[Tensor] = Future(devices=[self._device])
        assert self._stream is not None
        self._stream.wait_stream(module.current_stream(self._device))
        with module.stream(self._stream):  # the future then holds an event of this stream
            if not self.idle:
                self._reduce(bucket)
            future.set_result(bucket.buffer())
        return future

    def _fulfil(self, future: Future[Tensor], bucket: GradBucket) -> None:
        """In the worker. An error is raised at the last bucket, in the thread of the backward: of one in the future DDP
        would say that it cannot cast it to a tensor."""
        if self._error is None:
            try:
                self._reduce(bucket)
            except BaseException as error:
                self._error = error
        future.set_result(bucket.buffer())

    @torch.no_grad()
    def _reduce(self, bucket: GradBucket) -> None:
        flat = bucket.buffer()  # of complex gradients the real view
        if self.codec is None:
            if flat.is_sparse:
                assert isinstance(self._sums, NativeSums)
                self._sums.add_sparse(flat)
            else:
                self._add(flat)
            return
        if bucket.index() == 0:  # perhaps the last backward was broken off
            self._next, self._finite = [], []
        self._encode(flat, bucket.parameters())
        if bucket.is_last():
            self._keep()

    @torch.no_grad()
    def reduce_alone(self) -> None:
        """The same in a world of one, without buckets or threads, when the backward is over."""
        for p in self.names if self.codec is not None else ():
            if p.grad is not None:
                laid = _laid_out(p, _real(p.grad))
                self._encode(_in_memory_order(laid), [p])
                _real(p.grad).copy_(laid)
        if self._next:
            self._keep()

    def _encode(self, flat: Tensor, parameters: Sequence[Tensor]) -> None:
        assert self.codec is not None
        scale = self._strategy.store.loss_scale
        values = flat.float() if flat.element_size() < 4 else flat
        shapes = [_memory_shape(p) for p in parameters]
        states = [self._state(p, shape, values) for p, shape in zip(parameters, shapes, strict=True)]
        pieces = values.split([math.prod(shape) for shape in shapes])
        foreach_add_(pieces, [state["residual"] for state in states], alpha=scale)
        new = self.codec.total(values, shapes, states, self._sums)
        if scale != 1.0:
            foreach_div_([state["residual"] for state in new], scale)
        self._next += zip(states, new, strict=True)
        self._finite.append(values.isfinite().all())
        if values is not flat:
            flat.copy_(values)

    def _keep(self) -> None:
        """The next states; the old ones where a sum is not finite, without a look at it on the host."""
        finite = torch.stack(self._finite).all()
        for old, new in self._next:
            for key, value in new.items():
                torch.where(finite, value, old[key], out=old[key])
        self._next, self._finite = [], []

    def _state(self, parameter: Tensor, shape: Sequence[int], like: Tensor) -> State:
        if parameter not in self._states:
            assert self.codec is not None
            seed = zlib.crc32(self.names[parameter].encode())
            self._states[parameter] = self.codec.init(shape, like, seed)
        return self._states[parameter]

    # --- in a checkpoint

    def state_dict(self, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """What is kept, summed over all replicas, under KEY; nothing without a codec. Collective."""
        if self.codec is None:
            return {}
        residuals, q = {}, {}
        for p, name in names.items():
            if p in self._states:
                state = self._states[p]
                total = collectives.all_reduce(state["residual"].clone())
                residuals[name] = _laid_out(p, torch.empty_like(_real(p), dtype=total.dtype))
                _in_memory_order(residuals[name]).copy_(total)
                if "q" in state:
                    q[name] = state["q"]
        return {KEY: {"name": self.codec.name, "residual": residuals, "q": q}}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
        """Loads an equal part of the residuals on each replica; also those of another codec, which are gradients that
        were not applied yet too."""
        self._states = {}
        for p, name in names.items():
            if name not in saved["residual"]:
                continue
            kind = torch.float64 if _real(p).dtype == torch.float64 else torch.float32
            laid = _laid_out(p, saved["residual"][name].to(_real(p).device, kind))
            state = self._state(p, _memory_shape(p), laid)
            state["residual"].copy_(_in_memory_order(laid)).div_(self._world.size)
            q = saved["q"].get(name)
            if q is not None and "q" in state and q.shape == state["q"].shape:
                state["q"].copy_(q)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._sums.close()


# torch compares the annotation of a hook with the class; here it is text.
Reduction.start.__annotations__.update(bucket=GradBucket, **{"return": Future[Tensor]})


@waits("wait")
class _Worker:
    """A thread that does one task after the other, from the first one on. It does not keep the process from ending:
    where a backward was broken off on this rank, it may wait for others that wait for this rank."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # a model of one bucket needs none

    def put(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, args=(self._tasks,), name="paceline-reduction", daemon=True
            )
            self._thread.start()
        self._tasks.put(task)

    @staticmethod
    def _work(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := tasks.get()) is not None:
            task()
            del task  # or it would hold its bucket until the next one

    def wait(self) -> None:
        """Until all that it was given is done."""
        done = threading.Event()
        self.put(done.set)
        done.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(timeout=1.0)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _laid_out(parameter: Tensor, values: Tensor) -> Tensor:
    """A copy of values in a memory layout as torch's reducer lays the parameter's gradient into a bucket: as the
    parameter itself (channels_last), if it is dense."""
    real = _real(parameter)
    laid = torch.empty_like(real, dtype=values.dtype)
    return (laid if laid.stride() == real.stride() else values.new_empty(real.shape)).copy_(values)


def _memory_shape(parameter: Tensor) -> list[int]:
    """Its sizes in the order in which that lies in memory: for channels_last out, height, width, in."""
    real = _real(parameter)
    strides = torch.empty_like(real, device="meta").stride()
    order = range(real.dim()) if strides != real.stride() else sorted(range(real.dim()), key=lambda i: -strides[i])
    return [real.shape[i] for i in order]


def _in_memory_order(tensor: Tensor) -> Tensor:
    """(numel,): a view of a dense tensor's memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
