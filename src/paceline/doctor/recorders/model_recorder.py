"""DistributedDataParallel, forward passes, batch norm, training mode, and the names of parameters."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
import zlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from paceline.doctor.recorders.shared_state import number_of, set_number
from paceline.observe.digests import SOME, digest, tensors_in
from paceline.observe.event_log import EventLog
from paceline.torch_private.core import (
    BatchNormBase,
    DropoutBase,
    NormBase,
    accumulated_hooks,
    backward_hooks,
    children_of,
    parameters_of,
)
from paceline.torch_private.observed import DDP_AFTER_FORWARD

_MAX_DIGESTED = 40  # forward passes with digested inputs
_MAX_PAST = 8  # recorded events of a kind: forwards that bypass DDP, parameters replaced or initialized after DDP
_MAX_NAMED = 4  # names of modules in a "mode" event
_MAX_SCANS = 2  # searches through all objects of the process
_MAX_NORM_EVENTS = 3  # per batch norm: DDP may wrap a module after its first forward


class ModelRecorder:
    """The models of this process. DDP modules are numbered in the order of their construction."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.ddp_count = 0
        self.synced_forwards: set[int] = set()  # DDP modules with a forward that will be reduced in its backward
        self.unsynced_forwards: set[int] = set()  # DDP modules with a forward under no_sync
        self.has_reduced: set[int] = set()  # DDP modules that have reduced: their next forward rebuilds their buckets
        self._rebuilt: set[int] = set()  # DDP modules that have rebuilt their buckets
        self.ddp_of: Any = WeakIdKeyDictionary()  # parameter -> the number of the DDP module that reduces it
        self._ddp_holding: Any = WeakIdKeyDictionary()  # module or buffer -> the number of the DDP module around it
        self._in_batch_norm = False
        self.forward_depth = 0  # number of nested recorded forwards under way
        self.before_forward: Callable[[], None] | None = None  # called once, before the next forward
        self._ddp_wrapping: Any = WeakIdKeyDictionary()  # module -> the number of the DDP module that wraps it
        self._unwrapped: Any = WeakIdKeyDictionary()  # root modules that an optimizer trains
        self._statistics: Any = weakref.WeakSet()  # see `statistics`
        self._patched_classes: set[type] = set()  # classes with a patched forward: of wrapped and of root modules
        self.sync_off = False  # has the script turned off FSDP's reduction?
        self._no_sync_lines: set[tuple[Any, ...]] = set()  # lines with a call of no_sync
        # parameter -> (the line that makes it, number of DDP modules at that time)
        self.made_at: Any = WeakIdKeyDictionary()
        # parameter -> the script's lines on the stack when it was made, if there was already a DDP module
        self.made_by: Any = WeakIdKeyDictionary()
        # parameter -> the line that unfroze it, if there was already a DDP module
        self.unfrozen_at: Any = WeakIdKeyDictionary()
        self.sharded: Any = WeakIdKeyDictionary()  # parameters with a shard in this process
        self.ddp_modules: Any = weakref.WeakSet()
        self.rows: int | None = None  # rows of the first input of the last forward in training mode
        self._hooked_here: Any = WeakIdKeyDictionary()  # parameters with a hook of this recorder
        # batch norm -> (events while its weight was frozen, while it was trained)
        self._norm_counts: Any = WeakIdKeyDictionary()
        self._eval_parts: Any = WeakIdKeyDictionary()  # module -> last recorded names of its parts in evaluation mode
        # module -> (name, part) for each part with a forward that depends on the training mode
        self._mode_parts: Any = WeakIdKeyDictionary()
        self._train_depth = 0  # number of nested calls of nn.Module.train under way
        self._train_line: list[Any] = []  # the line of the last outermost call
        # DDP module with find_unused_parameters -> positions of the parameters that the backward reached
        self._reached: dict[int, set[int]] = {}

    def after_init(self, module: Any, /, *_: Any, **__: Any) -> None:
        """Call it after the construction of a DDP module."""
        number = set_number(module, self.ddp_count)
        self.ddp_count += 1
        self.ddp_modules.add(module)
        parameters = [(name, p) for name, p in module.module.named_parameters() if p.requires_grad]
        self.ddp_of.update({p: number for _, p in parameters})
        self._ddp_holding.update(dict.fromkeys((*module.module.modules(), *module.module.buffers()), number))
        self._ddp_wrapping[module.module] = number
        self._patch_forward(module.module)
        self.log.record(
            "ddp",
            ddp=number,
            find_unused=bool(module.find_unused_parameters),
            broadcasts=bool(module.broadcast_buffers),
            parameters=len(parameters),
            ranks=torch.distributed.get_process_group_ranks(module.process_group),
        )
        if module.find_unused_parameters:
            reached = self._reached[number] = set()
            for place, (_, p) in enumerate(parameters):
                p.register_post_accumulate_grad_hook(lambda _, place=place: reached.add(place))
                self._hooked_here[p] = True

    def add_trained(self, parameters: list[Any]) -> None:
        """Call it after the construction of an optimizer. Patches its root modules, because DDP may never wrap them."""
        mine = {id(p) for p in parameters}
        for root in root_modules():
            if any(id(p) in mine for p in root.parameters()):
                self._unwrapped[root] = True
                self._patch_forward(root)

    def roots(self) -> list[nn.Module]:
        """The trained models, without DDP's wrappers."""
        return [*self._ddp_wrapping, *self._unwrapped]

    def not_broadcast(self) -> list[nn.Module]:
        """Trained models with buffers that DDP does not broadcast."""
        sent = {id(ddp.module) for ddp in self.ddp_modules if ddp.broadcast_buffers}
        by_id = {id(ddp.module): ddp.module for ddp in self.ddp_modules} | {id(root): root for root in self._unwrapped}
        return [root for key, root in by_id.items() if key not in sent]

    def statistics(self) -> list[nn.Module]:
        """Modules of the script's own classes with buffers and without parameters, outside every other module, such as
        running moments of observations. Looks for new ones in the first calls only."""
        if self.log.few("statistics", _MAX_SCANS):
            for root in root_modules():
                own = self.log.stack.owns(getattr(sys.modules.get(type(root).__module__), "__file__", None) or "")
                if own and next(root.parameters(), None) is None and next(root.buffers(), None) is not None:
                    self._statistics.add(root)
        return sorted(self._statistics, key=lambda root: type(root).__name__)

    def _patch_forward(self, module: nn.Module) -> None:
        cls = type(module)
        if cls not in self._patched_classes and not isinstance(module, torch.jit.ScriptModule):
            self._patched_classes.add(cls)
            self.log.patches.around(cls, "forward", self.around_inner_forward)

    def around_forward(self, module: Any, /, *args: Any, **options: Any) -> Generator[None, Any, None]:
        number = number_of(module)
        if number is None:
            return
        self._run_before_forward()
        if torch.is_grad_enabled():
            (self.synced_forwards if module.require_backward_grad_sync else self.unsynced_forwards).add(number)
            self.record_mode(module.module, number)
            if module.module.training:  # Lightning changes the mode of the inner module only
                self.record_inputs(number, (args, options))
        yield from self._inside_forward()

    def _inside_forward(self) -> Generator[None, Any, None]:
        self.forward_depth += 1
        try:
            yield
        finally:
            self.forward_depth -= 1

    def _run_before_forward(self) -> None:
        if self.before_forward is not None:
            due, self.before_forward = self.before_forward, None
            due()

    def around_inner_forward(self, module: Any, /, *args: Any, **options: Any) -> Generator[None, Any, None]:
        """Record the forward of a class that DDP may wrap, if the call bypasses DDP or the model has no DDP."""
        if self.forward_depth:
            return
        self._run_before_forward()
        number = self._ddp_wrapping.get(module)
        if number is not None and torch.is_grad_enabled() and self.log.few("past", _MAX_PAST):
            at = self.log.stack.caller(lambda frame: frame.f_locals.get("self") is module)
            self.log.record("past", at=at, ddp=number)
        elif module in self._unwrapped and torch.is_grad_enabled():
            self.record_mode(module, None)
            if module.training:
                self.record_inputs(None, (args, options))
        yield from self._inside_forward()

    def before_gradient_sync(self, module: Any, /, requires_gradient_sync: bool = True, **_: Any) -> None:
        """Call it before FSDPModule.set_requires_gradient_sync."""
        self.sync_off = not requires_gradient_sync
        if self.sync_off:
            self.before_no_sync()

    def before_own_reduction(self, *_: Any, **__: Any) -> None:
        """Record that the script decides how DDP or FSDP combines gradients."""
        if self.log.few("own_reduction", 1):
            self.log.record("own_reduction")

    def before_comm_hook(self, module: Any, /, state: Any = None, hook: Any = None, **_: Any) -> None:
        """Record the script's own communication hook of DDP. Torch's hooks average, as DDP does."""
        if not str(getattr(hook, "__module__", "")).startswith("torch."):
            self.before_own_reduction()

    def before_no_sync(self, *_: Any, **__: Any) -> None:
        """Record each line that calls no_sync, once."""
        at = self.log.stack.caller()
        if at and tuple(at) not in self._no_sync_lines:
            self._no_sync_lines.add(tuple(at))
            self.log.record("no_sync", at=at)

    def before_register_parameter(self, module: Any, name: str, param: Any) -> None:
        """Remember the line that makes a parameter. Assigning it to an attribute of a module also calls this."""
        old = parameters_of(module).get(name)
        if param is not None:
            at = self.log.stack.caller(lambda frame: frame.f_code.co_name == "__init__")
            self.made_at.setdefault(param, (at, self.ddp_count))
            if self.ddp_count:
                self.made_by.setdefault(param, self.log.stack.script_stack())
            replaces = old is not None and old is not param and old in self.ddp_of
            if replaces and self.log.few("replaced", _MAX_PAST):
                self.log.record("replaced", at=at)

    def before_requires_grad(self, thing: Any, requires_grad: bool = True) -> None:
        """Remember the line that calls requires_grad_ of a module or tensor, if there is already a DDP module."""
        if self.ddp_count and requires_grad:
            for p in thing.parameters() if isinstance(thing, nn.Module) else (thing,):
                if not p.requires_grad:
                    self.unfrozen_at[p] = self.log.stack.caller()

    def after_load_state_dict(self, *_: Any, **__: Any) -> None:
        self.log.record("loaded")

    def before_initializer(self, tensor: Any, *_: Any, **__: Any) -> None:
        """Record calls of torch.nn.init for parameters that DDP already reduces."""
        if self.ddp_count and tensor in self.ddp_of and self.log.few("initialized", _MAX_PAST):
            self.log.record("initialized")

    def record_inputs(self, number: int | None, inputs: Any) -> None:
        self.log.shared.draws.before_forward()
        first = next(tensors_in(inputs), None)
        self.rows = first.shape[0] if first is not None and first.dim() else None
        if self.log.few("forward", _MAX_DIGESTED):
            tensors = [leaf for leaf in tensors_in(inputs) if leaf.numel() > 0 and leaf.device.type != "meta"][:4]
            self.log.record("forward", ddp=number, digest=[digest(leaf, most=SOME) for leaf in tensors])

    def around_train(self, *_: Any, **__: Any) -> Generator[None, Any, None]:
        if not self._train_depth:
            self._train_line = self.log.stack.caller()
        self._train_depth += 1
        try:
            yield
        finally:
            self._train_depth -= 1

    def record_mode(self, module: nn.Module, number: int | None) -> None:
        """Before a forward with gradients, record which mode-dependent parts are in evaluation mode."""
        parts = self._mode_parts.get(module)
        if parts is None:
            parts = [(name, weakref.ref(part)) for name, part in module.named_modules() if _depends_on_mode(part)]
            self._mode_parts[module] = parts
        alive = [(name, part()) for name, part in parts]
        still = [name for name, part in alive if part is not None and not part.training]
        if self._eval_parts.get(module, None) != still:
            self._eval_parts[module] = still
            about: dict[str, Any] = {
                "module": type(module).__name__,
                "ddp": number,
                "count": len(still),
                "of": len(parts),
            }
            digest_of_names = zlib.crc32(str(still).encode())
            self.log.record("mode", at=self._train_line, still=still[:_MAX_NAMED], digest=digest_of_names, **about)

    def around_post_forward(self, module: Any, /, _: Any) -> Generator[None, Any, None]:
        if module.find_unused_parameters:
            began = self.log.clock()
            yield
            if torch.is_grad_enabled() and module.require_backward_grad_sync:
                self.log.record("search", at=[], ddp=number_of(module), seconds=self.log.clock() - began)

    def rebuilds_buckets(self, module: Any) -> bool:
        """Does the forward that starts now rebuild DDP's buckets? DDP does this in the first forward after a reduction,
        in C++."""
        number = number_of(module)
        static = bool(getattr(module, "static_graph", False))
        if not torch.is_grad_enabled() or (module.find_unused_parameters and not static):
            return False
        if number not in self.has_reduced or number in self._rebuilt:
            return False
        self._rebuilt.add(number)
        return True

    def has_script_hook(self, parameter: Any) -> bool:
        """Has the script registered a hook on this parameter, which may divide its gradient?"""
        return bool(
            backward_hooks(parameter) or len(accumulated_hooks(parameter) or ()) > (parameter in self._hooked_here)
        )

    def pop_reached(self, number: int) -> int | None:
        """The number of a DDP module's parameters that the last backward reached on this rank; None if unknown."""
        seen = self._reached.get(number)
        count = None if seen is None else len(seen)
        (seen or set()).clear()
        return count

    def around_batch_norm(self, module: Any, /, *args: Any, **options: Any) -> Generator[None, Any, None]:
        x = args[0] if args else options.get("input")
        if module.training and isinstance(x, torch.Tensor) and self._wants_norm(module, module.weight):
            names = [f"{owner}.{name}" for owner, name in _names_of(module)]
            name = min(names, key=len, default="")
            self._record_norm(module, x, module.weight, self._ddp_holding.get(module), name)
        self._in_batch_norm = True
        try:
            yield
        finally:
            self._in_batch_norm = False

    def before_functional_batch_norm(self, *args: Any, **options: Any) -> None:
        """Record torch.nn.functional.batch_norm, unless torch's batch norm modules call it."""
        given = {**dict(zip(("input", "running_mean", "running_var", "weight", "bias", "training"), args)), **options}
        weight, buffer = given.get("weight"), given.get("running_mean")
        key = weight if weight is not None else buffer
        if self._in_batch_norm or not given.get("training") or key is None or not self._wants_norm(key, weight):
            return
        number = None if weight is None else self.ddp_of.get(weight)
        number = self._ddp_holding.get(buffer) if number is None and buffer is not None else number
        self._record_norm(key, given["input"], weight, number, f"batch_norm of {tuple(key.shape)}")

    def _wants_norm(self, key: Any, weight: Any) -> bool:
        times = self._norm_counts.get(key, (0, 0))[_is_trained(weight)]
        return bool(times < _MAX_NORM_EVENTS and torch.is_grad_enabled())

    def _record_norm(self, key: Any, x: torch.Tensor, weight: Any, number: int | None, name: str) -> None:
        """Record a batch norm in training mode before it computes. key: its module, weight or buffer."""
        frozen, trained = self._norm_counts.get(key, (0, 0))
        self._norm_counts[key] = (frozen, trained + 1) if _is_trained(weight) else (frozen + 1, trained)
        kind = type(key).__name__ if isinstance(key, nn.Module) else "batch norm"
        self.log.record("norm", name=name, size=x.shape[0], trained=_is_trained(weight), ddp=number, kind=kind)


def _depends_on_mode(module: nn.Module) -> bool:
    """Does the forward of a module depend on its training mode?"""
    if isinstance(module, (DropoutBase, nn.RNNBase)):
        return bool(getattr(module, "p", 0) or getattr(module, "dropout", 0))
    if isinstance(module, nn.Module) and type(module).__module__.startswith("torch.nn."):
        return isinstance(module, (NormBase, nn.RReLU)) or bool(getattr(module, "dropout", 0.0))
    methods = [vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls) and cls is not nn.Module]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]  # of unpatched functions
    return any("training" in getattr(code, "co_names", ()) for code in codes)


def _is_trained(weight: Any) -> bool:
    return weight is None or bool(weight.requires_grad)


def _names_of(module: nn.Module) -> list[tuple[str, str]]:
    """(class of the root, name in it) for each root module that contains this module."""
    return [
        (type(root).__name__, name)
        for root in root_modules()
        for name, part in root.named_modules()
        if part is module
    ]  # fmt: skip


def root_modules() -> list[nn.Module]:
    """The modules of this process that no other module contains. DDP's wrappers do not count as modules."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    wrappers = (DistributedDataParallel,)
    inner = {id(child) for m in modules if not isinstance(m, wrappers) for child in children_of(m).values()}
    return [m for m in modules if id(m) not in inner and not isinstance(m, wrappers)]


def parameter_names() -> Any:
    """parameter -> its name in the largest root module that contains it."""
    found: Any = WeakIdKeyDictionary()
    for root in sorted(root_modules(), key=lambda m: sum(1 for _ in m.parameters())):
        found.update({p: name for name, p in root.named_parameters()})
    return found


def install(log: EventLog) -> None:
    models, patches = ModelRecorder(log), log.patches
    log.shared.models = models
    patches.after(DistributedDataParallel, "__init__", models.after_init)
    patches.around(DistributedDataParallel, "forward", models.around_forward)
    patches.before(DistributedDataParallel, "register_comm_hook", models.before_comm_hook)
    if hasattr(DistributedDataParallel, DDP_AFTER_FORWARD):
        patches.around(DistributedDataParallel, DDP_AFTER_FORWARD, models.around_post_forward)
    patches.before(DistributedDataParallel, "no_sync", models.before_no_sync)
    patches.before(nn.Module, "register_parameter", models.before_register_parameter)
    patches.before(nn.Module, "requires_grad_", models.before_requires_grad)
    patches.before(torch.Tensor, "requires_grad_", models.before_requires_grad)
    patches.after(nn.Module, "load_state_dict", models.after_load_state_dict)
    for name in [n for n in vars(nn.init) if n.endswith("_") and not n.startswith("_") and callable(vars(nn.init)[n])]:
        patches.before(nn.init, name, models.before_initializer)
    patches.around(nn.Module, "train", models.around_train)
    patches.around(BatchNormBase, "forward", models.around_batch_norm)
    patches.before(torch.nn.functional, "batch_norm", models.before_functional_batch_norm)
