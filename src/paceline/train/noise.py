"""noise="example": what is drawn while a micro-batch is computed belongs to its examples, as in collate (draws.py).

Dropout, a VAE's noise, a diffusion model's time steps: where the first dimension is the number of examples, each row is
drawn from its example's stream, so that 1, 2 and 3 processes and any micro_batch have the same masks.

A mode of torch's functions, which costs about a microsecond for each call in Python, waits for those that may draw, and
puts the mode of draws.py around them alone. A draw is numbered in the order of the forward. A segment that is
recomputed in the backward (torch.utils.checkpoint) must find its numbers again: each draw takes one number of the
generator that such a segment puts back, and is known by it.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from paceline.config import Settings
from paceline.errors import SettingError, UsageError
from paceline.strategies.base import Strategy
from paceline.strategies.batch_plan import Part, Request
from paceline.torch_private.core import compiled_call, current_function_mode
from paceline.train.collating import Streams
from paceline.train.draws import Call, ExampleDraws, RowKeys
from paceline.train.randomness import mix

_DRAWING = frozenset(
    name
    for line in (
        "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson binomial",
        "uniform_ normal_ bernoulli_ random_ exponential_ cauchy_ log_normal_ geometric_ trunc_normal_",
        "_standard_gamma _sample_dirichlet gumbel_softmax rrelu rrelu_ rrelu_with_noise rrelu_with_noise_",
        "native_dropout dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_",
        "feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_",
        "multi_head_attention_forward scaled_dot_product_attention lstm gru rnn_tanh rnn_relu",
        "fractional_max_pool2d fractional_max_pool2d_with_indices",
        "fractional_max_pool3d fractional_max_pool3d_with_indices",
    )
    for name in line.split()
)
"""Functions of torch that draw, by name."""

_FOLDED = frozenset(["multi_head_attention_forward"])
"""Functions inside which the first dimension is (examples x heads), example by example."""

_SECOND = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
"""Functions inside which the second dimension is the examples."""

_CALL = 1 << 32  # numbers of draws that a further closure of a micro-batch has to itself


class Micro:
    """The draws of one micro-batch. keys: of its examples. step_key: of its global batch. alone: whether it is all of
    the global batch."""

    def __init__(self, keys: RowKeys, step_key: int, alone: bool) -> None:
        self.keys, self.step_key, self.alone = keys, step_key, alone
        self.next = 0


class Noise:
    """Of one run. Made on the thread of the script; other threads take part from their first closure on."""

    def __init__(self) -> None:
        self.undone = 0  # draws that could not be keyed by the example
        self._local = _Local()
        self._process = os.getpid()
        self._known: dict[Any, tuple[Micro, int]] = {}  # of this yield and the one before: each draw, by its token
        self._earlier: dict[Any, tuple[Micro, int]] = {}
        self._micros: dict[tuple[Any, ...], Micro] = {}
        self._latest: Micro | None = None
        self._warned: set[str] = set()
        self._modes: list[Functions] = []
        self._join()

    def _join(self) -> None:
        if not self._local.joined:
            self._local.joined = True
            mode = Functions(self)
            mode.__enter__()
            if threading.current_thread() is threading.main_thread():
                self._modes.append(mode)

    def close(self) -> None:
        """Takes the mode off again, where nothing lies over it; else it stays, and does nothing."""
        self._local.micro = None
        for mode in self._modes:
            if current_function_mode() is mode:
                mode.__exit__(None, None, None)
        self._modes.clear()

    # --- which micro-batch is computed

    def enter(self, streams: Streams, request: Request, part: Part | None) -> None:
        """A yield begins. part: the micro-batch that it holds; None where it holds several."""
        self._earlier, self._known = self._known, {}
        self._micros.clear()
        self._local.micro = None if part is None else self._micro(streams, request, part, 0)

    def leave(self) -> None:
        """Between two yields draws are the program's own."""
        self._local.micro = None

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is drawn inside is no noise of the micro-batch: an evaluation, an update."""
        before, self._local.micro = self._local.micro, None
        try:
            yield
        finally:
            self._local.micro = before

    @contextmanager
    def inside(self, streams: Streams, request: Request, part: Part, call: int) -> Iterator[None]:
        """A closure computes a micro-batch. call: the number of its backward call."""
        self._join()
        before, self._local.micro = self._local.micro, self._micro(streams, request, part, call)
        try:
            yield
        finally:
            self._local.micro = before

    def _micro(self, streams: Streams, request: Request, part: Part, call: int) -> Micro:
        key = (streams.name, part.shard, part.micro)
        if key not in self._micros:
            step_key = mix(streams.python_key(request), 1)
            alone = len(part.indices) == request.total
            self._micros[key] = Micro(streams.noise_rows(request, part), step_key, alone)
        micro = self._latest = self._micros[key]
        if call:
            micro.next = call * _CALL
        return micro

    # --- draws

    def draw(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function that may draw."""
        micro = self._local.micro
        if micro is None and (_override.past or not self._local.joined):
            micro = self._latest  # in a backward, where a draw that is made again is known by its token
        if micro is None or os.getpid() != self._process:  # a worker of a data loader was forked with this mode
            return func(*args, **kwargs)
        fused = name == "scaled_dot_product_attention" and (kwargs.get("dropout_p") or (len(args) > 4 and args[4]))
        drawing = _Drawing(self, micro, "folded" if name in _FOLDED else "second" if name in _SECOND else "rows")
        with drawing, sdpa_kernel(SDPBackend.MATH) if fused else nullcontext():
            return func(*args, **kwargs)

    def numbered(self, device: torch.device, micro: Micro) -> tuple[Micro, int]:
        """(the micro-batch; the number in it) of the draw that is made now: a new one, or one that is made again."""
        token = self._token(device)
        found = self._known.get(token) or self._earlier.get(token)
        if found is None:
            found = self._known[token] = (micro, micro.next)
            micro.next += 1
        return found

    def _token(self, device: torch.device) -> Any:
        """A number of the generator that torch.utils.checkpoint puts back before it computes a segment again."""
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
            offset = generator.get_offset()
            generator.set_offset(offset + 4)
            return device, generator.initial_seed(), offset
        return int(self._local.slot.random_(generator=torch.default_generator))

    def warn(self, kind: str, what: str) -> None:
        self.undone += kind != "one"
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f'noise="example": {what}', stacklevel=2)


class _Local(threading.local):
    joined = False
    micro: Micro | None = None

    def __init__(self) -> None:
        self.slot = torch.empty((), dtype=torch.int64)


class Functions(TorchFunctionMode):
    """Waits for functions that may draw."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _DRAWING:
            return self._noise.draw(func, name, args, kwargs or {})
        if func in _ENGINE or func is torch.autograd.backward:  # which guards.py replaces while a run is open
            with self, _past_overrides():
                return _ENGINE.get(func, _BACKWARD)(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def _tensor_backward(root: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    torch.autograd.backward(root, gradient, *args, **kwargs)


_BACKWARD: Callable[..., Any] = torch.autograd.backward
_ENGINE: dict[Any, Callable[..., Any]] = {
    _BACKWARD: _BACKWARD,
    torch.autograd.grad: torch.autograd.grad,
    Tensor.backward: _tensor_backward,
}
"""Functions that start autograd's engine. The modes that are active when it starts are active in what it calls, such as
segments that are computed again; but these functions are overridable, so that a mode sees them and is off inside."""


class _Override(threading.local):
    past = False


_override = _Override()


@contextmanager
def _past_overrides() -> Iterator[None]:
    """autograd's functions do not ask active modes whether they override them."""
    asking = torch.autograd.has_torch_function  # type: ignore[attr-defined]
    if not getattr(asking, "past_noise", False):

        def ask(arguments: Any) -> bool:
            return not _override.past and bool(asking(arguments))

        ask.past_noise = True  # type: ignore[attr-defined]
        torch.autograd.has_torch_function = ask  # type: ignore[attr-defined,assignment]
    before, _override.past = _override.past, True
    try:
        yield
    finally:
        _override.past = before


class _Drawing(ExampleDraws):
    """One function's draws."""

    def __init__(self, noise: Noise, micro: Micro, arranged: str) -> None:
        super().__init__(micro.keys, self._other, arranged=arranged)
        self._noise, self._micro = noise, micro

    def number(self, call: Call) -> int:
        self._micro, number = self._noise.numbered(call.device, self._micro)
        self.keys = self._micro.keys
        return number

    def is_whole(self, call: Call, number: int) -> bool:
        if any(isinstance(value, torch.nn.Parameter) for value in call.args):
            return True  # noise of the weights
        if len(self.keys) == 1 and call.shape == (1,) and not self._micro.alone:
            self._noise.warn(
                "one",
                "a shard of one example has drawn one number, and whether it is that example's own or a choice for the "
                "whole batch cannot be told; it is taken for the example's own. Draw choices for the whole batch "
                "without a dimension, torch.rand(()), or see that no shard has one example.",
            )
        return False

    def _other(self, call: Call, number: int) -> Any:
        if math.prod(call.shape) == 1:  # a choice for the whole batch
            return call.plain(mix(self._micro.step_key, number))
        if math.prod(call.shape) and not any(isinstance(value, torch.nn.Parameter) for value in call.args):
            self._noise.warn(
                "shape",
                f"torch drew numbers of the shape {call.shape} (aten::{call.name}) while {len(self.keys)} examples "
                "were computed. Its first dimension is not the examples, so that these numbers are drawn by shard, and "
                'the model depends on how many there are. Let the examples come first, or keep noise="shard".',
            )
        return call.plain()


def make_noise(settings: Settings, strategy: Strategy) -> Noise | None:
    """With noise="example". Raises SettingError under a strategy that cuts the model in the middle of a closure."""
    if settings.noise != "example":
        return None
    if strategy.plan.whole_shards:
        raise SettingError(
            f"noise='example' does not work under the strategy {settings.strategy}: its stages compute parts of the "
            "model apart from the closure, and number their draws each for itself. Leave noise out, or take another "
            "strategy."
        )
    return Noise()


def check_modules(models: Iterable[torch.nn.Module]) -> None:
    """Raises UsageError for what torch.compile has been given: it draws in kernels of its own."""
    for model in models:
        for name, module in model.named_modules():
            if compiled_call(module) is not None or type(module).__name__ == "OptimizedModule":
                raise UsageError(
                    f"noise='example': {name or 'the model'} ({type(module).__name__}) is compiled by torch.compile, "
                    "and draws in kernels of its own, which no example's stream reaches. Leave torch.compile out, or "
                    "noise='example'."
                )
