"""Models that were built on "meta": allocate their tensors, and fill them as their modules initialise them.

A model that was built under `torch.device("meta")` has shapes and no memory. A strategy that shards gives each process
only its part of the memory. Then `Filling` runs the modules' own initialisation, one module at a time, and each process
keeps its part of the result:

1. Stand-ins take the place of the tensors of a module and of its children (stand_ins.py).
2. The module's function runs (`reset_parameters`, transformers' `_init_weights`, or the script's).
3. The written values are copied into this process's part.

Draws are keyed by the seed and the names of the module and the tensor. So the values depend neither on the number of
processes nor on the strategy. They are not those of a model that was built in memory, whose draws come from one stream.

Follows PyTorch's FSDP2 idiom, `to_empty` and `reset_parameters` after `fully_shard`, and torchdistx's deferred
initialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from paceline.comm import dtensor, generators
from paceline.data.randomness import mix, seed_all, tag
from paceline.errors import ModelError
from paceline.strategies.kit.named_parameters import listed
from paceline.strategies.kit.stand_ins import clear, stand_ins
from paceline.torch_private.core import INITIALISERS, buffers_of, parameters_of, unsaved_buffers

Init = Callable[[nn.Module], object]
"""A function that initialises a module's own parameters, as for `nn.Module.apply`."""

_OF_TRANSFORMERS = "_init_weights"  # of a model; takes one of its modules


def is_deferred(model: nn.Module) -> bool:
    """Whether a parameter or buffer of the model is on "meta"."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def allocate(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Give tensors on "meta" memory, with undefined values. A sharded tensor gets this process's part. Each tensor
    stays the same object, so ties and optimizers stay valid."""
    for tensor in dict.fromkeys(tensors):
        if tensor.is_meta:
            made = torch.empty_like(tensor, device=device, requires_grad=False)
            made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
            vars(made).update(vars(tensor))
            torch.utils.swap_tensors(tensor, made)


class Filling:
    """Fills one model. Make it before the memory is allocated, since it notes which tensors are on "meta".

    Attributes:
        unfilled: the names of parameters and persistent buffers that have no values, sorted. They are NaN, or 0 if
            they are integers.
    """

    def __init__(self, model: nn.Module, key: int, init: Init | bool) -> None:
        """key: of the random streams. init: True: the modules' own functions; False: fill only buffers that no
        checkpoint has; or a function that is called for each module. Raises ModelError for tensors on "meta" that are
        neither parameters nor buffers."""
        self._model, self._key, self._init = model, key, init
        _check_attributes(model)
        self._names: dict[str, bool] = {}  # of tensors on "meta" -> whether no checkpoint has them
        for prefix, module in _named_modules(model):
            for name, tensor in _own_tensors(module).items():
                if tensor.is_meta:
                    self._names[prefix + name] = name in unsaved_buffers(module)
        self.unfilled: list[str] = []

    def __call__(self) -> None:
        """Fill the model, whose memory is allocated. Raises ModelError for tensors that no function writes.
        Collective for sharded tensors."""
        streams = generators.get_state()
        try:
            self._fill()
        finally:
            generators.set_state(streams)

    @torch.no_grad()
    def _fill(self) -> None:
        tensors: dict[Tensor, list[str]] = {}
        for prefix, module in _named_modules(self._model):
            for name, tensor in _own_tensors(module).items():
                if prefix + name in self._names:
                    tensors.setdefault(tensor, []).append(prefix + name)
        unsaved = {tensor for tensor, names in tensors.items() if all(self._names[name] for name in names)}
        empty = set(tensors)  # those that no function has written yet
        for tensor in tensors:
            clear(dtensor.local(tensor))
        if self._init is not True:
            self._run(None, unsaved, empty, lambda module: not unsaved.isdisjoint(_own_tensors(module).values()))
        if self._init is not False:
            init = self._init if callable(self._init) else None
            self._run(init, set(tensors), empty, lambda module: not set(tensors).isdisjoint(_all_tensors(module)))
        left = [(names[0], tensor in unsaved) for tensor, names in tensors.items() if tensor in empty]
        self.unfilled = sorted(name for name, is_unsaved in left if not is_unsaved)
        if lost := sorted(name for name, is_unsaved in left if is_unsaved):
            raise ModelError(_lost(self._model, lost))
        if self.unfilled and self._init is not False:
            raise ModelError(_unfilled(self._model, self.unfilled, callable(self._init)))

    def _run(
        self, init: Init | None, targets: set[Tensor], empty: set[Tensor], chosen: Callable[[nn.Module], bool]
    ) -> None:
        """Initialise the chosen modules, children first, and keep the values written to the targets. These leave
        `empty`, the set of tensors without values."""
        for name, module, model in _children_first(self._model, "", self._model):
            calls = _functions(module, model) if init is None else [partial(init, module)]
            if not calls or not chosen(module):
                continue
            key = mix(self._key, tag(name))
            seed_all(key)
            with stand_ins(module, key, empty) as written:
                for call in calls:
                    call()
            for tensor, write in written.items():
                if tensor in targets:
                    write()
                    empty.discard(tensor)


def _functions(module: nn.Module, model: nn.Module) -> list[Callable[[], object]]:
    """The functions that initialise a module, in the order in which a constructor calls them.

    model: the innermost model of transformers around it. They are read from the classes: fsdp puts functions that
    gather into modules."""
    found: list[Callable[[], object]] = []
    own = next((getattr(type(module), name) for name in INITIALISERS if hasattr(type(module), name)), None)
    if own is not None:
        found.append(partial(own, module))
    if hasattr(type(model), _OF_TRANSFORMERS):
        found.append(partial(getattr(type(model), _OF_TRANSFORMERS), model, module))
    return found


def _children_first(module: nn.Module, name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(name, module, the innermost module around it that has `_init_weights`), in the order of nn.Module.apply."""
    if hasattr(type(module), _OF_TRANSFORMERS):
        model = module
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name, model)
    yield name, module, model


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(the beginning of its tensors' names, module)."""
    for name, module in model.named_modules():
        yield f"{name}." if name else "", module


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    own = {**parameters_of(module), **buffers_of(module)}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _all_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


# --- errors


def _check_attributes(model: nn.Module) -> None:
    for prefix, module in _named_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ModelError(
                    f'run.prepare: {prefix}{name} of {type(model).__name__} is a tensor on "meta" that is neither a '
                    "parameter nor a buffer, so nothing can fill it. Register it with register_buffer, and compute it "
                    "in reset_parameters."
                )


def _lost(model: nn.Module, names: list[str]) -> str:
    return (
        f'run.prepare: {type(model).__name__} was built on "meta", and {len(names)} buffer(s) of it are in no '
        f"checkpoint (persistent=False) and are computed by no function that can run again: {listed(names)}. Compute "
        "them in reset_parameters of their module, or in init= of run.prepare; or build buffers in memory, as "
        "accelerate.init_empty_weights() does."
    )


def _unfilled(model: nn.Module, names: list[str], has_init: bool) -> str:
    why = "init= does not write" if has_init else "no reset_parameters (in transformers, _init_weights) writes"
    return (
        f'run.prepare: {type(model).__name__} was built on "meta", and {why} {listed(names)}. Give their modules a '
        "reset_parameters, pass run.prepare(model, init=function), or pass init=False and load weights with "
        "run.restore or run.load_pretrained."
    )
