"""The tensors that a script trains, with names that are the same in all runs, and the state that they are set to.

A model is the outermost module of a forward with gradients. Models are numbered in the order of their first forward. A
wrapper, such as DistributedDataParallel or torch.compile, does not count in a name. A parameter that an optimizer
updates and no model has is named by its position: "optimizer 0, parameter 3".

Under tensor parallelism by hand, each rank holds a part of some parameters. A rank's part has a name of its own, and
one process, which holds the whole parameter, divides it into the same parts (`divide`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from paceline.comm import dtensor
from paceline.torch_private.core import BatchNormBase

_WRAPPERS = re.compile(
    r"^module\.|\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|_original_module)\."
)

_POSITION = "optimizer "  # a name by the position in an optimizer begins with it


class TrainedTensors:
    """The models and optimizers of this process.

    Args:
        in_parts: the names of the parameters that each rank holds a part of.
        rank: the rank of the parts that this process holds; None: it holds these parameters whole.
    """

    def __init__(self, in_parts: Collection[str] = (), rank: int | None = None) -> None:
        self._in_parts, self._rank = frozenset(in_parts), rank
        self._parts: dict[str, tuple[int, list[int]]] = {}  # name -> the divided dimension, and each rank's length
        self.models: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self._known: Any = WeakIdKeyDictionary()  # parameter or buffer -> its name
        self.norms = False  # whether a model has a batch norm that uses the examples of one rank

    def add_model(self, model: nn.Module) -> dict[str, Tensor]:
        """Add a model, if it has parameters that no earlier model has. Returns its new tensors by name."""
        new: dict[str, Tensor] = {}
        prefix = f"{len(self.models)}/" if self.models else ""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not self._has_name(tensor):
                new[self._name(prefix + plain_name(name))] = tensor
        if any(isinstance(tensor, nn.Parameter) for tensor in new.values()):
            self.models.append(model)
            self._known.update({tensor: name for name, tensor in new.items()})
            norms = (module for module in model.modules() if isinstance(module, BatchNormBase))
            self.norms |= any(not isinstance(module, nn.SyncBatchNorm) for module in norms)
            return new
        return {}

    def _name(self, name: str) -> str:
        return name if self._rank is None or name not in self._in_parts else part_name(name, self._rank)

    def divide(self, shapes: Mapping[str, Sequence[Sequence[int]]]) -> list[str]:
        """Divide parameters as the ranks do. Returns the names of those that the ranks' parts do not make up.

        shapes: name -> the shape of each rank's part. The parts differ from the parameter in one dimension.
        """
        wrong, known = [], self.tensors()
        for name in shapes.keys() & known.keys():
            whole, parts = known[name].shape, shapes[name]
            differing = {
                d for part in parts if len(part) == len(whole) for d in range(len(whole)) if part[d] != whole[d]
            }
            dimension = min(differing, default=0)
            lengths = [part[dimension] for part in parts if len(part) == len(whole)]
            if len(differing) == 1 and len(lengths) == len(parts) and sum(lengths) == whole[dimension]:
                self._parts[name] = dimension, lengths
            else:
                wrong.append(name)
        return wrong

    def split(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors by name, with views of the ranks' parts in place of a parameter that is in parts."""
        return {part: view for name, value in tensors.items() for part, view in self._views(name, value).items()}

    def _views(self, name: str, value: Any) -> dict[str, Any]:
        """The ranks' parts of a value that belongs to a parameter. A number, such as a count of steps, has no parts."""
        if name not in self._parts:
            return {name: value}
        dimension, lengths = self._parts[name]
        has_parts = isinstance(value, Tensor) and value.dim() > dimension and value.shape[dimension] == sum(lengths)
        views = value.split(lengths, dimension) if has_parts else [value] * len(lengths)
        return {part_name(name, rank): view for rank, view in enumerate(views)}

    def has_parameters_of(self, model: nn.Module) -> bool:
        """Whether all parameters of a module are known."""
        return all(self._has_name(p) for p in model.parameters())

    def _has_name(self, tensor: Tensor) -> bool:
        """Whether a tensor has the name of a model. An optimizer may step before the first forward."""
        return not self._known.get(tensor, _POSITION).startswith(_POSITION)

    def number_of(self, optimizer: Any) -> int:
        """The number of an optimizer, in the order of the first updates."""
        found = next((i for i, one in enumerate(self.optimizers) if one is optimizer), None)
        if found is not None:
            return found
        self.optimizers.append(optimizer)
        for position, p in enumerate(_parameters(optimizer)):
            self._known.setdefault(p, f"{_POSITION}{len(self.optimizers) - 1}, parameter {position}")
        return len(self.optimizers) - 1

    def tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers, by name."""
        found = {name: tensor for tensor, name in self._known.items()}
        for number, model in enumerate(self.models):  # a buffer may be replaced
            prefix = f"{number}/" if number else ""
            found |= {
                prefix + plain_name(n): buffer for n, buffer in model.named_buffers() if buffer not in self._known
            }
        return found

    def parameters(self, optimizer: Any) -> dict[str, Tensor]:
        """The parameters of an optimizer, by name."""
        return {self._known[p]: p for p in _parameters(optimizer)}

    def buffers(self) -> set[str]:
        """The names of buffers."""
        return {name for name, tensor in self.tensors().items() if not isinstance(tensor, nn.Parameter)}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer: "KEY PARAMETER" -> tensor or number."""
        return {
            f"{key} {part}": view
            for name, p in self.parameters(optimizer).items()
            for key, value in optimizer.state.get(p, {}).items()
            if isinstance(value, (Tensor, int, float))
            for part, view in self._views(name, value).items()
        }

    def load(self, state: Mapping[str, Tensor]) -> list[str]:
        """Set tensors to the values in `state`. Returns the names of tensors with a different shape."""
        wrong = []
        for name, tensor in self.tensors().items():
            for part, view in self._views(name, tensor.data).items():
                if part in state and not copy_into(view, state[part]):
                    wrong.append(name)
        return wrong

    def load_optimizer(self, optimizer: Any, state: Mapping[str, Tensor]) -> None:
        """Set an optimizer's state to the values in `state`."""
        for name, p in self.parameters(optimizer).items():
            own = optimizer.state.get(p)
            for key, value in list(own.items()) if own else ():
                for part, view in self._views(name, value).items():
                    theirs = state.get(f"{key} {part}")
                    if theirs is None:
                        continue
                    if isinstance(view, Tensor):
                        copy_into(view, theirs)
                    elif isinstance(view, (int, float)):
                        own[key] = type(value)(theirs.item())


def part_name(name: str, rank: int) -> str:
    """The name of a rank's part of a parameter."""
    return f"{name} of rank {rank}"


def _parameters(optimizer: Any) -> Iterable[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def plain_name(name: str) -> str:
    """The name without the wrappers of the model."""
    while (shorter := _WRAPPERS.sub("", name)) != name:
        name = shorter
    return name


@torch.no_grad()
def copy_into(tensor: Tensor, value: Tensor) -> bool:
    """Set the tensor to the value. Returns whether the shapes are equal."""
    target = dtensor.local(tensor.data)  # `.data` has its own version: a graph may hold the tensor
    if target.shape != value.shape:
        return False
    target.copy_(value)
    return True


def whole(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors, with shards of other processes. All processes call it together."""
    return {
        name: _whole(value) if isinstance(value, Tensor) else torch.tensor(value) for name, value in tensors.items()
    }


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if dtensor.is_sharded(tensor):
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return tensor
