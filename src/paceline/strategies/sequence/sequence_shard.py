"""A tensor with the shape of the whole sequence, of which this process holds some tokens.

The user's model and loss run unchanged: they see the whole sequence's shape. torch shows each operation on a
SequenceShard to `call`:

- if the operation has a rule (sequence_rules.py, sequence_attention.py, sequence_loss.py), each process computes it
  for its tokens;
- every other operation is computed on the whole sequence. The tensors are gathered, and all processes of the group
  compute the same. Its result is a plain tensor. This costs memory, but cannot be wrong.

Autograd records the operations on the local tensors. A user's autograd.Function does not call __torch_function__. Its
gradient would go to the SequenceShard and be lost, so this raises ModelError.

Follows the extension of torch by __torch_function__, as in torch's DTensor, which works below autograd instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.errors import ModelError, warn
from paceline.strategies.sequence import sequence_exchange
from paceline.torch_private.core import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
    tree_flatten,
    tree_map_only,
)

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(torch's function, its arguments, its keyword arguments) -> the result, or NotImplemented."""

RULES: dict[str, Rule] = {}

_FORM_NAMES = (
    "size dim ndimension numel nelement __len__ stride element_size get_device is_floating_point is_complex is_signed "
    "is_contiguous is_same_size __hash__ .shape .ndim .dtype .device .layout .is_cuda .is_cpu .is_meta .is_sparse "
    ".is_quantized .is_nested .is_mps .is_xpu .is_mkldnn .itemsize .nbytes .names .name"
)
_LOCAL_NAMES = (
    ".requires_grad .is_leaf .output_nr ._base ._version .grad_fn .retains_grad requires_grad_ register_hook "
    "retain_grad new_zeros new_ones new_full new_empty new_tensor"
)
_READING_NAMES = "item tolist numpy __bool__ __int__ __float__ __index__ __array__ __format__ cpu equal"
_FORM = frozenset(_FORM_NAMES.split())
"""Functions and attributes (with a dot) that need only the whole tensor's shape, dtype and device."""
_OF_LOCAL = frozenset(_LOCAL_NAMES.split())
"""Functions and attributes of the local tensor."""
_READS = frozenset(_READING_NAMES.split())
"""Functions that scripts call for logging."""
_NOT_IN_PLACE = frozenset(["__int__", "__index__", "__invert__", "__iter__"])
_warned: set[str] = set()


@dataclass(frozen=True)
class Cut:
    """How the tokens of a dimension are split over a group.

    bounds: (group.size + 1,): rank r holds tokens bounds[r] to bounds[r + 1]. outer: the number of sequences if the
    dimension is (sequences x tokens) flattened; each rank then holds its tokens of each sequence.
    """

    group: Group
    bounds: tuple[int, ...]
    outer: int = 1

    @property
    def length(self) -> int:  # tokens of a sequence
        return self.bounds[-1]

    @property
    def first(self) -> int:  # the first token that this process holds
        return self.bounds[self.group.rank]

    @cached_property
    def sizes(self) -> list[int]:  # the tokens of a sequence on each rank
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def local(self) -> int:  # the size of the local tensor's dimension
        return self.outer * self.sizes[self.group.rank]

    @property
    def whole(self) -> int:  # the size of the whole tensor's dimension
        return self.outer * self.length

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This process's part of a whole tensor: a view if possible."""
        tokens = self.sizes[self.group.rank]
        if self.outer == 1:
            return tensor.narrow(dim, self.first, tokens)
        dim %= tensor.dim()
        return (
            tensor.unflatten(dim, (self.outer, self.length)).narrow(dim + 1, self.first, tokens).flatten(dim, dim + 1)
        )


def even_cut(group: Group, length: int) -> Cut:
    """Split `length` tokens; the ranks' parts differ by at most one token."""
    return Cut(group, tuple(length * rank // group.size for rank in range(group.size + 1)))


class SequenceShard(Tensor):
    """A tensor of the whole sequence's shape.

    held: this process's part. token_dim: the dimension that is split, from 0. cut: how.
    """

    held: Tensor
    token_dim: int
    cut: Cut

    @staticmethod
    def __new__(cls, held: Tensor, token_dim: int, cut: Cut) -> SequenceShard:
        shape = list(held.shape)
        shape[token_dim] = cut.whole
        made: SequenceShard = make_wrapper_subclass(
            cls, shape, dtype=held.dtype, device=held.device, requires_grad=held.requires_grad
        )
        made.held, made.token_dim, made.cut = held, token_dim, cut
        if held.requires_grad:
            with DisableTorchFunctionSubclass():
                made.register_hook(_lost)
        return made

    def __init__(self, held: Tensor, token_dim: int, cut: Cut) -> None:
        super().__init__()

    @property
    def place(self) -> int:
        """The dimension that is split, counted from the last (-1)."""
        return self.token_dim - self.held.dim()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            shape = tuple(self.shape)
        first = self.cut.first
        last = first + self.cut.sizes[self.cut.group.rank]
        return f"SequenceShard({shape}, tokens {first} to {last} of dimension {self.token_dim}: {self.held!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise ModelError(
            f"strategy ulysses: {func} got a tensor of which this process holds only some tokens, from code that "
            "bypasses torch's functions (a compiled function, torch.func, or a custom operator). Use plain PyTorch "
            "operations for this part of the model, or strategy='ddp'."
        )


def _lost(_: Tensor) -> NoReturn:
    raise ModelError(
        "strategy ulysses: a torch.autograd.Function got a tensor of which this process holds only some tokens. It may "
        "mix tokens, and its gradient would be lost. With activation checkpointing, set use_reentrant=False. Otherwise "
        "replace the function by PyTorch operations, or use strategy='ddp'."
    )


def shards_in(*values: Any) -> list[SequenceShard]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, SequenceShard)]


def whole(shard: SequenceShard) -> Tensor:
    """The whole tensor, gathered from all processes of the group, for autograd."""
    cut, dim, held = shard.cut, shard.token_dim, shard.held
    if cut.outer == 1:
        joined = sequence_exchange.gather(held, cut.group, dim, cut.sizes)
    else:
        tokens = cut.sizes[cut.group.rank]
        parts = held.unflatten(dim, (cut.outer, tokens))
        joined = sequence_exchange.gather(parts, cut.group, dim + 1, cut.sizes).flatten(dim, dim + 1)
    # A write to a view of this copy would not reach the shard. torch refuses writes to unbind's views.
    return joined.unsqueeze(0).unbind(0)[0]


def all_whole(value: Any) -> Any:
    """Replace each SequenceShard in lists, tuples and dicts by its whole tensor."""
    return tree_map_only(SequenceShard, whole, value)


def is_in_place(name: str) -> bool:
    """Whether a function writes to its first argument, by the name: add_, __iadd__, __setitem__."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on arguments with a SequenceShard among them."""
    name = _name(func)
    if name in _FORM:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in _OF_LOCAL:
        result = func(args[0].held, *args[1:], **kwargs)
        return args[0] if name == "requires_grad_" else result
    for shard in shards_in(args, kwargs):
        with DisableTorchFunctionSubclass():
            if shard.grad_fn is not None:  # the result of a user's autograd.Function
                _lost(shard)
    rule = RULES.get(name)
    if rule is not None:
        result = rule(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return on_whole(func, name, args, kwargs)


def on_whole(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the whole sequence, on each process."""
    writes = name.startswith(".=") or (is_in_place(name) and isinstance(args[0], SequenceShard))
    if writes or shards_in(kwargs.get("out")):
        raise ModelError(
            f"strategy ulysses: {name.strip('.=')} writes in place to a tensor that is split along the sequence. Write "
            "it as an expression that makes a new tensor (torch.where, masked_fill), or use strategy='ddp'."
        )
    largest = max(shards_in(args, kwargs), key=Tensor.numel)
    if name not in _READS and largest.is_floating_point() and torch.is_grad_enabled() and name not in _warned:
        _warned.add(name)
        if largest.cut.group.rank == 0:
            warn(
                f"strategy ulysses: {name.strip('._')} is computed on whole sequences, on every process: this strategy "
                "cannot compute it on a part of the tokens. The result is exact, but its memory is not divided."
            )
    return func(*all_whole(args), **all_whole(kwargs))


def _name(func: Any) -> str:
    """A function's name. An attribute's name begins with a dot, and with ".=" if it is set."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return (".=" if name != "__get__" else ".") + func.__self__.__name__
    return name
