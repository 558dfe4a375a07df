"""Random numbers by example: row i of a random tensor is drawn from the stream of example i.

`ExampleDraws` is a TorchDispatchMode that intercepts every random operator of torch, wherever it is called (torch.rand,
a method such as `uniform_`, a distribution, dropout). If the first dimension of the result is the number of examples,
the numbers come from a counter-based generator instead of torch's: element (i, j, k) of draw number d is hash(key of
example i, d, j, k). So an example has the same numbers in every batch, and longer padding does not change them.

The hash is splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), nested: the j-th
number of stream i is the key of stream (i, j). All of it is 64-bit arithmetic on tensors, the same on every device.
Other distributions are made from uniform numbers: normal by Box and Muller (1958); exponential, Cauchy and geometric by
inversion; sampling without replacement by exponential races.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.comm.scalars import upload
from paceline.data.randomness import mix
from paceline.torch_private.core import TorchDispatchMode, is_composite, schema_of

# The constants of splitmix64, as int64.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_CHUNK = 1 << 16  # elements drawn at once: they fit into a core's cache

_UNTAGGED = frozenset(
    [
        "random",
        "random_",
        "binomial",
        "_sample_dirichlet",
        "rrelu",
        "rrelu_",
        "dropout_",
        "alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
        "scaled_dot_product_attention",
    ]
)
"""Random operators that torch does not tag as random."""


class DrawCall(NamedTuple):
    """One call of a random operator."""

    func: Any  # the operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str  # name of the operator, without `aten::`
    values: dict[str, Any]  # all arguments by name, with their defaults
    shape: tuple[int, ...]  # shape of the drawn tensor

    def plain(self, key: int | None = None) -> Any:
        """Call the operator with torch's default generator, even if the caller passed another generator. key: seed the
        default generator with this key, for this call only."""
        kwargs = {**self.kwargs, "generator": None} if "generator" in self.values else self.kwargs
        if key is None:
            return self.func(*self.args, **kwargs)
        with _seeded(key, self.device):
            return self.func(*self.args, **kwargs)

    @property
    def mixes(self) -> bool:
        """Whether the result is a permutation, or a sample without replacement: its rows cannot be drawn separately."""
        one = self.name == "multinomial" and self.values["self"].dim() == 1 and not self.values["replacement"]
        return one or self.name == "randperm"

    @property
    def device(self) -> torch.device:
        """The device of the drawn tensor."""
        source = self.values.get("self", self.values.get("mean"))
        if not isinstance(source, Tensor):
            source = self.values.get("std")
        if isinstance(source, Tensor):
            return source.device
        return torch.device(self.values.get("device") or "cpu")


class RowKeys:
    """The keys of the current examples' streams.

    Args:
        count: number of examples.
        make: returns the keys, (count,) uint64, one per row. Called at the first draw.
    """

    def __init__(self, count: int, make: Callable[[], np.ndarray]) -> None:
        self._count, self._make = count, make
        self._on: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return self._count

    @functools.cached_property
    def keys(self) -> np.ndarray:
        """The keys, (count,) uint64."""
        return self._make()

    def on(self, device: torch.device) -> Tensor:
        """The keys on a device, (count,) int64."""
        if device not in self._on:
            self._on[device] = upload(torch.from_numpy(self.keys.view(np.int64)), device)
        return self._on[device]


class ExampleDraws(TorchDispatchMode):
    """A mode that makes random operators draw each row from the stream of its example.

    keys: the examples' keys. draw_other: draws a tensor without one row per example, from the call and its number.
    layout: the dimension of the examples in the drawn tensor. "rows": the first dimension; "folded": the first
    dimension, which is (examples x anything); "second": the second dimension.
    """

    def __init__(self, keys: RowKeys, draw_other: Callable[[DrawCall, int], Any], *, layout: str = "rows") -> None:
        super().__init__()
        self.keys, self.draw_other, self.layout = keys, draw_other, layout
        self.calls: list[tuple[bool, tuple[int, ...]]] = []  # (DrawCall.mixes, shape) of each draw

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator would import all of torch._dynamo, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = _kind(func)
        if kind == _PLAIN:
            return func(*args, **(kwargs or {}))
        if kind == _COMPOSITE:  # inference mode does not decompose composite operators
            with self:
                return func.decompose(*args, **(kwargs or {}))
        call = _bind(func, args, kwargs or {})
        number = self.number(call)
        self.calls.append((call.mixes, call.shape))
        if call.device.type == "meta" or not math.prod(call.shape):
            return call.plain()
        shape = self._examples_first(call.shape)
        if shape is None or call.mixes or self.is_batch_level(call, number) or not _all_plain(args):
            return self.draw_other(call, number)
        keys = self.keys.on(call.device)
        if self.layout == "rows":
            return draw_rows(call, keys, number)
        if call.name not in ("bernoulli_", "native_dropout"):  # the operators that dropout uses
            return self.draw_other(call, number)
        values = {"p": 1 - call.values["p"] if call.name == "native_dropout" else call.values["p"]}
        masks = call._replace(name="bernoulli", shape=shape, values={**values, "dtype": torch.bool})
        drawn = draw_rows(masks, keys, number)
        kept = drawn.transpose(0, 1) if self.layout == "second" else drawn.reshape(call.shape)
        return args[0].copy_(kept) if call.name == "bernoulli_" else _apply_dropout(call, kept)

    def number(self, call: DrawCall) -> int:
        """The number of the current draw. Draws of every kind count."""
        return len(self.calls)

    def is_batch_level(self, call: DrawCall, number: int) -> bool:
        """Whether a draw is for the whole batch, although its length equals the number of examples."""
        return False

    def _examples_first(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the numbers to draw, with the examples first. None if there is no row per example."""
        count = len(self.keys)
        if self.layout == "second":
            return (count, shape[0], *shape[2:]) if shape[1:2] == (count,) else None
        if shape[:1] == (count,):
            return shape
        if self.layout == "folded" and count and len(shape) > 1 and shape[0] % count == 0:
            return (count, shape[0] // count, *shape[1:])
        return None


_PLAIN, _COMPOSITE, _DRAWS = range(3)  # kinds of operators; a composite one consists of other operators
_kinds: dict[Any, int] = {}  # by operator


def _kind(func: Any) -> int:
    name = schema_of(func).name.removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded not in func.tags and name not in _UNTAGGED:
        return _PLAIN
    return _COMPOSITE if is_composite(func) else _DRAWS


def _all_plain(args: Sequence[Any]) -> bool:
    """Whether no argument is a tensor subclass, such as DTensor, with a first dimension that may be sharded."""
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in args if isinstance(x, Tensor))


def _bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> DrawCall:
    """One call of an operator, with its arguments by name."""
    declared = schema_of(func).arguments
    values = {a.name: a.default_value for a in declared}
    values |= dict(zip(values, args, strict=False))
    values |= kwargs
    name = schema_of(func).name.removeprefix("aten::")
    return DrawCall(func, tuple(args), kwargs, name, values, _shape(name, values))


_SHAPING = ("self", "mean", "std", "count", "prob", "input")  # the result has the broadcast shape of these arguments


def _shape(name: str, values: dict[str, Any]) -> tuple[int, ...]:
    if values.get("size") is not None:
        return tuple(int(s) for s in values["size"])
    if name == "randperm":
        return (int(values["n"]),)
    if name == "multinomial":
        return (*values["self"].shape[:-1], int(values["num_samples"]))
    tensors = [values[key] for key in _SHAPING if isinstance(values.get(key), Tensor)]
    return tuple(torch.broadcast_shapes(*(t.shape for t in tensors)))


# --- uniform bits, and the numbers made from them


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by, with x as an unsigned integer."""
    return torch.bitwise_right_shift(x, by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """The lowest 64 bits of an integer, as an int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _scramble(x: Tensor) -> Tensor:
    """splitmix64's finalizer, in place."""
    x.bitwise_xor_(_shifted(x, 30)).mul_(_FIRST)
    x.bitwise_xor_(_shifted(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shifted(x, 31))


def _numbers(streams: Tensor, length: int) -> Tensor:
    """The first `length` numbers of each stream, (..., length). streams: the streams' keys, (...)."""
    steps = torch.arange(1, length + 1, device=streams.device).mul_(_GOLDEN)
    return _scramble(streams.unsqueeze(-1) + steps)


Bits = Callable[[int], Tensor]
"""bits(n): 64 random bits for each element of a chunk, different for each n."""


def _fill(
    shape: tuple[int, ...],
    keys: Tensor,
    number: int,
    dtype: torch.dtype,
    sample: Callable[..., Tensor],
    params: Sequence[Tensor] = (),
) -> Tensor:
    """A tensor of `shape`, filled in chunks of rows by sample(bits, *rows of the params).

    keys: the examples' keys, (n,). number: the draw's number. params: tensors to broadcast to `shape`.
    """
    streams = _scramble(keys + _signed((number + 1) * _GOLDEN))
    full = shape if len(shape) > 1 else (*shape, 1)
    for length in full[1:-1]:
        streams = _numbers(streams, length)
    streams, width = streams.reshape(-1), full[-1]
    expanded = [p.expand(shape).reshape(-1, width) for p in params]
    out = torch.empty((streams.numel(), width), dtype=dtype, device=keys.device)
    height = max(1, _CHUNK // max(width, 1))
    for low in range(0, streams.numel(), height):
        chunk = streams[low : low + height]

        def bits(n: int, chunk: Tensor = chunk) -> Tensor:
            return _numbers(_scramble(chunk ^ _signed(n * _SECOND)) if n else chunk, width)

        out[low : low + height] = sample(bits, *(p[low : low + height] for p in expanded))
    return out.reshape(shape)


_MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform in [0, 1). Uses only the bits of the mantissa, so that no number is rounded to 1."""
    digits = _MANTISSA_BITS.get(dtype, 24)
    return _shifted(bits, 64 - digits).to(_wide(dtype)).mul_(2.0**-digits)


def _open_uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform in (0, 1)."""
    wide = _wide(dtype)
    digits = 52 if wide == torch.float64 else 23
    return _shifted(bits, 64 - digits).to(wide).mul_(2.0**-digits).add_(2.0 ** -(digits + 1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _normal(bits: Bits, dtype: torch.dtype) -> Tensor:
    radius = _open_uniform(bits(0), dtype).log_().mul_(-2).sqrt_()
    return radius * _open_uniform(bits(1), dtype).mul_(2 * math.pi).cos_()


def _integers(bits: Tensor, low: int, high: int) -> Tensor:
    """Uniform integers in [low, high)."""
    return _shifted(bits, 1).remainder_(high - low).add_(low)


# --- the operators


def draw_rows(call: DrawCall, keys: Tensor, number: int) -> Any:
    """The operator's result, with each row drawn from the stream of its example. keys: (n,) int64."""
    name = call.name.strip("_")
    if name == "native_dropout":
        sample, _ = _sample_bernoulli({"p": 1 - call.values["p"]}, torch.bool)
        return _apply_dropout(call, _fill(call.shape, keys, number, torch.bool, sample))
    if name == "multinomial":
        return _deliver(call, _multinomial(call, keys, number))
    sampler = _SAMPLERS.get(name)
    if sampler is None:
        return _row_by_row(call, number, keys)
    dtype = _dtype(call, name)
    if dtype.is_complex:
        shape = (*call.shape, 2)
        half = torch.float64 if dtype == torch.complex128 else torch.float32
        if name not in ("randn", "randn_like", "normal"):
            return _row_by_row(call, number, keys)
        pairs = _fill(shape, keys, number, half, lambda bits: _normal(bits, half).mul_(math.sqrt(0.5)))
        return _deliver(call, torch.view_as_complex(pairs).to(dtype))
    sample, params = sampler(call.values, dtype)
    return _deliver(call, _fill(call.shape, keys, number, dtype, sample, params))


def _dtype(call: DrawCall, name: str) -> torch.dtype:
    values = call.values
    if isinstance(values.get("dtype"), torch.dtype):  # the schema's default is a number
        return values["dtype"]
    for key in ("out", "self", "mean", "std"):
        if isinstance(values.get(key), Tensor):
            return values[key].dtype
    return torch.int64 if name == "randint" else torch.get_default_dtype()


def _deliver(call: DrawCall, drawn: Tensor) -> Tensor:
    """Return the numbers where the caller wants them: in place, in `out`, in pinned memory, or in a new tensor."""
    values = call.values
    if call.name.endswith("_"):
        return values["self"].copy_(drawn)
    if isinstance(values.get("out"), Tensor):
        return values["out"].resize_(drawn.shape).copy_(drawn)
    if values.get("pin_memory"):
        return drawn.pin_memory()
    return drawn


Sampler = tuple[Callable[..., Tensor], Sequence[Tensor]]
"""`sample` and `params` of `_fill`."""


def _sample_uniform(values: dict[str, Any], dtype: torch.dtype) -> Sampler:
    low, high = values.get("from", 0.0), values.get("to", 1.0)
    if (low, high) == (0.0, 1.0):
        return lambda bits: _uniform(bits(0), dtype), ()
    return lambda bits: _uniform(bits(0), dtype).mul_(high - low).add_(low), ()


def _sample_normal(values: dict[str, Any], dtype: torch.dtype) -> Sampler:
    mean, std = values.get("mean", 0.0), values.get("std", 1.0)
    params = [p for p in (mean, std) if isinstance(p, Tensor)]

    def sample(bits: Bits, *given: Tensor) -> Tensor:
        its = list(given)
        at = its.pop(0) if isinstance(mean, Tensor) else mean
        return _normal(bits, dtype) * (its.pop(0) if isinstance(std, Tensor) else std) + at

    return sample, params


def _sample_log_normal(values: dict[str, Any], dtype: torch.dtype) -> Sampler:
    return lambda bits: _normal(bits, dtype).mul_(values["std"]).add_(values["mean"]).exp_(), ()


def _sample_integers(values: dict[str, Any], dtype: torch.dtype) -> Sampler:
    low, high = values.get("low", values.get("from", 0)), values.get("high", values.get("to"))
    if high is None:
        digits = _MANTISSA_BITS.get(dtype)
        high = (1 << digits) + 1 if digits else 2 if dtype == torch.bool else torch.iinfo(dtype).max
    low, high = int(low), int(high)
    return lambda bits: _integers(bits(0), low, high), ()


def _sample_bernoulli(values: dict[str, Any], dtype: torch.dtype) -> Sampler:
    p = values.get("p")
    if p is None:
        p = values["self"]
    if isinstance(p, Tensor):
        return lambda bits, chance: _uniform(bits(0), chance.dtype) < chance, (p,)
    limit = min(max(int(p * 2.0**63), 0), (1 << 63) - 1)
    return lambda bits: _shifted(bits(0), 1) < limit, ()


def _sample_exponential(values: dict[str, Any], dtype: torch.dtype) -> Sampler:
    return lambda bits: _open_uniform(bits(0), dtype).log_().div_(-values["lambd"]), ()


def _sample_cauchy(values: dict[str, Any], dtype: torch.dtype) -> Sampler:
    median, sigma = values["median"], values["sigma"]
    return lambda bits: _open_uniform(bits(0), dtype).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median), ()


def _sample_geometric(values: dict[str, Any], dtype: torch.dtype) -> Sampler:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = math.log1p(-values["p"]) if values["p"] < 1 else -math.inf
    return lambda bits: _open_uniform(bits(0), wide).log_().div_(scale).ceil_().clamp_(min=1), ()


_SAMPLERS: dict[str, Callable[[dict[str, Any], torch.dtype], Sampler]] = {
    "rand": _sample_uniform,
    "rand_like": _sample_uniform,
    "uniform": _sample_uniform,
    "randn": lambda values, dtype: (lambda bits: _normal(bits, dtype), ()),
    "randn_like": lambda values, dtype: (lambda bits: _normal(bits, dtype), ()),
    "normal": _sample_normal,
    "log_normal": _sample_log_normal,
    "randint": _sample_integers,
    "randint_like": _sample_integers,
    "random": _sample_integers,
    "bernoulli": _sample_bernoulli,
    "exponential": _sample_exponential,
    "cauchy": _sample_cauchy,
    "geometric": _sample_geometric,
}


def _apply_dropout(call: DrawCall, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The results of native_dropout. kept: mask of the elements to keep."""
    x, p = call.values["input"], float(call.values["p"])
    if call.values["train"] is False or p == 0:
        return call.plain()
    return x * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


def _multinomial(call: DrawCall, keys: Tensor, number: int) -> Tensor:
    chances, replacement = call.values["self"], call.values["replacement"]
    wide = chances.to(_wide(chances.dtype))
    if replacement:
        sums = wide.cumsum(-1)
        u = _fill(call.shape, keys, number, wide.dtype, lambda bits: _open_uniform(bits(0), wide.dtype))
        found = torch.searchsorted(sums, u * sums[..., -1:], right=True)
        return found.clamp_(max=wide.shape[-1] - 1)

    def race(bits: Bits) -> Tensor:
        return _open_uniform(bits(0), wide.dtype).log_().neg_()

    return (wide / _fill(tuple(wide.shape), keys, number, wide.dtype, race)).topk(call.shape[-1], dim=-1).indices


def _row_by_row(call: DrawCall, number: int, keys: Tensor) -> Any:
    """Call an operator without a formula above (poisson, binomial, gamma) once per row, with a seed for each row."""
    count, made = len(keys), []
    for row, key in enumerate(keys.tolist()):

        def one_row(value: Any, row: int = row) -> Any:
            return value[row : row + 1] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value

        kwargs = {name: one_row(value) for name, value in call.kwargs.items()}
        made.append(call._replace(args=tuple(map(one_row, call.args)), kwargs=kwargs).plain(mix(key, number)))
    if call.name.endswith("_"):
        return call.values["self"]
    if isinstance(made[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*made, strict=True))
    return torch.cat(made)


@contextmanager
def _seeded(key: int, device: torch.device) -> Iterator[None]:
    """Seed torch's default generator of a device, and restore its state afterwards."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    else:
        generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(key)
    try:
        yield
    finally:
        generator.set_state(before)
