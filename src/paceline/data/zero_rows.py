"""Patches of torch that let models run on empty batches. Active while a shard without examples is computed.

Sizes: in `x.view(x.size(0), -1)` torch infers a size from the number of elements, and refuses to if there are none.
Here the size at -1 is inferred as for one row: each 0 in the tensor's shape and in the new shape counts as 1. (If one
row cannot have the new shape, the smallest possible number of rows is used.) Only calls that torch refused are handled
this way. The result has no elements, so a wrong size may make a later operation fail, but adds nothing to a gradient.

Attention masks: torch's layer infers a size from its padding mask, and fails if the mask has no rows. Such a mask hides
nothing, so it is removed. If there are no rows, torch gives a learned mask (such as a relative position bias) no
gradient; here it gets a gradient of zeros. On CUDA, torch's attention in 16 bits returns None for no rows; here it
returns an empty tensor.

Fast path: torch's transformer layers do not use their fast path for evaluation. It stacks the rows that a padding mask
leaves, and fails if there are none.

Packed sequences: torch cannot pack zero sequences. Here it packs the steps of the padded tensor, each with 0 rows;
recurrent layers accept that. The unpacked result depends on the packed tensor, so its gradients are zeros, not missing.

CTC: over no rows, the loss has the same value as that of other criteria: NaN for a mean, 0 for a sum.

Fourier transforms: torch refuses 0 rows on a CPU. Here one row of zeros is transformed and then dropped. No other
operation sees that row: it enters no count, no statistics of a layer and no other row's result.

Compilation: models compiled by torch.compile run uncompiled. Otherwise torch.compile would compile them again for 0
rows, and refuse.

Torch's functions are replaced on all threads. A TorchFunctionMode would see neither the calls inside torch's functions
nor a segment that is recomputed in a backward pass. Everything is restored at the loader's next yield, except Tensor's
methods. A script that prefetches computes a batch after the loader has yielded later batches, so methods stay replaced
for a few yields. (A replaced function would make models recompile; torch.compile does not look at methods.)
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
"""Number of yields for which the methods stay replaced: enough for two loaders in one loop, each one batch ahead."""


def sizes_of_one_row(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """`new` with its -1 replaced by a size. old: the shape of a tensor without elements. None: no size needs to be
    replaced, or `new` is not a shape."""
    if 0 not in old or 0 not in new or new.count(-1) != 1 or min(new) < -1:
        return None
    elements, known = (math.prod(size for size in sizes if size > 0) for sizes in (old, new))
    return tuple(elements // math.gcd(elements, known) if size == -1 else size for size in new)


def _answering(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """view or reshape, made to accept a -1 if the tensor has no elements."""

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
    """(the tensor of a refused call, the shape to use instead). None: the call was refused for another reason."""
    tensor, *new = args if args else (kwargs.get("input"),)
    new = new or [kwargs.get("shape", kwargs.get("size"))]
    if len(new) == 1 and isinstance(new[0], (tuple, list)):
        new = list(new[0])
    try:
        return tensor, sizes_of_one_row(tuple(tensor.shape), tuple(map(int, new)))
    except (TypeError, ValueError):  # a dtype to view, or not a size at all
        return tensor, None


def _without_masks(function: Callable[..., Any]) -> Callable[..., Any]:
    """multi_head_attention_forward, made to ignore masks of no rows."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        none = [name for name in ("key_padding_mask", "attn_mask") if _has_no_elements(kwargs.get(name))]
        if "attn_mask" in none:
            kwargs["is_causal"] = False  # it is a hint about this mask
        return function(*args, **kwargs | dict.fromkeys(none))

    return called


def _has_no_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 0


def _attending_to_nothing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """scaled_dot_product_attention, wrapped so that zero rows give an empty tensor even where CUDA's 16-bit kernels
    return None. The
    result also depends on the mask, so that a learned mask gets a gradient."""

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
    """torch's function that packs padded sequences, made to accept zero sequences."""

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
    """torch's function that pads packed sequences, made to depend on the packed tensor also for zero sequences."""

    @functools.wraps(function)
    def called(packed: Tensor, *args: Any) -> Any:
        padded, lengths = function(packed, *args)
        return (padded if packed.numel() else padded + packed.sum()), lengths

    return called


_NONE, _MEAN = 0, 1
"""torch's numbers for the reductions of a criterion; 2 is "sum"."""


def _ctc(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.ctc_loss, made to accept zero rows."""

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
    """The function, made to accept zero rows: it transforms one row of zeros, and drops the result."""

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
"""The methods of Tensor that `_answering` replaces."""

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
"""The replaced functions: module, name, and the function that makes the replacement."""


class ZeroRows:
    """The changes to torch. One object per process, since torch's functions are global."""

    def __init__(self) -> None:
        self.left = 0  # number of further yields for which Tensor's methods stay replaced
        self._empty: set[object] = set()  # the loaders with an empty shard in their current yield
        self._undo: list[Callable[[], Any]] = []  # restore torch's functions when `_empty` has no loader left

    def begin_yield(self, loader: object, empty: bool) -> None:
        """Apply the patches at a loader's yield with an empty shard; at other yields, remove those that have expired.

        empty: does the yield have a shard without examples? Call it if so, and at every yield while `left` is not 0.
        """
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
        """Restore torch's functions after the loader's last yield, unless another loader needs the patches."""
        self._empty.discard(loader)
        while self._undo and not self._empty:
            self._undo.pop()()

    def close(self) -> None:
        """Restore everything."""
        self._empty.clear()
        self.end_yield(None)
        self._put_methods_back()

    def _change(self) -> None:
        for name in () if self.left else METHODS:
            setattr(Tensor, name, _answering(getattr(Tensor, name)))
        if self._undo:
            return
        for where, name, replacement in FUNCTIONS:
            original = getattr(where, name)
            self._undo.append(functools.partial(setattr, where, name, original))
            setattr(where, name, replacement(original))
        fast = torch.backends.mha.get_fastpath_enabled()
        self._undo.append(functools.partial(torch.backends.mha.set_fastpath_enabled, fast))
        torch.backends.mha.set_fastpath_enabled(False)
        if compiled_wrapper() is not None:  # else nothing is compiled, and set_stance would import the compiler
            stance = torch.compiler.set_stance("force_eager")
            self._undo.append(functools.partial(stance.__exit__, None, None, None))

    def _put_methods_back(self) -> None:
        for name in METHODS if self.left else ():
            delattr(Tensor, name)  # torch's method is inherited
        self.left = 0


ZERO_ROWS = ZeroRows()
