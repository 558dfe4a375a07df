"""DistributedDataParallel, batch norm, and the names of parameters."""

from __future__ import annotations

import gc
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from paceline.doctor.watch.data import _leaves
from paceline.doctor.watch.notebook import Notebook, put
from paceline.torch_private.core import (
    BatchNormBase,
    DropoutBase,
    NormBase,
    accumulated_hooks,
    backward_hooks,
    children_of,
)
from paceline.torch_private.observed import DDP_AFTER_FORWARD

DIGESTED = 40  # forward calls whose inputs are digested
USED = 40  # backward passes of which it is noted which parameters this rank's loss reached
_ELEMENTS = 512
_NOTED = 8  # calls past DDP
_NAMED = 4
_LOOKS = 3  # at a batch norm: a DDP module may be made after its first forward


class Models:
    """The DDP modules of this process, by the order of their making."""

    def __init__(self, book: Notebook) -> None:
        self.book = book
        self.made = 0
        self.pending: set[int] = set()  # forward passes whose backward will reduce
        self.local: set[int] = set()  # forward passes under no_sync
        self.reduced: set[int] = set()  # modules that have reduced, and will order their buckets anew
        self._ordered: set[int] = set()  # modules that have
        self.members: Any = WeakIdKeyDictionary()  # parameter -> DDP module
        self._inside: Any = WeakIdKeyDictionary()  # module, or buffer, in a DDP module -> its number
        self._norming = False
        self._within = 0  # calls of DDP's forward that are under way
        self.due: Callable[[], None] | None = None  # to be called once, before the next forward
        self._wrapped: Any = WeakIdKeyDictionary()  # module that DDP wraps -> its number
        self._plain: Any = WeakIdKeyDictionary()  # modules that are part of no other, and that an optimizer trains
        self._classes: set[type] = set()  # of those modules: their forward is watched
        self._noted = 0
        self.unsent_gradients = False  # has FSDP been told to send none?
        self._unsynced: set[tuple[Any, ...]] = set()  # lines
        self.made_at: Any = WeakIdKeyDictionary()  # parameter -> (where it was made, how many DDP modules there were)
        self.thawed_at: Any = WeakIdKeyDictionary()  # parameter -> where it was unfrozen after a DDP module was made
        self.sharded: Any = WeakIdKeyDictionary()  # parameters of which a process holds a part
        self.alive: Any = weakref.WeakSet()
        self._forwards = self._inits = 0
        self._counted: Any = WeakIdKeyDictionary()  # parameters with a hook of ours
        self._norms: Any = WeakIdKeyDictionary()  # module -> how often it was noted, frozen and trained
        self._modes: Any = WeakIdKeyDictionary()  # module -> names of its parts that are in evaluation mode, last noted
        self._by_mode: Any = WeakIdKeyDictionary()  # module -> its parts that compute by their mode, with names
        self._switching = 0  # calls of nn.Module.train that are under way
        self._switched: list[Any] = []  # the line of the last one
        self._reached: dict[int, set[int]] = {}  # of modules with find_unused_parameters: parameters reached

    def init(self, original: Any) -> Any:
        def __init__(module: Any, /, *args: Any, **options: Any) -> None:
            original(module, *args, **options)
            with self.book.aside():
                number = self.made
                self.made += 1
                self.alive.add(module)
                module.__dict__["_paceline_doctor"] = number
                self._describe(module, number)

        return __init__

    def _describe(self, module: Any, number: int) -> None:
        parameters = [(name, p) for name, p in module.module.named_parameters() if p.requires_grad]
        self.members.update({p: number for _, p in parameters})
        self._inside.update(dict.fromkeys((*module.module.modules(), *module.module.buffers()), number))
        self._wrapped[module.module] = number
        self._watch(module.module)
        self.book.note(
            "ddp",
            ddp=number,
            find_unused=bool(module.find_unused_parameters),
            static_graph=bool(getattr(module, "static_graph", False)),
            broadcasts=bool(module.broadcast_buffers),
            parameters=len(parameters),
            ranks=torch.distributed.get_process_group_ranks(module.process_group),
            type=type(module.module).__name__,
        )
        if module.find_unused_parameters:
            reached = self._reached[number] = set()
            for place, (_, p) in enumerate(parameters):
                p.register_post_accumulate_grad_hook(lambda _, place=place: reached.add(place))
                self._counted[p] = True

    def trained(self, parameters: list[Any]) -> None:
        """An optimizer is made: the modules that it trains may never be wrapped."""
        mine = {id(p) for p in parameters}
        for root in roots():
            if any(id(p) in mine for p in root.parameters()):
                self._plain[root] = True
                self._watch(root)

    def unsent(self) -> list[nn.Module]:
        """Trained models whose buffers DDP does not send."""
        sent = {id(ddp.module) for ddp in self.alive if ddp.broadcast_buffers}
        roots_ = {id(ddp.module): ddp.module for ddp in self.alive} | {id(root): root for root in self._plain}
        return [root for key, root in roots_.items() if key not in sent]

    def _watch(self, module: nn.Module) -> None:
        cls = type(module)
        if cls not in self._classes and not isinstance(module, torch.jit.ScriptModule):
            self._classes.add(cls)
            put(cls, "forward", self.inner)

    def forward(self, original: Any) -> Any:
        def forward(module: Any, /, *args: Any, **options: Any) -> Any:
            number = module.__dict__.get("_paceline_doctor")
            if torch.compiler.is_compiling() or number is None or not self.book.watching:
                return original(module, *args, **options)
            self._begin()
            if torch.is_grad_enabled():
                (self.pending if module.require_backward_grad_sync else self.local).add(number)
                self.mode(module.module, number)
                if module.training:
                    self.inputs(number, (args, options))
            self._within += 1
            try:
                return original(module, *args, **options)
            finally:
                self._within -= 1

        return forward

    def _begin(self) -> None:
        if self.due is not None:
            due, self.due = self.due, None
            due()

    def inner(self, original: Any) -> Any:
        """Around the forward of a class whose instances DDP wraps: is one called past DDP?"""

        def forward(module: Any, /, *args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or self._within or not self.book.watching:
                return original(module, *args, **options)
            self._begin()
            number = self._wrapped.get(module)
            if number is not None and torch.is_grad_enabled() and self._noted < _NOTED:
                self._noted += 1
                at = self.book.at(lambda frame: frame.f_locals.get("self") is module)
                self.book.note("past", at=at, ddp=number)
            elif module in self._plain and torch.is_grad_enabled():
                self.mode(module, None)
                if module.training:
                    self.inputs(None, (args, options))
            self._within += 1
            try:
                return original(module, *args, **options)
            finally:
                self._within -= 1

        return forward

    def switched(self, original: Any) -> Any:
        """FSDPModule.set_requires_gradient_sync."""
        noted = self.unsynced(original)

        def set_requires_gradient_sync(module: Any, /, *args: Any, **options: Any) -> Any:
            self.unsent_gradients = not (args[0] if args else options.get("requires_gradient_sync", True))
            return (noted if self.unsent_gradients else original)(module, *args, **options)

        return set_requires_gradient_sync

    def unsynced(self, original: Any) -> Any:
        """`no_sync` and the like: where a script asks for it."""

        def no_sync(*args: Any, **options: Any) -> Any:
            if self.book.watching:
                at = self.book.at()
                if at and tuple(at) not in self._unsynced:
                    self._unsynced.add(tuple(at))
                    self.book.note("no_sync", at=at)
            return original(*args, **options)

        return no_sync

    def registered(self, original: Any) -> Any:
        def register_parameter(module: Any, /, *args: Any, **options: Any) -> None:
            original(module, *args, **options)
            parameter = args[1] if len(args) > 1 else options.get("param")
            if parameter is not None and self.book.watching:
                self.made_at.setdefault(
                    parameter, (self.book.at(lambda frame: frame.f_code.co_name == "__init__"), self.made)
                )

        return register_parameter

    def thawed(self, original: Any) -> Any:
        """requires_grad_ of a module or a tensor, when a DDP module exists already."""

        def requires_grad_(thing: Any, *args: Any, **options: Any) -> Any:
            if self.made and self.book.watching and (args[0] if args else options.get("requires_grad", True)):
                with self.book.aside():
                    for p in thing.parameters() if isinstance(thing, nn.Module) else (thing,):
                        if not p.requires_grad:
                            self.thawed_at[p] = self.book.at()
            return original(thing, *args, **options)

        return requires_grad_

    def loaded(self, original: Any) -> Any:
        def load_state_dict(module: Any, /, *args: Any, **options: Any) -> Any:
            result = original(module, *args, **options)
            self.book.note("loaded")
            return result

        return load_state_dict

    def initialized(self, original: Any) -> Any:
        """A function of torch.nn.init, on a parameter that DDP holds already."""

        def initialize(tensor: Any, /, *args: Any, **options: Any) -> Any:
            if self.made and self._inits < _NOTED and self.book.watching and tensor in self.members:
                self._inits += 1
                self.book.note("initialized")
            return original(tensor, *args, **options)

        return initialize

    def inputs(self, number: int | None, inputs: Any) -> None:
        if self._forwards >= DIGESTED:
            return
        self._forwards += 1
        with self.book.aside():
            tensors = [leaf for leaf in _leaves(inputs) if leaf.numel() > 0 and leaf.device.type != "meta"][:4]
            digests = [_digest(leaf) for leaf in tensors]
            size = tensors[0].shape[0] if tensors and tensors[0].dim() else None
            self.book.note("forward", ddp=number, digest=digests, size=size)

    def switched_mode(self, original: Any) -> Any:
        def train(module: Any, /, *args: Any, **options: Any) -> Any:
            if not self._switching and self.book.watching:
                self._switched = self.book.at()
            self._switching += 1
            try:
                return original(module, *args, **options)
            finally:
                self._switching -= 1

        return train

    def mode(self, module: nn.Module, number: int | None) -> None:
        """A forward with gradients begins. Of the parts that compute by their mode: which are in evaluation mode?"""
        with self.book.aside():
            parts = self._by_mode.get(module)
            if parts is None:
                parts = [(name, weakref.ref(part)) for name, part in module.named_modules() if _has_mode(part)]
                self._by_mode[module] = parts
            alive = [(name, part()) for name, part in parts]
            still = [name for name, part in alive if part is not None and not part.training]
            if self._modes.get(module, None) != still:
                self._modes[module] = still
                about: dict[str, Any] = {
                    "module": type(module).__name__,
                    "ddp": number,
                    "still": still[:_NAMED],
                    "count": len(still),
                }
                self.book.note(
                    "mode", at=self._switched, **about, of=len(parts), digest=zlib.crc32(str(still).encode())
                )

    def post_forward(self, original: Any) -> Any:
        def _post_forward(module: Any, /, output: Any) -> Any:
            if not module.find_unused_parameters or torch.compiler.is_compiling() or not self.book.watching:
                return original(module, output)
            began = self.book.clock()
            result = original(module, output)
            if torch.is_grad_enabled() and module.require_backward_grad_sync:
                seconds = self.book.clock() - began
                self.book.note("search", at=[], ddp=module.__dict__.get("_paceline_doctor"), seconds=seconds)
            return result

        return _post_forward

    def orders_buckets(self, module: Any) -> bool:
        """Does the forward that begins exchange the order of the buckets? The first after a reduction does, in C++."""
        number = module.__dict__.get("_paceline_doctor")
        static = bool(getattr(module, "static_graph", False))
        if not torch.is_grad_enabled() or (module.find_unused_parameters and not static):
            return False
        if number not in self.reduced or number in self._ordered:
            return False
        self._ordered.add(number)
        return True

    def hooked(self, parameter: Any) -> bool:
        """Has the script put a hook on this parameter, which may divide its gradient?"""
        return bool(backward_hooks(parameter) or len(accumulated_hooks(parameter) or ()) > (parameter in self._counted))

    def reached(self, number: int) -> int | None:
        """How many parameters of a module the backward that has just ended reached here; None: it is not known."""
        seen = self._reached.get(number)
        if seen is None:
            return None
        count = len(seen)
        seen.clear()
        return count

    def norm(self, original: Any) -> Any:
        def forward(module: Any, /, *args: Any, **options: Any) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return original(module, *args, **options)
            x = args[0] if args else options.get("input")
            if module.training and isinstance(x, torch.Tensor):
                looks = self._looks(module, module.weight)
                names = [f"{owner}.{name}" for owner, name in _names_of(module)] if looks else []
                self._norm(module, x, module.weight, self._inside.get(module), min(names, key=len, default=""))
            self._norming = True
            try:
                return original(module, *args, **options)
            finally:
                self._norming = False

        return forward

    def functional(self, original: Any) -> Any:
        """Of a module of the script's own that calls torch's function."""
        names = ("input", "running_mean", "running_var", "weight", "bias", "training")

        def batch_norm(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or self._norming:
                return original(*args, **options)
            given = {**dict(zip(names, args)), **options}
            if given.get("training"):
                weight = given.get("weight")
                buffer = given.get("running_mean")
                number = None if weight is None else self.members.get(weight)
                number = self._inside.get(buffer) if number is None and buffer is not None else number
                key = weight if weight is not None else buffer
                if key is not None:
                    self._norm(key, given["input"], weight, number, f"batch_norm of {tuple(key.shape)}")
            return original(*args, **options)

        return batch_norm

    def _looks(self, key: Any, weight: Any) -> bool:
        times = self._norms.get(key, (0, 0))[_trained(weight)]
        return bool(times < _LOOKS and torch.is_grad_enabled() and self.book.watching)

    def _norm(self, key: Any, x: torch.Tensor, weight: Any, number: int | None, name: str) -> None:
        """One in training mode is about to be used."""
        if not self._looks(key, weight):
            return
        frozen, trained = self._norms.get(key, (0, 0))
        self._norms[key] = (frozen, trained + 1) if _trained(weight) else (frozen + 1, trained)
        with self.book.aside():
            kind = type(key).__name__ if isinstance(key, nn.Module) else "batch norm"
            self.book.note("norm", name=name, size=x.shape[0], trained=_trained(weight), ddp=number, kind=kind)


def _has_mode(module: nn.Module) -> bool:
    """Does a module compute by its mode?"""
    if isinstance(module, (DropoutBase, nn.RNNBase)):
        return bool(getattr(module, "p", 0) or getattr(module, "dropout", 0))
    if isinstance(module, nn.Module) and type(module).__module__.startswith("torch.nn."):
        return isinstance(module, (NormBase, nn.RReLU)) or bool(getattr(module, "dropout", 0.0))
    methods = [vars(cls).get("forward") for cls in type(module).__mro__ if cls is not nn.Module]
    return any("training" in getattr(getattr(method, "__code__", None), "co_names", ()) for method in methods)


def _trained(weight: Any) -> bool:
    return weight is None or bool(weight.requires_grad)


def _digest(leaf: torch.Tensor) -> int:
    flat = leaf.detach().reshape(-1)
    taken = flat[:: max(1, flat.numel() // _ELEMENTS)].cpu()
    taken = taken.float() if taken.dtype is torch.bfloat16 else taken
    return zlib.crc32(taken.contiguous().numpy().tobytes())


def _names_of(module: nn.Module) -> list[tuple[str, str]]:
    """(class of the whole, name in it) for the modules that hold this one and are held by none."""
    return [
        (type(root).__name__, name)
        for root in roots()
        for name, part in root.named_modules()
        if part is module
    ]  # fmt: skip


def roots() -> list[nn.Module]:
    """The modules of this process that are part of no other, DDP's wrapper left out."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    wrappers = (DistributedDataParallel,)
    inner = {id(child) for m in modules if not isinstance(m, wrappers) for child in children_of(m).values()}
    return [m for m in modules if id(m) not in inner and not isinstance(m, wrappers)]


def names() -> Any:
    """parameter -> its name in the largest module that has it."""
    found: Any = WeakIdKeyDictionary()
    for root in sorted(roots(), key=lambda m: sum(1 for _ in m.parameters())):
        found.update({p: name for name, p in root.named_parameters()})
    return found


def watch(book: Notebook) -> None:
    models = Models(book)
    book.models = models
    put(DistributedDataParallel, "__init__", models.init)
    put(DistributedDataParallel, "forward", models.forward)
    if hasattr(DistributedDataParallel, DDP_AFTER_FORWARD):
        put(DistributedDataParallel, DDP_AFTER_FORWARD, models.post_forward)
    put(DistributedDataParallel, "no_sync", models.unsynced)
    put(nn.Module, "register_parameter", models.registered)
    put(nn.Module, "requires_grad_", models.thawed)
    put(torch.Tensor, "requires_grad_", models.thawed)
    put(nn.Module, "load_state_dict", models.loaded)
    for name in [n for n in vars(nn.init) if n.endswith("_") and not n.startswith("_") and callable(vars(nn.init)[n])]:
        put(nn.init, name, models.initialized)
    put(nn.Module, "train", models.switched_mode)
    put(BatchNormBase, "forward", models.norm)
    put(torch.nn.functional, "batch_norm", models.functional)
