"""The communication hook of ddp, for gradients that are summed with a codec, or by a reducer other than torch's.

torch's reducer calls the hook for each bucket, once the bucket's gradients are ready:

Phase 1: add the residuals (the unsent part of this replica's earlier gradients) to the bucket.
Phase 2: reducer and codec replace the bucket by the sum over all replicas (comm/reducers.py, comm/codecs.py).
Phase 3: after the last bucket, the unsent part becomes the new residual. If a sum is not finite, all residuals keep
  their old values.

Buckets are reduced one after the other while autograd continues the backward: on a CPU in a separate thread, on an
accelerator on a separate stream. (On a CPU the last bucket is reduced in the backward's thread. This thread has nothing
else left to do, and another thread would have to wake up.)

Residuals are stored per parameter, since the bucket layout may change. A residual is as large as the gradient, in
float32 if the gradient has 16 bits. During a backward the old and the new residual exist. Residuals are divided by
fp16's loss scale, which may change from step to step.

A checkpoint holds the sum of all replicas' residuals by parameter name: the sum of all gradients so far minus the part
that updates have applied. Each replica loads an equal share, so nothing is lost on any number of processes. A resumed
run may differ from an uninterrupted run in the last bits, since rounding and top-k depend on the residual of a replica.
(PowerSGD is linear, so it does not differ.)
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

from paceline.comm import codec_sums, codecs
from paceline.comm.codec_sums import NativeSums
from paceline.comm.codecs import Codec, State, Sums
from paceline.comm.mesh import world_group
from paceline.comm.reducers import REDUCERS
from paceline.comm.waits import waits
from paceline.errors import SettingError, suggest, warn
from paceline.strategies.base import Strategy
from paceline.torch_private.core import foreach_add_, foreach_div_
from paceline.world import World

DEFAULT, NATIVE = "default", "native"
"""Values of `reducer` besides the names of reducers: the default choice, and the backend's all-reduce in torch's
reducer."""

KEY = "codec"
"""Key of the codec's state in a strategy's state: {"name", "residual": {name: tensor}, "q": {name: tensor}}."""


def check(reducer: str, codec: str) -> Codec | None:
    """Parse the codec. Raises SettingError for an unknown reducer or codec, or if the two cannot work together."""
    known = (DEFAULT, NATIVE, codec_sums.SHARED_MEMORY, codec_sums.DIRECT, *REDUCERS)
    if reducer not in known:
        raise SettingError(f"strategy ddp: reducer={reducer!r} is not known. {suggest(str(reducer), known)}")
    try:
        chosen = codecs.parse(codec)
    except SettingError as error:
        raise SettingError(f"strategy ddp: {error}") from None
    if isinstance(chosen, codecs.TopK) and reducer not in (DEFAULT, NATIVE, "ring"):
        raise SettingError(
            f"strategy ddp: codec={codec!r} with reducer={reducer!r}: each replica sends different elements, which "
            "are gathered and cannot be added on the way. Use reducer=native or ring."
        )
    return chosen


def make(strategy: Strategy, reducer: str, codec: str, world: World, device: torch.device) -> Reduction | None:
    """Make the reduction; None: torch's all-reduce is used. Raises SettingError for an unknown reducer or codec."""
    chosen = check(reducer, codec)
    if chosen is None and (reducer == NATIVE or (reducer == DEFAULT and not _on_cpus(world, device))):
        return None  # NCCL chooses an algorithm
    if chosen is None and reducer == DEFAULT:
        # The choice depends only on the number and placement of processes, so a repeated run adds in the same order.
        shared = codec_sums.shared_memory_sums() if world.size <= codec_sums.SHARING else None
        return None if shared is None else Reduction(strategy, shared, None, world, device)
    lossy = chosen is not None and (world.size > 1 or not isinstance(chosen, codecs.Rounding))
    if lossy and world.rank == 0:
        print(
            f"paceline: codec={codec} changes the mathematics: gradients are sent with errors, which later steps "
            "correct. The model differs from training on one device.",
            file=sys.stderr,
        )
    sums = codec_sums.make(NATIVE if reducer == DEFAULT else reducer, world.node, device)
    return Reduction(strategy, sums, chosen, world, device)


def _on_cpus(world: World, device: torch.device) -> bool:
    """Whether several processes compute on CPUs."""
    return world.size > 1 and device.type == "cpu"


def load(reduction: Reduction | None, state: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
    """Load a checkpoint's residuals. If this run has no codec, warn that the residuals are dropped."""
    saved = state.get(KEY)
    if reduction is not None and reduction.codec is not None:
        reduction.load(saved or {"residual": {}, "q": {}}, names)
    elif saved is not None and world_group().rank == 0:
        warn(
            f"the checkpoint was written with codec={saved['name']}, but this run has no codec. Its gradient "
            "residuals (the parts not sent yet) are dropped.",
        )


class Reduction:
    """Sums all buckets of a strategy, with one reducer and one codec."""

    def __init__(self, strategy: Strategy, sums: Sums, codec: Codec | None, world: World, device: torch.device) -> None:
        self.codec = codec
        self.names: dict[Tensor, str] = {}
        self.idle = False  # whether buckets are left unchanged, without communication
        self._strategy, self._world, self._device = strategy, world, device
        self._sums = sums
        self._add = sums.memory.add if isinstance(sums, codec_sums.SharedMemorySums) else sums.add
        self._states: dict[Tensor, State] = {}
        self._next: list[tuple[State, State]] = []  # in this backward: (state before, state after)
        self._finite: list[Tensor] = []  # in this backward: for each bucket, whether its sum is finite
        self._worker = _Worker() if device.type == "cpu" else None
        self._error: BaseException | None = None  # the worker's first error in this backward
        self._busy = False  # whether the worker has received a bucket in this backward
        self._stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device)

    @property
    def takes_sparse(self) -> bool:
        return self.codec is None and isinstance(self._sums, NativeSums)

    @property
    def shares_memory(self) -> bool:
        return isinstance(self._sums, codec_sums.SharedMemorySums)

    # --- in a backward

    def start(self, bucket: GradBucket) -> Future[Tensor]:
        """The hook. Begins to reduce a bucket. Waits only at the last bucket, on a CPU."""
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
        """Reduce a bucket of an accelerator on a separate stream."""
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
        """Reduce a bucket, in the worker. An error is raised later, at the last bucket, in the backward's thread. If
        the future held the error, DDP would report only that the value cannot be cast to a tensor."""
        if self._error is None:
            try:
                self._reduce(bucket)
            except BaseException as error:
                self._error = error
        future.set_result(bucket.buffer())

    @torch.no_grad()
    def _reduce(self, bucket: GradBucket) -> None:
        flat = bucket.buffer()  # the real view of complex gradients
        if self.codec is None:
            if flat.is_sparse:
                assert isinstance(self._sums, NativeSums)
                self._sums.add_sparse(flat)
            else:
                self._add(flat)
            return
        if bucket.index() == 0:  # an earlier backward may have been interrupted
            self._next, self._finite = [], []
        self._encode(flat, bucket.parameters())
        if bucket.is_last():
            self._keep()

    @torch.no_grad()
    def reduce_alone(self) -> None:
        """With one process: apply the codec after the backward, without buckets or threads."""
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
        """Store the new states, or keep the old states if a sum is not finite. The host does not wait."""
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
        """The residuals, summed over all replicas, under KEY; empty without a codec. Collective."""
        if self.codec is None:
            return {}
        residuals, q = {}, {}
        for p, name in names.items():
            if p in self._states:
                state = self._states[p]
                total = world_group().all_reduce(state["residual"].clone())
                residuals[name] = _laid_out(p, torch.empty_like(_real(p), dtype=total.dtype))
                _in_memory_order(residuals[name]).copy_(total)
                if "q" in state:
                    q[name] = state["q"]
        return {KEY: {"name": self.codec.name, "residual": residuals, "q": q}}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
        """Load an equal share of the residuals on each replica. Residuals of a different codec are loaded too: they are
        gradients that were not applied yet."""
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


# torch compares the hook's annotations with classes; here they are strings.
Reduction.start.__annotations__.update(bucket=GradBucket, **{"return": Future[Tensor]})


@waits("wait")
class _Worker:
    """A thread that runs tasks in order. The first task starts it. It is a daemon thread: if a backward was interrupted
    on this rank, the thread may wait for ranks that wait for this rank."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # a model with one bucket needs no thread

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
            del task  # otherwise it would hold its bucket until the next task

    def wait(self) -> None:
        """Wait until all tasks are done."""
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
    """Copy values into the memory layout of the parameter's gradient in torch's bucket. For a dense parameter this is
    the parameter's layout, such as channels_last."""
    real = _real(parameter)
    laid = torch.empty_like(real, dtype=values.dtype)
    return (laid if laid.stride() == real.stride() else values.new_empty(real.shape)).copy_(values)


def _memory_shape(parameter: Tensor) -> list[int]:
    """The parameter's sizes in memory order. For channels_last: out, height, width, in."""
    real = _real(parameter)
    strides = torch.empty_like(real, device="meta").stride()
    order = range(real.dim()) if strides != real.stride() else sorted(range(real.dim()), key=lambda i: -strides[i])
    return [real.shape[i] for i in order]


def _in_memory_order(tensor: Tensor) -> Tensor:
    """(numel,): a view of a dense tensor's memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
