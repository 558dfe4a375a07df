"""torch.distributed's collectives. Each is written down before it begins, into `calls-N.jsonl`.

The launcher's side reads these files while the script runs, and compares them over the ranks: a file that is appended
to can wait for nobody. DDP's own collectives are made in C++; they are written down where they are due: "DDP's
gradients" at a backward that reduces, "DDP's buffers" at a forward that sends them.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from paceline.doctor.watch.models import _digest
from paceline.doctor.watch.notebook import Notebook, put
from paceline.doctor.watch.replicas import sample
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
# What DTensor, and so FSDP, tensor parallelism and `full_tensor()`, calls.
FUNCTIONAL = (
    "all_gather_single", "all_gather_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce",
    "broadcast", "all_to_all_single", "all_reduce_coalesced", "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip
_OF_GRADIENTS = ("all_reduce", "reduce", "broadcast", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor",
                 "all_reduce_coalesced")  # fmt: skip
_OTHERS = (
    "all_gather_object", "all_reduce_coalesced", "all_gather_coalesced", "all_to_all", "all_to_all_single", "barrier",
    "broadcast_object_list", "gather_object", "monitored_barrier", "reduce_scatter", "scatter_object_list",
)  # fmt: skip
_GATHERS = ("all_gather", "all_gather_into_tensor", "gather")
_ASKS = ("wait", "synchronize", "is_completed", "is_success", "get_future", "get_future_result", "result")
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_QUIET = ("new_group", "init_process_group", "destroy_process_group", "new_subgroups", "new_subgroups_by_enumeration")
# gloo's thread needs the interpreter to let go of the last backward's calls (torch 2.13 keeps its context in them), and
# the interpreter waits for that thread when the group ends: let it come first.
_SETTLE_SECONDS = 0.05
_FEW, _COMPARED, _ROUNDING = 4, 64, 2e-2  # values of a gradient with a copy of it, which may be in bfloat16
_MOST_VALUES, _MOST_DIGESTS, _MOST_RESULTS = 16, 400, 600


class Collectives:
    def __init__(self, book: Notebook, path: str) -> None:
        self.book = book
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
        self._count = 0
        self._local = threading.local()
        self._digests = self._results = 0
        self._grads: dict[int, tuple[int, Any]] | None = None  # address -> (the parameter's number, its gradient)
        self._weights: dict[int, int] = {}
        self._totals: set[int] = set()
        self._shapes: set[Any] = set()
        self.unwaited: dict[int, tuple[Any, list[Any]]] = {}  # id of a handle -> the handle, where it was made
        self.compared = True  # False: ranks may leave early on purpose (Join)
        self._backward = False

    # --- the side file

    def begin(self, op: str, group: Any, parameter: int | None = None, **about: Any) -> Callable[[], None]:
        """Write down that a collective begins; returns what writes that it ended. Inside another one: nothing.

        parameter: the number of that whose gradient or weight is sent. about: what must agree over the ranks.
        """
        depth: int = self._depth()
        self._local.depth = depth + 1
        number = self._count
        if depth == 0 and self.book.watching and dist.is_initialized():
            with self.book.aside():
                self._count += 1
                group = dist.group.WORLD if group is None else group
                at, way, branches = self.book.way()
                way |= {"the parameter": parameter} if parameter else {}
                entry = {"b": number, "op": op, "g": group.group_name, "ranks": dist.get_process_group_ranks(group),
                         "at": at, **about, "way": way, "branches": branches}  # fmt: skip
                if not self.compared:
                    entry["loose"] = True
                self._write(entry)
                self.book.flush()

        def end() -> None:
            self._local.depth = depth
            if depth == 0 and self.book.watching:
                self._write({"e": number})

        return end

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def _depth(self) -> int:
        return int(vars(self._local).get("depth", 0))

    def functional(self, op: str) -> Callable[[Any], Any]:
        """torch.distributed._functional_collectives: the group may be a mesh's dimension or a list of ranks."""

        def make(original: Any) -> Any:
            signature = inspect.signature(original)

            def call(*args: Any, **options: Any) -> Any:
                if torch.compiler.is_compiling() or not self.book.watching or self._depth():
                    return original(*args, **options)
                end: Callable[[], None] = _nothing
                with self.book.aside():
                    given = signature.bind_partial(*args, **options).arguments
                    group = group_of(given["group"], given.get("tag", ""))
                    tensor = given.get("self")
                    about = {"n": tensor.numel()} if isinstance(tensor, torch.Tensor) else {}
                    end = self.begin(op, group, **about)
                try:
                    return original(*args, **options)
                finally:
                    end()

            return call

        return make

    # --- around torch's functions

    def wrap(self, op: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            signature = inspect.signature(original)

            def call(*args: Any, **options: Any) -> Any:
                if torch.compiler.is_compiling() or not self.book.watching or self._depth():
                    return original(*args, **options)
                try:
                    given = signature.bind_partial(*args, **options).arguments
                except TypeError:  # the call is wrong, and says so itself
                    given = {}
                group = given.get("group")
                if group is dist.GroupMember.NON_GROUP_MEMBER or not dist.is_initialized():
                    return original(*args, **options)
                tensor: Any = None
                about: dict[str, Any] = {}
                told: dict[str, Any] = {}
                with self.book.aside():
                    tensor, about, told = self._about(op, given)
                end = self.begin(op, group, told.get("number"), **about)
                try:
                    result = original(*args, **options)
                except RuntimeError as error:
                    self.book.note("refused", op=op, text=str(error)[:400])
                    raise
                finally:
                    end()
                with self.book.aside():
                    if op in ("all_reduce", "reduce") and tensor is not None and not given.get("async_op"):
                        told["result"] = self._values(tensor, told)
                    if given.get("async_op"):
                        self._keep(result, told)
                    self.book.note("coll", op=op, path=[] if told.get("of") else self.book.through(), **told)
                return result

            return call

        return make

    def _keep(self, work: Any, told: dict[str, Any]) -> None:
        """Of an asynchronous reduction of gradients: its handle, until somebody waits for it or the optimizer steps."""
        if told.get("of") == "grad" and hasattr(type(work), "wait"):
            self.unwaited[id(work)] = (work, self.book.at())

    def waiting(self, original: Any) -> Any:
        def method(work: Any, /, *args: Any, **options: Any) -> Any:
            self.unwaited.pop(id(work), None)
            return original(work, *args, **options)

        return method

    def left(self) -> list[Any] | None:
        """[how many handles of reductions nobody has asked for since the last step, the first one's line]."""
        lines = [at for _, at in self.unwaited.values()]
        self.unwaited.clear()
        return [len(lines), lines[0]] if lines else None

    def _about(self, op: str, given: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """(the tensor, what must agree over the ranks, what else is noted)."""
        tensor = next(
            (given[n] for n in ("tensor", "input_tensor", "input") if isinstance(given.get(n), torch.Tensor)), None
        )
        if op == "all_reduce_coalesced":
            tensor = next((t for t in given.get("tensors") or () if isinstance(t, torch.Tensor)), None)
        about: dict[str, Any] = {}
        if op in SAME_SIZE and tensor is not None:
            about = {"n": tensor.numel(), "d": str(tensor.dtype).removeprefix("torch.")}
        for name in ("src", "dst", "group_src", "group_dst"):
            if isinstance(given.get(name), int):
                about["root"] = given[name]
        reduction = given.get("op")
        if op in ("all_reduce", "reduce"):
            about["by"] = str(reduction).rpartition(".")[2] if reduction is not None else "SUM"
        told: dict[str, Any] = {**about}
        if op in _GATHERS and tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            told["cuts"] = True  # the graph
        if tensor is not None and op in _OF_GRADIENTS:
            told |= self._whose(tensor)
        return tensor, about, told

    def _whose(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Is it a gradient, all of them in one piece, or a weight, of some optimizer's?"""
        unknown = tensor.data_ptr() not in self._weights and tensor.data_ptr() not in (self._grads or ())
        growing = self._backward and self._digests < _MOST_DIGESTS  # gradients come one by one, each to its hook
        if self._grads is None or (unknown and (growing or not self.book.optimizers)):
            self._look()
        pointer = tensor.data_ptr()
        of, number, grad = "", None, None
        assert self._grads is not None
        if pointer and pointer in self._weights:
            of, number = "weight", self._weights[pointer]
        elif pointer and pointer in self._grads:
            of = "grad"
            number, grad = self._grads[pointer]
        elif tensor.numel() > 64 and tensor.numel() in self._totals:  # all of them in one piece
            of = "grad" if self.book.fresh else "weight"
        elif self._backward and tuple(tensor.shape) in self._shapes:
            of = "grad"
        elif self.book.fresh and tensor.is_floating_point():
            number, grad = self._copied(tensor)
            of = "grad" if grad is not None else ""
        if of != "grad":
            return {"of": of, "number": number} if of else {}
        clipped = id(grad) in self.book.clipped if grad is not None else bool(self.book.clipped)
        told: dict[str, Any] = {"of": of, "number": number, "clipped": clipped}
        if self._digests < _MOST_DIGESTS:
            self._digests += 1
            told["digest"] = _digest(tensor) if bool(tensor.detach().abs().max() > 0) else 0
            told["given"] = sample(tensor) if number is not None else None
            told["by"] = self.book.path(4)
        return told

    def _copied(self, tensor: torch.Tensor) -> tuple[int | None, Any]:
        """The gradient that a tensor holds a copy of, divided or in another precision, or that several in one piece
        begin with."""
        flat = tensor.detach().reshape(-1)
        for number, grad in (self._grads or {}).values():
            size = grad.numel()
            whole = size == flat.numel()
            if grad.layout is not torch.strided or size > flat.numel() or grad.device != flat.device:
                continue
            if not whole and (tensor.dim() > 1 or size < _FEW):
                continue
            step = max(1, size // _COMPARED)
            ours, theirs = flat[:size:step].double(), grad.detach().reshape(-1)[::step].double()
            most, same = theirs.abs().max(), ours.abs().max()
            if size < _FEW:  # too few to be told from other numbers, but by their bits
                found = bool((ours == theirs).all() or torch.allclose(ours * dist.get_world_size(), theirs, rtol=1e-6))
            else:
                near = float(0.1 * _ROUNDING * most * same)
                found = torch.allclose(ours * most, theirs * same, rtol=_ROUNDING, atol=near)
            if found and most > 0:
                return (number if whole else None), grad
        return None, None

    def _look(self) -> None:
        self._grads, self._weights, self._totals, self._shapes = {}, {}, set(), set()
        everything = number = 0
        if not self.book.optimizers:  # weights that are made alike before there is one
            weights = [p for p in self.book.models.made_at if p.device.type != "meta" and p.layout is torch.strided]
            self._weights = {p.data_ptr(): n for n, p in enumerate(weights, 1)}
        for optimizer in sorted(self.book.optimizers, key=lambda o: int(o.__dict__["_paceline_doctor"])):
            total = 0
            for group in optimizer.param_groups:
                for p in group["params"]:
                    number += 1
                    self._shapes.add(tuple(p.shape))
                    if p.device.type != "meta" and type(p).__name__ in ("Parameter", "Tensor"):
                        self._weights[p.data_ptr()] = number
                        total += p.numel() if p.grad is not None or not self.book.fresh else 0
                        if p.grad is not None:
                            self._grads[p.grad.data_ptr()] = (number, p.grad)
            self._totals.add(total)
            everything += total
        self._totals.add(everything)

    def stale(self, backward: bool = False) -> None:
        """Gradients have been made or dropped since the last look."""
        self._grads, self._backward = None, backward

    def _values(self, tensor: torch.Tensor, told: dict[str, Any]) -> list[float] | None:
        if told.get("of") or tensor.numel() > _MOST_VALUES or tensor.is_complex() or self._results >= _MOST_RESULTS:
            return None
        self._results += 1
        return [float(v) for v in tensor.detach().reshape(-1).tolist()]

    def point(self, op: str) -> Callable[[Any], Any]:
        """Messages from one rank to another: that there are any."""

        def make(original: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                if self.book.watching and not self._depth():
                    self.book.note("p2p", op=op)
                return original(*args, **options)

            return call

        return make

    def quiet(self, op: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                depth = self._depth()
                end = _nothing
                if op == "new_group" and not options.get("use_local_synchronization"):
                    end = self.begin(op, None)  # every rank must come, also those that are not in it
                self._local.depth = depth + 1
                if op == "destroy_process_group":
                    with self.book.aside():
                        time.sleep(_SETTLE_SECONDS)
                try:
                    return original(*args, **options)
                finally:
                    end()
                    self._local.depth = depth
                    if depth == 0:
                        world = dist.get_world_size() if dist.is_initialized() else 1
                        self.book.note("group", op=op, world=world)

            return call

        return make

    def around(self, op: str, condition: Callable[[Any], bool]) -> Callable[[Any], Any]:
        """Around a method of DDP's that communicates in C++."""

        def make(original: Any) -> Any:
            def method(module: Any, /, *args: Any, **options: Any) -> Any:
                if torch.compiler.is_compiling() or not condition(module):
                    return original(module, *args, **options)
                end = self.begin(op, getattr(module, "process_group", None))
                try:
                    return original(module, *args, **options)
                finally:
                    end()

            return method

        return make

    def spawned(self, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.book.note("spawn", now=True, joined=dist.is_initialized())
            return original(*args, **options)

        return call

    def joining(self, original: Any) -> Any:
        def __enter__(join: Any) -> Any:
            self.compared = False
            self.book.note("join")
            return original(join)

        return __enter__


def watch(book: Notebook) -> None:
    if not dist.is_available():
        return
    collectives = book.collectives = Collectives(book, os.path.join(book.directory, f"calls-{book.rank}.jsonl"))
    for make, names in ((collectives.wrap, (*SAME_SIZE, *_OTHERS)), (collectives.quiet, _QUIET),
                        (collectives.point, _POINT_TO_POINT)):  # fmt: skip
        for name in names:
            if hasattr(c10d, name):
                put(c10d, name, make(name))
                setattr(dist, name, getattr(c10d, name))
    for name in FUNCTIONAL:
        if hasattr(FUNCTIONAL_COLLECTIVES, name):
            put(FUNCTIONAL_COLLECTIVES, name, collectives.functional(name))
    for name in _ASKS:  # torch's own class, of C++
        if hasattr(dist.Work, name):
            put(dist.Work, name, collectives.waiting)
    put(DistributedDataParallel, "__init__", collectives.around("DDP's construction", lambda module: True))
    put(DistributedDataParallel, DDP_SENDS_BUFFERS, collectives.around("DDP's buffers", _sends_buffers))
    if hasattr(DistributedDataParallel, DDP_BEFORE_FORWARD):
        ordering = collectives.around("DDP's buckets", lambda module: book.models.orders_buckets(module))
        put(DistributedDataParallel, DDP_BEFORE_FORWARD, ordering)
    import torch.multiprocessing as multiprocessing
    from torch.distributed.algorithms.join import Join

    put(Join, "__enter__", collectives.joining)
    for name in ("spawn", "start_processes"):
        put(multiprocessing, name, collectives.spawned)


def _nothing() -> None:
    return None


def _sends_buffers(module: Any) -> bool:
    return len(getattr(module, "modules_buffers", ())) > 0
