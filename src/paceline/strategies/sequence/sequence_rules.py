"""Operations that each process computes for its own tokens.

A rule returns NotImplemented for arguments that it does not cover. Then `call` computes on the whole sequence.

    elementwise   all operands are cut like the first SequenceShard; whole operands are narrowed
    along         softmax, sums, norms and others along a dimension that is not the tokens
    shapes        views, transposes, slices
    products      linear layers, matrix products, embeddings
    dropout       each process draws the whole mask, as one process would, and uses its part
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.comm.replicas import differentiable_sum
from paceline.strategies.sequence.sequence_shard import (
    RULES,
    Cut,
    Rule,
    SequenceShard,
    is_in_place,
    shards_in,
    whole,
)
from paceline.torch_private.core import tree_map_only

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for torch's functions of these names."""

    def register(function: Rule) -> Rule:
        for name in names.split():
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


def held_like(value: Any, place: int, cut: Cut) -> Any:
    """This process's part of an operand that is combined element by element with a tensor cut at `place`.

    place: the dimension from the last (-1). Raises ValueError if the operand's size does not fit.
    """
    if isinstance(value, SequenceShard):
        if value.place == place and value.cut == cut:
            return value.held
        value = whole(value)
    if not isinstance(value, Tensor) or value.dim() < -place or value.size(place) == 1:
        return value
    if value.size(place) != cut.whole:
        raise ValueError("sizes differ")  # torch reports it
    return cut.part(value, place)


def _wrapped(held: Tensor, place: int, cut: Cut) -> SequenceShard:
    return SequenceShard(held, held.dim() + place, cut)


# ------------------------------------------------------------ element by element

_ELEMENTWISE = (
    "add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power neg "
    "negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal abs absolute sign sgn sin cos tan "
    "sinh cosh tanh asin acos atan atan2 erf erfc erfinv sigmoid logit floor ceil round trunc frac clamp clip "
    "clamp_min clamp_max maximum minimum fmax fmin where masked_fill lerp addcmul addcdiv nan_to_num isnan isinf "
    "isfinite isneginf isposinf eq ne lt le gt ge equal_ not_equal less less_equal greater greater_equal "
    "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not xlogy hypot "
    "copysign heaviside relu relu6 leaky_relu elu celu selu gelu silu mish softplus softsign hardswish hardsigmoid "
    "hardtanh hardshrink softshrink tanhshrink threshold logsigmoid polar complex view_as_real conj real imag angle "
    "float double half bfloat16 int long short bool byte char contiguous clone detach type cuda zeros_like "
    "ones_like full_like empty_like .data .real .imag threshold_ relu_ alias __add__ __radd__ __sub__ __rsub__ "
    "__mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ "
    "__rpow__ __neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__ "
    "__ror__ __xor__ __rxor__ add_ sub_ mul_ div_ neg_ pow_ exp_ sqrt_ rsqrt_ sigmoid_ tanh_ clamp_ clamp_min_ "
    "clamp_max_ masked_fill_ zero_ fill_ lerp_ addcmul_ addcdiv_ relu6_ leaky_relu_ elu_ hardtanh_ detach_ copy_ "
    "nan_to_num_ square_ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ __iand__ __ior__ __ixor__"
)


@rule(_ELEMENTWISE)
def elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    name = func.__name__
    if shards_in(kwargs.get("out")):
        return NotImplemented
    if is_in_place(name) or kwargs.get("inplace"):
        if not isinstance(args[0], SequenceShard):
            return NotImplemented
        first = args[0]
    else:
        first = max(shards_in(args, kwargs), key=lambda shard: shard.held.dim())
    place, cut = first.place, first.cut
    try:
        own_args, own_kwargs = tree_map_only(Tensor, lambda value: held_like(value, place, cut), (args, kwargs))
    except ValueError:
        return NotImplemented
    result = func(*own_args, **own_kwargs)
    if result is first.held and name != "contiguous":
        return first
    return _wrapped(result, place, cut) if result.dim() >= -place else NotImplemented


@rule("to type_as")
def _converted(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The second argument may be a tensor, of which only dtype and device matter."""
    x, *rest = args
    if rest and isinstance(rest[0], Tensor):
        like = rest[0]
        to: Kwargs = (
            {"dtype": like.dtype} if func.__name__ == "type_as" else {"dtype": like.dtype, "device": like.device}
        )
        return x.to(*rest[1:], **to, **kwargs)
    if not isinstance(x, SequenceShard) or shards_in(kwargs):
        return NotImplemented
    held = func(x.held, *rest, **kwargs)
    return x if held is x.held else SequenceShard(held, x.token_dim, x.cut)


# ------------------------------------------------------------ along another dimension

# For each function: the position of its argument `dim`.
_DIM_AT = {
    "softmax": 1, "log_softmax": 1, "softmin": 1, "sum": 1, "mean": 1, "amax": 1, "amin": 1, "max": 1, "min": 1,
    "argmax": 1, "argmin": 1, "std": 1, "var": 1, "logsumexp": 1, "cumsum": 1, "cumprod": 1, "norm": 2, "normalize": 2,
    "topk": 2, "sort": 1, "argsort": 1, "any": 1, "all": 1, "prod": 1, "glu": 1, "linalg_vector_norm": 2, "flip": 1,
    "nansum": 1, "nanmean": 1, "count_nonzero": 1, "chunk": 2, "split": 2, "unbind": 1, "tensor_split": 2,
    "repeat_interleave": 2, "index_select": 1, "kthvalue": 2, "median": 1, "narrow": 1, "unique_consecutive": 3,
    "__iter__": 1,
}  # fmt: skip
_DEFAULT_DIM = {
    "glu": -1, "topk": -1, "sort": -1, "argsort": -1, "normalize": 1, "chunk": 0, "split": 0, "unbind": 0,
    "tensor_split": 0, "__iter__": 0, "kthvalue": -1,
}  # fmt: skip


@rule(" ".join(_DIM_AT))
def along(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The tokens must not be among the dimensions that the function works along. Sums and means may include them."""
    name = func.__name__
    x = args[0] if args else None
    if not isinstance(x, SequenceShard) or shards_in(args[1:], kwargs):
        return NotImplemented
    at = _DIM_AT[name]
    named = next((kwargs[key] for key in ("dim", "axis", "dims") if key in kwargs), None)
    dim = named if named is not None else args[at] if len(args) > at else _DEFAULT_DIM.get(name)
    if isinstance(dim, Tensor) or (dim is not None and not isinstance(dim, (int, tuple, list))):
        return NotImplemented
    if name == "flip":
        dim = args[1:] if isinstance(args[1], int) else dim
    given = range(x.held.dim()) if dim is None or dim == () or dim == [] else [dim] if isinstance(dim, int) else dim
    dims = {d % x.held.dim() for d in given}
    if x.token_dim in dims:
        return _total(func, x, dims, args, kwargs) if name in ("sum", "mean") else NotImplemented
    if name == "__iter__":
        return iter(along(Tensor.unbind, args, kwargs))
    result = func(x.held, *args[1:], **kwargs)

    def placed(held: Any) -> Any:
        lost = x.held.dim() - held.dim() if isinstance(held, Tensor) else 0
        return SequenceShard(held, x.token_dim - (sum(d < x.token_dim for d in dims) if lost else 0), x.cut)

    if isinstance(result, Tensor):
        return placed(result)
    return type(result)([placed(held) for held in result])


def _total(func: Any, x: SequenceShard, dims: set[int], args: Args, kwargs: Kwargs) -> Any:
    """A sum or mean over dimensions with the tokens among them: a plain tensor, the same on all processes."""
    if set(kwargs) - {"dim", "keepdim", "dtype", "axis"} or (func.__name__ == "mean" and not x.is_floating_point()):
        return NotImplemented
    keep: Any = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    part = x.held.sum(sorted(dims), keepdim=keep, dtype=kwargs.get("dtype"))
    total = differentiable_sum(part, x.cut.group)
    return total / prod(x.shape[d] for d in dims) if func.__name__ == "mean" else total


@rule("layer_norm rms_norm")
def _norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    covered = 1 if isinstance(shape, int) else len(shape)
    if not isinstance(x, SequenceShard) or shards_in(args[1:], kwargs) or x.place >= -covered:
        return NotImplemented
    return _wrapped(func(x.held, *args[1:], **kwargs), x.place, x.cut)


# ------------------------------------------------------------ shapes


def reshaped(x: SequenceShard, shape: Sequence[int]) -> Any:
    """The tokens stay one dimension, or are merged with the dimensions before them, or separated from them again."""
    new = list(shape)
    if -1 in new:
        rest = prod(n for n in new if n != -1)
        if not rest or x.numel() % rest:
            return NotImplemented
        new[new.index(-1)] = x.numel() // rest
    after = prod(x.shape[x.token_dim + 1 :])
    if prod(new) != x.numel():
        return NotImplemented
    for dim, n in enumerate(new):
        if prod(new[dim + 1 :]) == after and n > 0 and n % x.cut.length == 0:
            cut = Cut(x.cut.group, x.cut.bounds, n // x.cut.length)
            return SequenceShard(x.held.reshape(*new[:dim], cut.local, *new[dim + 1 :]), dim, cut)
    return NotImplemented


@rule("view reshape view_as reshape_as flatten unflatten")
def _reshape(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, *rest = args
    name = func.__name__
    if not isinstance(x, SequenceShard):
        return x.reshape(rest[0].shape) if name in ("view_as", "reshape_as") else NotImplemented
    shape = list(x.shape)
    if name in ("view_as", "reshape_as"):
        return reshaped(x, rest[0].shape)
    if name == "flatten":
        first: Any = kwargs.get("start_dim", rest[0] if rest else 0)
        last: Any = kwargs.get("end_dim", rest[1] if len(rest) > 1 else -1)
        start, end = first % x.held.dim(), last % x.held.dim()
        return reshaped(x, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])
    if name == "unflatten":
        given: Any = kwargs.get("dim", rest[0] if rest else 0)
        parts: Any = kwargs.get("sizes", rest[-1] if rest else ())
        dim, sizes = given % x.held.dim(), list(parts)
        if -1 in sizes:
            sizes[sizes.index(-1)] = shape[dim] // -prod(sizes)
        return reshaped(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])
    new = _sizes(rest, kwargs.get("shape", kwargs.get("size")))
    return NotImplemented if new is None else reshaped(x, new)


def _sizes(rest: Sequence[Any], named: Any) -> list[int] | None:
    """Sizes that are given one by one, or as one sequence. None: the arguments are others, such as a dtype."""
    given = named if named is not None else rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    return list(given) if given and all(isinstance(n, int) for n in given) else None


@rule("transpose swapaxes swapdims permute .mT .T t unsqueeze squeeze movedim moveaxis")
def _moved(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The function moves dimensions. A small tensor with a mark in place of the tokens shows where they go."""
    x, *rest = args
    if not isinstance(x, SequenceShard):
        return NotImplemented
    marks = torch.empty([2 if d == x.token_dim else min(n, 1) for d, n in enumerate(x.shape)], device="meta")
    if func.__name__ == "squeeze" and not rest and not kwargs:
        rest = [tuple(d for d, n in enumerate(x.shape) if n == 1)]
    elif func.__name__ == "squeeze":
        dims: Any = kwargs.get("dim", rest[0] if rest else ())
        dims = [dims] if isinstance(dims, int) else dims
        rest, kwargs = [tuple(d for d in dims if x.shape[d] == 1)], {}
    moved = func(marks, *rest, **kwargs)
    return SequenceShard(func(x.held, *rest, **kwargs), list(moved.shape).index(2), x.cut)


@rule("expand expand_as broadcast_to repeat tile")
def _expanded(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, *rest = args
    name = func.__name__
    if not isinstance(x, SequenceShard):
        return x.expand(rest[0].shape) if name == "expand_as" else NotImplemented
    sizes = list(rest[0].shape) if name == "expand_as" else _sizes(rest, kwargs.get("size"))
    if sizes is None or len(sizes) < x.held.dim():
        return NotImplemented
    dim = len(sizes) + x.place
    if name in ("repeat", "tile"):
        return SequenceShard(x.held.repeat(*sizes), dim, x.cut) if sizes[dim] == 1 else NotImplemented
    if sizes[dim] not in (-1, x.cut.whole):
        return NotImplemented
    return SequenceShard(x.held.expand(*sizes[:dim], x.cut.local, *sizes[dim + 1 :]), dim, x.cut)


@rule("pad")
def _pad(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, pad = args[0], args[1] if len(args) > 1 else kwargs["pad"]
    if not isinstance(x, SequenceShard) or any(pad[2 * (-x.place - 1) : 2 * -x.place]) or len(pad) % 2:
        return NotImplemented
    mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
    return (
        SequenceShard(func(x.held, *args[1:], **kwargs), x.token_dim, x.cut) if mode == "constant" else NotImplemented
    )


@rule("cat concat concatenate stack")
def _joined(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    dim: Any = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    if "out" in kwargs:
        return NotImplemented
    if func.__name__ == "stack":
        dims = tensors[0].dim() + 1
        return _joined(torch.cat, ([t.unsqueeze(dim % dims) for t in tensors], dim % dims), {})
    tensors = [t for t in tensors if isinstance(t, SequenceShard) or t.numel()]  # such as an empty cache of keys
    (first, *_) = shards_in(tensors)
    dim %= first.held.dim()
    if len(tensors) == 1:
        return first
    if dim == first.token_dim or any(t.dim() != first.held.dim() for t in tensors):
        return NotImplemented
    try:
        held = [held_like(t, first.place, first.cut) for t in tensors]
    except ValueError:
        return NotImplemented
    return SequenceShard(torch.cat(held, dim), first.token_dim, first.cut)


@rule("__getitem__")
def _indexed(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, index = args
    items = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(x, SequenceShard) or not all(
        item is None or item is Ellipsis or (isinstance(item, (int, slice)) and not isinstance(item, bool))
        for item in items
    ):
        return NotImplemented
    used = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (x.held.dim() - used)
    else:
        items += [slice(None)] * (x.held.dim() - used)
    positions = [i for i, item in enumerate(items) if item is not None]
    at = positions[x.token_dim]
    tokens, items[at] = items[at], slice(None)
    if isinstance(tokens, int):
        tokens %= x.cut.whole
        chosen = _tokens(x, slice(tokens, tokens + 1))
        if chosen is NotImplemented:
            return NotImplemented
        items[at] = 0
        return chosen[tuple(items)]
    chosen = x if tokens == slice(None) else _tokens(x, tokens)
    if not isinstance(chosen, SequenceShard):
        return chosen if chosen is NotImplemented else chosen[tuple(items)]
    dim = at - sum(isinstance(item, int) for item in items[:at])
    return SequenceShard(chosen.held[tuple(items)], dim, chosen.cut)


def _tokens(x: SequenceShard, tokens: slice) -> Any:
    """A slice of the tokens. If it has fewer tokens than the group has processes, it is gathered."""
    first, last, step = tokens.indices(x.cut.whole)
    if (first, last, step) == (0, x.cut.whole, 1):
        return x
    if step != 1 or x.cut.outer > 1 or last <= first:
        return NotImplemented
    cut = Cut(x.cut.group, tuple(min(max(bound, first), last) - first for bound in x.cut.bounds))
    own = max(first - x.cut.first, 0)
    part = SequenceShard(x.held.narrow(x.token_dim, min(own, x.cut.local), cut.local), x.token_dim, cut)
    return whole(part) if cut.length < cut.group.size else part


@rule("select narrow_copy")
def _selected(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if func.__name__ != "select" or len(args) != 3 or kwargs or not isinstance(args[0], SequenceShard):
        return NotImplemented
    x, dim, index = args
    return x[(*[slice(None)] * (dim % x.held.dim()), index)]


# ------------------------------------------------------------ products


@rule("linear")
def _linear(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if not isinstance(x, SequenceShard) or shards_in(args[1:], kwargs) or x.place == -1:
        return NotImplemented
    return _wrapped(func(x.held, *args[1:], **kwargs), x.place, x.cut)


@rule("embedding")
def _embedding(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
    if not isinstance(x, SequenceShard) or shards_in(args[1:], kwargs) or max_norm is not None:
        return NotImplemented
    return SequenceShard(func(x.held, *args[1:], **kwargs), x.token_dim, x.cut)


@rule("one_hot")
def _one_hot(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, classes = args[0], args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return NotImplemented if classes == -1 else SequenceShard(func(x.held, classes), x.token_dim, x.cut)


@rule("addmm")
def _addmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """bias + x @ weight, as in GPT-2."""
    if len(args) != 3 or kwargs or shards_in(args[0], args[2]) or args[0].dim() != 1 or args[1].token_dim != 0:
        return NotImplemented
    return SequenceShard(func(args[0], args[1].held, args[2]), 0, args[1].cut)


@rule("matmul bmm mm __matmul__ __rmatmul__")
def _matmul(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Rows of `a`, columns of `b` or batches may be split. If a product would sum over the tokens, or over other
    tokens of b for each token of a, the second factor is gathered (attention written as products)."""
    a, b = args if func.__name__ != "__rmatmul__" else reversed(args)
    if kwargs or min(a.dim(), b.dim()) < 2:
        return NotImplemented
    if isinstance(a, SequenceShard) and a.place == -1:
        return NotImplemented
    if isinstance(a, SequenceShard) and a.place == -2:
        rows = a.held, whole(b) if isinstance(b, SequenceShard) else b
        return _wrapped(torch.matmul(*rows), -2, a.cut)
    if isinstance(b, SequenceShard) and b.place == -1 and not isinstance(a, SequenceShard):
        return _wrapped(torch.matmul(a, b.held), -1, b.cut)
    (first, *_) = shards_in(args)
    if first.place >= -2:
        return NotImplemented
    try:
        held = held_like(a, first.place, first.cut), held_like(b, first.place, first.cut)
    except ValueError:
        return NotImplemented
    return _wrapped(torch.matmul(*held), first.place, first.cut)


# ------------------------------------------------------------ random numbers


@rule("dropout")
def _dropout(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0] if args else kwargs["input"]
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    inplace = args[3] if len(args) > 3 else kwargs.get("inplace", False)
    if not training or p == 0:
        return x
    # torch draws in the order of the input's memory, so the mask has the same order of dimensions.
    order = sorted(range(x.held.dim()), key=lambda d: -x.held.stride(d))
    ones = torch.ones([x.shape[d] for d in order], dtype=x.dtype, device=x.device)
    mask = torch.dropout(ones.permute([order.index(d) for d in range(len(order))]), p, True)
    own = x.cut.part(mask, x.token_dim)
    if inplace:
        x.held.mul_(own)
        return x
    return SequenceShard(x.held * own, x.token_dim, x.cut)
