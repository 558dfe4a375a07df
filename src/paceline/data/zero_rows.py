"""What a model needs of torch to compute a batch of 0 rows, while a shard without examples is computed.

Sizes: in `x.view(x.size(0), -1)` torch infers a size from the number of elements, and refuses where there are none.
Here the size at -1 is what it is for one row: each 0 among the sizes, of the tensor and of the new shape, is taken for
a 1. (Where one row cannot have the new shape, the least number of rows that can is taken.) Only a call that torch has
refused is answered so, and its result has no elements, so that a size which the model did not mean makes a later
operation fail, but adds nothing to a gradient.

Masks of attention: torch's own layer infers a size from its padding mask, which may have been multiplied by the heads.
A mask of no rows hides nothing, and is left out. A mask that is learned, as a bias of relative positions, gets no
gradient from torch over no rows, as if the loss did not depend on it: here it gets one of zeros. On CUDA, torch's
attention in 16 bits returns None for no rows: here it returns a tensor of none.

Fast path: torch's own transformer layers compute as they do in training. Their fast path for evaluation stacks the rows
that a padding mask leaves, of which there are none.

Packed sequences: torch packs no sequence of no rows. Here it packs as many steps as the padded tensor has, each of 0
rows, which recurrent layers take. What is unpacked depends on them, so that their gradients are zeros and not absent.

CTC: over no rows its loss is what that of other criteria is, a mean over nothing or a sum of 0.

Fourier transforms, which torch refuses over 0 rows on a CPU: they transform one row of zeros, which is then dropped. No
other operation sees that row: it enters no count, no statistics of a layer and no other row's result.

Compilation: what torch.compile has compiled runs uncompiled, since it would be compiled anew for 0 rows, and refused.

Torch's functions are replaced, on all threads. A mode of torch's functions would not see the calls within torch's own,
nor those of a segment that is recomputed in a backward. All is put back when the loader comes to its next yield, but
for Tensor's methods. A script that fetches ahead computes a batch when later ones have been yielded, so that they stay
for a few yields. (A function that stayed would have models compiled anew; torch.compile does not look at methods.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.torch_private.core import PACK, SEQUENCES, UNPACK, compiled_wrapper

KEPT = 4
"""For how many yields the functions stay replaced: two loaders in one loop, each fetched one batch ahead."""


def sizes_of_one_row(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """`new` with a size in place of its -1, for a tensor of the shape `old`, which has no elements. None: torch needs
    no such size, or `new` is no shape."""
    if 0 not in old or 0 not in new or new.count(-1) != 1 or min(new) < -1:
        return None
    elements, known = (math.prod(size for size in sizes if size > 0) for sizes in (old, new))
    return tuple(elements // math.gcd(elements, known) if size == -1 else size for size in new)


def _answering(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, which also takes a -1 where its tensor has no elements."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Tensor:
        try:
            return function(*args, **kwargs)
        except RuntimeError:
            tensor, sizes = _asked(*args, **kwargs)
            if sizes is None:
                raise
        return function(tensor, sizes)

    return called


def _asked(*args: Any, **kwargs: Any) -> tuple[Any, tuple[int, ...] | None]:
    """(the tensor of a refused call, the shape to give it); None: the call is refused for another reason."""
    tensor, *new = args if args else (kwargs.get("input"),)
    new = new or [kwargs.get("shape", kwargs.get("size"))]
    if len(new) == 1 and isinstance(new[0], (tuple, list)):
        new = list(new[0])
    try:
        return tensor, sizes_of_one_row(tuple(tensor.shape), tuple(map(int, new)))
    except (TypeError, ValueError):  # a dtype to view, or nothing that is a size
        return tensor, None


def _without_masks(function: Callable[..., Any]) -> Callable[..., Any]:
    """multi_head_attention_forward, which leaves out masks of no rows."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        none = [name for name in ("key_padding_mask", "attn_mask") if _has_no_elements(kwargs.get(name))]
        if "attn_mask" in none:
            kwargs["is_causal"] = False  # a hint about this mask
        return function(*args, **kwargs | dict.fromkeys(none))

    return called


def _has_no_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 0


def _attending_to_nothing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """scaled_dot_product_attention over no rows: a tensor where CUDA's kernels of 16 bits return None, and a result
    that depends on its mask too."""

    @functools.wraps(function)
    def called(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *a: Any, **k: Any) -> Tensor:
        made: Tensor | None = function(query, key, value, attn_mask, *a, **k)
        if made is None:
            kind = query.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
            made = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=dtype)
            made = made + 0 * sum(tensor.sum() for tensor in (query, key, value)).to(dtype)  # type: ignore[union-attr]
        if attn_mask is None or made.numel() or not attn_mask.requires_grad:
            return made
        return made + 0 * attn_mask.sum()

    return called


def _packing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that packs padded sequences, also those of no rows."""

    @functools.wraps(function)
    def called(padded: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        try:
            return function(padded, lengths, batch_first)
        except RuntimeError:
            if padded.dim() < 2 or padded.size(0 if batch_first else 1):
                raise
        steps = max(padded.size(1 if batch_first else 0), 1)
        return padded.reshape(0, *padded.shape[2:]), torch.zeros(steps, dtype=torch.long)

    return called


def _unpacking(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that pads packed sequences, whose result of no rows depends on these too."""

    @functools.wraps(function)
    def called(packed: Tensor, *args: Any) -> Any:
        padded, lengths = function(packed, *args)
        return (padded if packed.numel() else padded + packed.sum()), lengths

    return called


_NONE, _MEAN = 0, 1
"""How torch numbers the reductions of a criterion; 2 is "sum"."""


def _ctc(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.ctc_loss, also over no rows."""

    @functools.wraps(function)
    def called(log_probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return function(log_probs, *args, **kwargs)
        except RuntimeError:
            if log_probs.dim() != 3 or log_probs.size(1):
                raise
        each = log_probs.sum((0, 2))
        reduction = kwargs.get("reduction", args[4] if len(args) > 4 else _MEAN)
        return each if reduction == _NONE else each.mean() if reduction == _MEAN else each.sum()

    return called


def _of_one_row(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, which computes one row of zeros and drops it, where it is refused for no rows."""

    @functools.wraps(function)
    def called(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return function(rows, *args, **kwargs)
        except RuntimeError:
            if rows.dim() < 2 or rows.size(0) or 0 in rows.shape[1:]:
                raise
        return function(rows.new_zeros((1, *rows.shape[1:])) + rows.sum(), *args, **kwargs)[:0]

    return called


METHODS = ("view", "reshape")
"""Those of Tensor that are replaced by `_answering`."""

FUNCTIONS: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
    (torch, "reshape", _answering),
    (F, "multi_head_attention_forward", _without_masks),
    (F, "scaled_dot_product_attention", _attending_to_nothing),
    (SEQUENCES, PACK, _packing),
    (SEQUENCES, UNPACK, _unpacking),
    (torch, "ctc_loss", _ctc),
    (torch, "stft", _of_one_row),
    *[(torch.fft, f"{kind}fft{dims}", _of_one_row) for kind in ("", "i", "r", "ir") for dims in ("", "2", "n")],
]
"""The functions that are replaced: where each is, its name, and what makes the function in its place."""


class ZeroRows:
    """What is changed of torch. One object for the process, as torch's functions are."""

    def __init__(self) -> None:
        self.left = 0  # for how many more yields Tensor's methods are replaced
        self._empty: set[object] = set()  # the loaders whose current yield has an empty shard
        self._undo: list[Callable[[], Any]] = []  # puts back what is changed while there are such loaders

    def begin_yield(self, loader: object, empty: bool) -> None:
        """A loader yields. empty: whether a shard in the yield has no examples. Called at each such yield, and while
        `left` is not 0."""
        if empty:
            self._empty.add(loader)
            self._change()
            self.left = KEPT
            return
        self.end_yield(loader)
        if self.left == 1:
            self._put_methods_back()
        else:
            self.left -= 1

    def end_yield(self, loader: object) -> None:
        """The turn of the loader's last yield is over."""
        self._empty.discard(loader)
        while self._undo and not self._empty:
            self._undo.pop()()

    def close(self) -> None:
        """Put all back."""
        self._empty.clear()
        self.end_yield(None)
        self._put_methods_back()

    def _change(self) -> None:
        for name in () if self.left else METHODS:
            setattr(Tensor, name, _answering(getattr(Tensor, name)))
        if self._undo:
            return
        for where, name, replacement in FUNCTIONS:
            own = getattr(where, name)
            self._undo.append(functools.partial(setattr, where, name, own))
            setattr(where, name, replacement(own))
        fast = torch.backends.mha.get_fastpath_enabled()
        self._undo.append(functools.partial(torch.backends.mha.set_fastpath_enabled, fast))
        torch.backends.mha.set_fastpath_enabled(False)
        if compiled_wrapper() is not None:  # else nothing is compiled, and a stance would import the compiler
            stance = torch.compiler.set_stance("force_eager")
            self._undo.append(functools.partial(stance.__exit__, None, None, None))

    def _put_methods_back(self) -> None:
        for name in METHODS if self.left else ():
            delattr(Tensor, name)  # torch's own is inherited
        self.left = 0


ZERO_ROWS = ZeroRows()
