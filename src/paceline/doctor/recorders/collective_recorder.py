"""torch.distributed's collectives. Each is recorded before it begins, in `calls-N.jsonl`.

The launcher reads these files while the script runs, and compares them between the ranks. Appending to a file never
waits for another rank. DDP communicates in C++, so its collectives are recorded at the Python call that starts them:
"DDP's gradients" at a backward that reduces, "DDP's buffers" at a forward that broadcasts them. Paceline's exchanges
over Unix sockets and in shared memory are recorded too, because a rank can wait in an exchange while another rank waits
in a collective.
"""

from __future__ import annotations

import inspect
import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from paceline.doctor.recorders.call_context import call_context
from paceline.doctor.recorders.shared_state import number_of
from paceline.launcher.import_hook import after_import
from paceline.observe.digests import SOME, digest, sample
from paceline.observe.event_log import EventLog
from paceline.observe.patching import Watch
from paceline.observe.records import RecordFile
from paceline.torch_private.observed import DDP_BEFORE_FORWARD, DDP_SENDS_BUFFERS, FUNCTIONAL_COLLECTIVES, group_of

SAME_SIZE = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_gather_single",
    "reduce_scatter_single",
    "scatter",
)
# The functions that DTensor calls. FSDP, tensor parallelism and `full_tensor()` use DTensor.
FUNCTIONAL = (
    "all_gather_single", "all_gather_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce",
    "broadcast", "all_to_all_single", "all_reduce_coalesced", "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip
_OF_GRADIENTS = ("all_reduce", "reduce", "broadcast", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor",
                 "all_reduce_coalesced")  # fmt: skip
_ANY_SIZE = (
    "all_gather_object", "all_reduce_coalesced", "all_gather_coalesced", "all_to_all", "all_to_all_single", "barrier",
    "broadcast_object_list", "gather_object", "monitored_barrier", "reduce_scatter", "scatter_object_list",
)  # fmt: skip
_CUTTING_GATHERS = ("all_gather", "all_gather_into_tensor", "gather")  # their results have no autograd graph
_WITH_VALUES = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather")
_HANDLE_METHODS = ("wait", "synchronize", "is_completed", "is_success", "get_future", "get_future_result", "result")
_AUTOGRAD = "torch.distributed.nn.functional"  # collectives with a backward
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_GROUPS = ("new_group", "init_process_group", "destroy_process_group", "new_subgroups", "new_subgroups_by_enumeration")
# gloo's thread needs the GIL to release the last backward's calls (torch 2.13 keeps their context), and the interpreter
# waits for that thread when the group is destroyed. Give the thread time to finish first.
_SETTLE_SECONDS = 0.05
# To recognise a copy of a gradient, perhaps in bfloat16: minimum elements of a gradient in a tensor that contains
# several gradients; number of compared elements; relative tolerance.
_MIN_ELEMENTS, _COMPARED, _ROUNDING = 4, 64, 2e-2
# Limits: elements of a recorded result; digested gradients; recorded results.
_MAX_VALUES, _MAX_DIGESTS, _MAX_RESULTS = 16, 400, 600
_MAX_GATHERED = 8  # gathered tensors with gradients between two backwards
_MAX_IN_FORWARD = 40  # digested tensors that the script sends in a forward


class CollectiveRecorder:
    """The collectives of this process."""

    def __init__(self, log: EventLog, path: str) -> None:
        self.log = log
        self._shared = log.shared
        self._file = RecordFile(path)
        self._numbers = itertools.count()
        self._local = threading.local()
        self._digests = 0
        # address -> (the parameter's number, its gradient); None: must be rebuilt
        self._grads: dict[int, tuple[int, Any]] | None = None
        self._weights: dict[int, tuple[int, torch.Tensor]] = {}  # address -> (the parameter's number, the parameter)
        self._totals: set[int] = set()  # number of elements of each optimizer's weights, and of all weights
        self._shapes: set[Any] = set()  # the shapes of all weights
        self.unwaited: dict[int, tuple[Any, list[Any]]] = {}  # id of a handle -> (the handle, the line that started it)
        self.gathered: list[tuple[Any, int, int, list[Any]]] = []  # since the last backward: see `_keep_gathered`
        self.compared = True  # False: ranks may end early on purpose (Join)
        self._in_backward = False

    # --- calls-N.jsonl

    @contextmanager
    def during(
        self, op: str, group: Any, parameter: int | None = None, beside: str = "", **must_match: Any
    ) -> Iterator[None]:
        """Record the beginning and the end of a collective. A collective inside another collective is not recorded.

        Args:
            op: the collective's name.
            group: the process group; None: the default group.
            parameter: the number of the parameter that owns the gradient or weight.
            beside: the name of a Paceline transport beside torch.distributed; "": none. A transport may run in a
                separate thread, so its calls have no order relative to the group's other calls.
            must_match: the fields that must be equal on all ranks of the group.
        """
        outermost, number = not self._depth(), next(self._numbers)
        if outermost and self.log.active and dist.is_initialized():
            with self.log.overhead():
                group = dist.group.WORLD if group is None else group
                at, way, branches = call_context(self.log.stack)
                way |= {"the parameter": parameter} if parameter else {}
                about = {"b": number, "op": op, "g": group.group_name + beside, "at": at, **must_match}
                loose = {} if self.compared else {"loose": True}
                ranks = dist.get_process_group_ranks(group)
                self._file.write({**about, "ranks": ranks, "way": way, "branches": branches, **loose}, now=True)
                self.log.flush()
        try:
            with self._unrecorded():
                yield
        finally:
            if outermost and self.log.active:
                self._file.write({"e": number}, now=True)

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Do not record collectives in this block: they are part of another call."""
        self._local.depth = self._depth() + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    def _depth(self) -> int:
        return int(vars(self._local).get("depth", 0))

    def around_functional(self, op: str, original: Any) -> Watch:
        """Record a function of _functional_collectives. Its group may be a mesh dimension or a list of ranks."""
        signature = inspect.signature(original)

        def watch(*args: Any, **options: Any) -> Generator[None, Any, None]:
            if self._depth():
                return
            given = signature.bind_partial(*args, **options).arguments
            tensor = given.get("self")
            must_match: dict[str, Any] = {"n": tensor.numel()} if isinstance(tensor, torch.Tensor) else {}
            with self.during(op, group_of(given["group"], given.get("tag", "")), **must_match):
                yield

        return watch

    # --- around torch's functions

    def around_collective(self, op: str, original: Any) -> Watch:
        """Record a function of torch.distributed."""
        signature = inspect.signature(original)

        def watch(*args: Any, **options: Any) -> Generator[None, Any, None]:
            if self._depth() or not dist.is_initialized():
                return
            try:
                given = signature.bind_partial(*args, **options).arguments
            except TypeError:  # the call itself will raise
                given = {}
            group = given.get("group")
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                return
            tensor, must_match, fields = self._describe(op, given)
            fields |= self._sent(op, tensor, fields)
            if tensor is not None and self._is_exchange() and self.log.few("in_forward", _MAX_IN_FORWARD):
                fields["in_forward"] = digest(tensor, most=SOME)
            try:
                with self.during(op, group, fields.get("number"), **must_match):
                    result = yield
            except RuntimeError as error:
                self.log.record("refused", op=op, text=str(error)[:400])
                return
            if op in ("all_reduce", "reduce") and tensor is not None and not given.get("async_op"):
                fields["result"] = self._values(tensor, fields)
            if given.get("async_op"):
                self._hold_handle(result, fields)
            if fields.get("cuts"):
                self._keep_gathered(tensor, group)
            known = fields.get("of") and "copy" not in fields
            self.log.record("coll", op=op, path=[] if known else self.log.stack.call_stack(), **fields)

        return watch

    def _keep_gathered(self, tensor: torch.Tensor, group: Any) -> None:
        """Keep a tensor with a gradient that was gathered without one: (the tensor, this rank's place in the group, the
        group's size, line). The next backward looks for the result in the loss."""
        if len(self.gathered) < _MAX_GATHERED and self.log.few("gathered", _MAX_DIGESTS):
            place = dist.get_rank(group), dist.get_world_size(group)
            self.gathered.append((tensor.detach(), *place, self.log.stack.caller()))

    def _is_exchange(self) -> bool:
        """Does the script itself call this collective, in a model's forward? Perhaps through torch.distributed.nn."""
        stack = self.log.stack
        return bool(self._shared.models.forward_depth) and (stack.called_by_script() or stack.called_through(_AUTOGRAD))

    def _hold_handle(self, work: Any, fields: dict[str, Any]) -> None:
        """Keep the handle of an asynchronous gradient reduction until the script waits for it, or the next step."""
        if fields.get("of") == "grad" and hasattr(type(work), "wait"):
            self.unwaited[id(work)] = (work, self.log.stack.caller())

    def before_wait(self, work: Any, /, *_: Any, **__: Any) -> None:
        self.unwaited.pop(id(work), None)

    def pop_unwaited(self) -> list[Any] | None:
        """[number of handles since the last step that the script did not wait for, line of the first]; or None."""
        lines = [at for _, at in self.unwaited.values()]
        self.unwaited.clear()
        return [len(lines), lines[0]] if lines else None

    def _describe(self, op: str, given: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """(the tensor, the fields that must be equal on all ranks, the fields of the "coll" event)."""
        tensor = next(
            (given[n] for n in ("tensor", "input_tensor", "input") if isinstance(given.get(n), torch.Tensor)), None
        )
        if op == "all_reduce_coalesced":
            tensor = next((t for t in given.get("tensors") or () if isinstance(t, torch.Tensor)), None)
        must_match: dict[str, Any] = {}
        if op in SAME_SIZE and tensor is not None:
            must_match = _size_of(tensor)
        for name in ("src", "dst", "group_src", "group_dst"):
            if isinstance(given.get(name), int):
                must_match["root"] = given[name]
        reduction = given.get("op")
        if op in ("all_reduce", "reduce"):
            must_match["by"] = str(reduction).rpartition(".")[2] if reduction is not None else "SUM"
        fields: dict[str, Any] = {**must_match}
        if op in _CUTTING_GATHERS and tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            fields["cuts"] = True  # the result has no autograd graph
        if tensor is not None and op in _OF_GRADIENTS:
            fields |= self._identify(tensor)
        return tensor, must_match, fields

    def _identify(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Is the tensor a gradient or a weight, or all gradients or weights of an optimizer in one tensor?

        Returns the fields of the "coll" event about this.
        """
        unknown = self._weight_at(tensor.data_ptr()) is None and tensor.data_ptr() not in (self._grads or ())
        growing = self._in_backward and self._digests < _MAX_DIGESTS  # hooks get the gradients one by one
        if self._grads is None or (unknown and (growing or not self._shared.optimizers)):
            self._index_addresses()
        pointer = tensor.data_ptr()
        of, grad = "", None
        assert self._grads is not None
        number = self._weight_at(pointer)
        if number is not None:
            of = "weight"
        elif pointer and pointer in self._grads:
            of = "grad"
            number, grad = self._grads[pointer]
        elif tensor.numel() > 64 and tensor.numel() in self._totals:  # all gradients or weights
            of = "grad" if self._shared.backward_since_step else "weight"
        elif self._in_backward and tuple(tensor.shape) in self._shapes:
            of = "grad"
        elif not self._shared.backward_since_step and self._copies_weight(tensor):
            return {"of": "weight", "copy": True}
        elif self._shared.backward_since_step and tensor.is_floating_point():
            number, grad = self._match_gradient(tensor)
            of = "grad" if grad is not None else ""
        if of != "grad":
            return {"of": of, "number": number} if of else {}
        clipped = (
            id(grad) in self._shared.clipped_gradients if grad is not None else bool(self._shared.clipped_gradients)
        )
        fields: dict[str, Any] = {"of": of, "number": number, "clipped": clipped}
        if self._digests < _MAX_DIGESTS:
            self._digests += 1
            fields["digest"] = digest(tensor, most=SOME) if bool(tensor.detach().abs().max() > 0) else 0
            fields["given"] = sample(tensor) if number is not None else None
            fields["by"] = self.log.stack.script_stack(4)
        return fields

    def _weight_at(self, address: int) -> int | None:
        """The number of the weight at this address, or None. After `p.data = mean`, as in Accelerate's LocalSGD, any
        other tensor may use the memory that p had."""
        number, weight = self._weights.get(address, (None, None))
        return number if weight is not None and address and weight.data_ptr() == address else None

    def _copies_weight(self, tensor: torch.Tensor) -> bool:
        """Does the tensor equal a weight, as in `mean = p.clone(); all_reduce(mean); p.data = mean / n`?"""
        if tensor.numel() < _MIN_ELEMENTS or tuple(tensor.shape) not in self._shapes:
            return False
        like = [w for _, w in self._weights.values() if w.shape == tensor.shape and w.dtype is tensor.dtype]
        step = max(1, tensor.numel() // _COMPARED)  # a sample distinguishes most weights of one shape
        some = tensor.reshape(-1)[::step]
        near = (w for w in like if w.device == tensor.device and torch.equal(w.reshape(-1)[::step], some))
        return any(torch.equal(w, tensor) for w in near)

    def _match_gradient(self, tensor: torch.Tensor) -> tuple[int | None, Any]:
        """(number, gradient) if the tensor is a copy of a gradient, perhaps divided or in a different precision. (None,
        gradient) if it contains several gradients and begins with a copy of this one. Otherwise (None, None)."""
        flat = tensor.detach().reshape(-1)
        for number, grad in (self._grads or {}).values():
            size = grad.numel()
            whole = size == flat.numel()
            if grad.layout is not torch.strided or size > flat.numel() or grad.device != flat.device:
                continue
            if not whole and (tensor.dim() > 1 or size < _MIN_ELEMENTS):
                continue
            step = max(1, size // _COMPARED)
            ours, theirs = flat[:size:step].double(), grad.detach().reshape(-1)[::step].double()
            most, same = theirs.abs().max(), ours.abs().max()
            if size < _MIN_ELEMENTS:  # too few values for a tolerance: compare bits
                found = bool((ours == theirs).all() or torch.allclose(ours * dist.get_world_size(), theirs, rtol=1e-6))
            else:
                near = float(0.1 * _ROUNDING * most * same)
                found = torch.allclose(ours * most, theirs * same, rtol=_ROUNDING, atol=near)
            if found and most > 0:
                return (number if whole else None), grad
        return None, None

    def _index_addresses(self) -> None:
        """Map the addresses of all weights and gradients. Parameters of all optimizers are numbered from 1."""
        self._grads, self._weights, self._totals, self._shapes = {}, {}, set(), set()
        everything = number = 0
        if not self._shared.optimizers:  # a script may broadcast weights before it makes an optimizer
            weights = [p for p in self._shared.models.made_at if p.device.type != "meta" and p.layout is torch.strided]
            self._weights = {p.data_ptr(): (n, p) for n, p in enumerate(weights, 1)}
        for optimizer in sorted(self._shared.optimizers, key=lambda o: int(number_of(o))):
            total = 0
            for group in optimizer.param_groups:
                for p in group["params"]:
                    number += 1
                    self._shapes.add(tuple(p.shape))
                    if p.device.type != "meta" and type(p).__name__ in ("Parameter", "Tensor"):
                        self._weights[p.data_ptr()] = (number, p)
                        total += p.numel() if p.grad is not None or not self._shared.backward_since_step else 0
                        if p.grad is not None:
                            self._grads[p.grad.data_ptr()] = (number, p.grad)
            self._totals.add(total)
            everything += total
        self._totals.add(everything)

    def invalidate(self, backward: bool = False) -> None:
        """Gradients were created or dropped: map their addresses again before the next use."""
        self._grads, self._in_backward = None, backward

    def _values(self, tensor: torch.Tensor, fields: dict[str, Any]) -> list[float] | None:
        """The elements of a small result that is neither gradient nor weight."""
        if fields.get("of") or tensor.numel() > _MAX_VALUES or tensor.is_complex():
            return None
        few = self.log.few("results", _MAX_RESULTS)
        return [float(v) for v in tensor.detach().reshape(-1).tolist()] if few else None

    def _sent(self, op: str, tensor: Any, fields: dict[str, Any]) -> dict[str, Any]:
        """The input values of a small sum or gather after an evaluation, and the numbers in the script's variables."""
        if tensor is None or op not in _WITH_VALUES or not self._shared.variables.pass_ended:
            return {}
        values = self._values(tensor, fields)
        return {} if values is None else {"sent": values, "vars": self._shared.variables.numbers()}

    def before_point_to_point(self, op: str, /, *_: Any, **__: Any) -> None:
        """Record that the script sends or receives."""
        if not self._depth():
            self.log.record("p2p", op=op)

    def around_group_call(self, op: str, /, *_: Any, **options: Any) -> Generator[None, Any, None]:
        """Record a function that makes or destroys process groups, but not the collectives inside it."""
        outermost = not self._depth()
        if op == "destroy_process_group":
            time.sleep(_SETTLE_SECONDS)
        try:
            if op == "new_group" and not options.get("use_local_synchronization"):
                with self.during(op, None):  # every rank must call it, members of the group or not
                    yield
            else:
                with self._unrecorded():
                    yield
        finally:
            if outermost:
                world = dist.get_world_size() if dist.is_initialized() else 1
                self.log.record("group", op=op, world=world)

    def around_method(
        self, op: str, condition: Callable[[Any], bool], ddp: Any, /, *_: Any, **__: Any
    ) -> Generator[None, Any, None]:
        """Record a method of DDP as a collective. It communicates in C++ if `condition(ddp)`."""
        if condition(ddp):
            with self.during(op, getattr(ddp, "process_group", None)):
                yield

    def around_exchange(self, neighbours: Any, row: torch.Tensor) -> Generator[None, Any, None]:
        """Record `Neighbours.rows` of paceline.comm.neighbours."""
        with self.during("exchange over Unix sockets", neighbours.group.native, **_size_of(row)):
            yield

    def around_sum(self, memory: Any, flat: torch.Tensor) -> Generator[None, Any, None]:
        """Record `SharedMemory.add` of paceline.comm.shared_memory."""
        with self.during("sum in shared memory", memory.group.native, beside=" in memory", **_size_of(flat)):
            yield

    def around_barrier(self, barrier: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
        """Record `SharedBarrier.wait` of paceline.comm.shared_memory, unless it is part of a sum."""
        with self.during("meeting in shared memory", barrier.group.native, beside=" in memory"):
            yield

    def patch_neighbours(self, module: Any) -> None:
        self.log.patches.around(module.Neighbours, "rows", self.around_exchange)

    def patch_shared_memory(self, module: Any) -> None:
        self.log.patches.around(module.SharedMemory, "add", self.around_sum)
        self.log.patches.around(module.SharedBarrier, "wait", self.around_barrier)

    def before_spawn(self, *_: Any, **__: Any) -> None:
        self.log.record("spawn", now=True, joined=dist.is_initialized())

    def before_join(self, join: Any) -> None:
        self.compared = False
        self.log.record("join")


def install(log: EventLog) -> None:
    if not dist.is_available():
        return
    shared, patches = log.shared, log.patches
    path = os.path.join(shared.directory, f"calls-{shared.rank}.jsonl")
    recorder = shared.collectives = CollectiveRecorder(log, path)
    for name in filter(vars(c10d).get, (*SAME_SIZE, *_ANY_SIZE)):
        patches.around(c10d, name, recorder.around_collective(name, getattr(c10d, name)))
    for name in filter(vars(c10d).get, _GROUPS):
        patches.around(c10d, name, partial(recorder.around_group_call, name))
    for name in filter(vars(c10d).get, _POINT_TO_POINT):
        patches.before(c10d, name, partial(recorder.before_point_to_point, name))
    for name in filter(vars(c10d).get, (*SAME_SIZE, *_ANY_SIZE, *_GROUPS, *_POINT_TO_POINT)):
        patches.replace(dist, name, getattr(c10d, name))
    for name in filter(vars(FUNCTIONAL_COLLECTIVES).get, FUNCTIONAL):
        watch = recorder.around_functional(name, getattr(FUNCTIONAL_COLLECTIVES, name))
        patches.around(FUNCTIONAL_COLLECTIVES, name, watch)
    for name in _HANDLE_METHODS:  # a C++ class of torch
        if hasattr(dist.Work, name):
            patches.before(dist.Work, name, recorder.before_wait)
    for name, op, condition in (
        ("__init__", "DDP's construction", lambda _: True),
        (DDP_SENDS_BUFFERS, "DDP's buffers", lambda module: len(getattr(module, "modules_buffers", ())) > 0),
        (DDP_BEFORE_FORWARD, "DDP's buckets", lambda module: shared.models.rebuilds_buckets(module)),
    ):
        if hasattr(DistributedDataParallel, name):
            patches.around(DistributedDataParallel, name, partial(recorder.around_method, op, condition))
    after_import("paceline.comm.neighbours", recorder.patch_neighbours)
    after_import("paceline.comm.shared_memory", recorder.patch_shared_memory)
    import torch.multiprocessing as multiprocessing
    from torch.distributed.algorithms.join import Join

    patches.before(Join, "__enter__", recorder.before_join)
    for name in ("spawn", "start_processes"):
        patches.before(multiprocessing, name, recorder.before_spawn)


def _size_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The size fields that must match between ranks: number of elements and dtype."""
    return {"n": tensor.numel(), "d": str(tensor.dtype).removeprefix("torch.")}
