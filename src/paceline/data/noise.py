"""noise="example": a model's random draws (dropout, a VAE's noise, diffusion time steps) belong to the examples.

As in a collate function (draws.py), each row is drawn from the stream of its example if the first dimension is the
number of examples. So the numbers do not depend on the number of processes or on micro_batch.

A TorchFunctionMode (about a microsecond of Python per call) intercepts torch's functions, and enters the mode of
draws.py around the functions that may draw. Draws are numbered in the order of the forward pass. A segment that is
recomputed in the backward pass (torch.utils.checkpoint) must draw the same numbers again. So each draw takes one
number, its token, from the generator that torch.utils.checkpoint restores. The token identifies the draw.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from paceline.config import Settings
from paceline.data.batch_plan import BatchPlan, Part, Request
from paceline.data.collating import Streams
from paceline.data.draws import DrawCall, ExampleDraws, RowKeys
from paceline.data.randomness import mix
from paceline.errors import SettingError, UsageError, warn
from paceline.torch_private.core import compiled_call, current_function_mode

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
"""Names of torch's functions that may draw."""

_LAYOUTS = {"multi_head_attention_forward": "folded"} | dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], "second")
"""The layout (see ExampleDraws) of draws in functions that do not have the examples in the first dimension."""

_CALL = 1 << 32  # draw numbers reserved for each closure of a micro-batch


class MicroBatchDraws:
    """The draws of one micro-batch.

    keys: the keys of its examples. step_key: the key of its global batch. is_whole: whether the micro-batch is the
    whole global batch.
    """

    def __init__(self, keys: RowKeys, step_key: int, is_whole: bool) -> None:
        self.keys, self.step_key, self.is_whole = keys, step_key, is_whole
        self.next = 0  # number of the next draw


class Noise:
    """Keys the random draws of a run's models by example. Create it on the script's thread. Other threads enter the
    mode at their first closure."""

    def __init__(self) -> None:
        self.unkeyed = 0  # number of draws that could not be keyed by example
        self._thread = _ThreadState()
        self._process = os.getpid()
        # The draw's token -> (micro-batch, number of the draw in it), for this yield and for the previous yield.
        self._drawn: dict[Any, tuple[MicroBatchDraws, int]] = {}
        self._drawn_before: dict[Any, tuple[MicroBatchDraws, int]] = {}
        self._micro_batches: dict[tuple[Any, ...], MicroBatchDraws] = {}  # of this yield, by (loader, shard, micro)
        self._latest: MicroBatchDraws | None = None
        self._warned: set[str] = set()
        self._modes: list[NoiseMode] = []  # the modes that the main thread entered
        self._enter_mode()

    def _enter_mode(self) -> None:
        if not self._thread.has_mode:
            self._thread.has_mode = True
            mode = NoiseMode(self)
            mode.__enter__()
            if threading.current_thread() is threading.main_thread():
                self._modes.append(mode)

    def close(self) -> None:
        """Exit the mode if it is the innermost one. Otherwise it stays on the stack and does nothing."""
        self._thread.micro_batch = None
        for mode in self._modes:
            if current_function_mode() is mode:
                mode.__exit__(None, None, None)
        self._modes.clear()

    # --- the current micro-batch

    def begin_yield(self, streams: Streams, request: Request, part: Part | None) -> None:
        """Start a yield of the loader. part: the yield's micro-batch; None if the yield has several."""
        self._drawn_before, self._drawn = self._drawn, {}
        self._micro_batches.clear()
        self._thread.micro_batch = None if part is None else self._draws_of(streams, request, part, 0)

    def end_yield(self) -> None:
        """Draw from torch's generators until the next yield."""
        self._thread.micro_batch = None

    @contextmanager
    def _computing(self, micro_batch: MicroBatchDraws | None) -> Iterator[None]:
        thread = self._thread
        before = thread.micro_batch, thread.suspended
        thread.micro_batch, thread.suspended = micro_batch, micro_batch is None
        try:
            yield
        finally:
            thread.micro_batch, thread.suspended = before

    def suspended(self) -> AbstractContextManager[None]:
        """Draw from torch's generators within the context, as in an evaluation or an update. Also in a backward."""
        return self._computing(None)

    def for_closure(self, streams: Streams, request: Request, part: Part, call: int) -> AbstractContextManager[None]:
        """A context for a closure that computes a micro-batch. call: number of the closure's backward call."""
        self._enter_mode()
        return self._computing(self._draws_of(streams, request, part, call))

    def _draws_of(self, streams: Streams, request: Request, part: Part, call: int) -> MicroBatchDraws:
        key = (streams.name, part.shard, part.micro)
        if key not in self._micro_batches:
            step_key = mix(streams.python_key(request), 1)
            is_whole = len(part.indices) == request.total
            self._micro_batches[key] = MicroBatchDraws(streams.noise_rows(request, part), step_key, is_whole)
        micro_batch = self._latest = self._micro_batches[key]
        if call:
            micro_batch.next = call * _CALL
        return micro_batch

    # --- draws

    def call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function that may draw."""
        micro_batch = self._thread.micro_batch
        if micro_batch is None and not self._thread.suspended and (_override.past or not self._thread.has_mode):
            micro_batch = self._latest  # in a backward: a repeated draw is found by its token
        # The mode is also active in a loader's forked workers: they draw from torch's generators.
        if micro_batch is None or os.getpid() != self._process:
            return func(*args, **kwargs)
        fused = name == "scaled_dot_product_attention" and (kwargs.get("dropout_p") or (len(args) > 4 and args[4]))
        with (
            self.drawing(micro_batch, _LAYOUTS.get(name, "rows")),
            sdpa_kernel(SDPBackend.MATH) if fused else nullcontext(),
        ):
            return func(*args, **kwargs)

    def drawing(self, micro_batch: MicroBatchDraws, layout: str) -> AbstractContextManager[Any]:
        """The mode for the draws of one function call."""
        return _Drawing(self, micro_batch, layout)

    def numbered(self, device: torch.device, micro_batch: MicroBatchDraws) -> tuple[MicroBatchDraws, int]:
        """(micro-batch, number in it) of the current draw, which may repeat an earlier one."""
        token = self._token(device)
        found = self._drawn.get(token) or self._drawn_before.get(token)
        if found is None:
            found = self._drawn[token] = (micro_batch, micro_batch.next)
            micro_batch.next += 1
        return found

    def _token(self, device: torch.device) -> Any:
        """The next number of the generator that torch.utils.checkpoint restores before it recomputes a segment."""
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
            offset = generator.get_offset()
            generator.set_offset(offset + 4)
            return device, generator.initial_seed(), offset
        return int(self._thread.slot.random_(generator=torch.default_generator))

    def warn(self, kind: str, what: str) -> None:
        """Warn once per kind of draw. Only draws of the kind "one" are keyed by example."""
        self.unkeyed += kind != "one"
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f'noise="example": {what}')


class _ThreadState(threading.local):
    has_mode = False  # has this thread entered a NoiseMode?
    suspended = False  # is this thread in `suspended`?
    micro_batch: MicroBatchDraws | None = None  # the micro-batch that this thread computes

    def __init__(self) -> None:
        self.slot = torch.empty((), dtype=torch.int64)  # tokens are drawn into it


class NoiseMode(TorchFunctionMode):
    """Intercepts the functions that may draw."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _DRAWING:
            return self._noise.call(func, name, args, kwargs or {})
        if func in _ENGINE or func is torch.autograd.backward:  # guards.py replaces backward while a run is open
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
"""Functions that start autograd's engine, and the functions to call instead.

A mode that is active when the engine starts is also active in the engine's calls, such as recomputed segments. But
torch turns a mode off inside a function that the mode intercepts. So NoiseMode enters itself again around these."""


class _Override(threading.local):
    past = False  # is this thread in _past_overrides?


_override = _Override()


@contextmanager
def _past_overrides() -> Iterator[None]:
    """Keep autograd's functions from checking whether active modes override them, within the context."""
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
    """The draws of one function call."""

    def __init__(self, noise: Noise, micro_batch: MicroBatchDraws, layout: str) -> None:
        super().__init__(micro_batch.keys, self._draw_other, layout=layout)
        self._noise, self._micro_batch = noise, micro_batch

    def number(self, call: DrawCall) -> int:
        self._micro_batch, number = self._noise.numbered(call.device, self._micro_batch)
        self.keys = self._micro_batch.keys
        return number

    def is_batch_level(self, call: DrawCall, number: int) -> bool:
        if any(isinstance(value, torch.nn.Parameter) for value in call.args):
            return True  # noise for the weights
        if len(self.keys) == 1 and call.shape == (1,) and not self._micro_batch.is_whole:
            self._noise.warn(
                "one",
                "a shard of one example drew one random number, which may be for that example or for the whole batch. "
                "Paceline keys it by the example. Draw choices for the whole batch without a dimension, "
                "torch.rand(()), or avoid shards with one example.",
            )
        return False

    def _draw_other(self, call: DrawCall, number: int) -> Any:
        if math.prod(call.shape) == 1:  # a choice for the whole batch
            return call.plain(mix(self._micro_batch.step_key, number))
        if math.prod(call.shape) and not any(isinstance(value, torch.nn.Parameter) for value in call.args):
            self._noise.warn(
                "shape",
                f"torch drew numbers of the shape {call.shape} (aten::{call.name}) while {len(self.keys)} examples "
                "were computed. The first dimension is not the examples, so these numbers are drawn by shard, and the "
                'model depends on the number of shards. Put the examples first, or keep noise="shard".',
            )
        return call.plain()


def make_noise(settings: Settings, plan: BatchPlan) -> Noise | None:
    """The run's Noise if noise="example"; else None. Raises SettingError if the strategy computes the model in
    stages."""
    if settings.noise != "example":
        return None
    if plan.whole_shards:
        raise SettingError(
            f"noise='example' does not work under the strategy {settings.strategy}: its stages compute parts of the "
            "model outside the closure, and each stage numbers its draws separately. Remove noise='example', or use "
            "another strategy."
        )
    return Noise()


def check_modules(models: Iterable[torch.nn.Module]) -> None:
    """Raises UsageError for modules compiled by torch.compile, because they draw in fused kernels."""
    for model in models:
        for name, module in model.named_modules():
            if compiled_call(module) is not None or type(module).__name__ == "OptimizedModule":
                raise UsageError(
                    f"noise='example': {name or 'the model'} ({type(module).__name__}) is compiled by torch.compile, "
                    "and its kernels draw random numbers that Paceline cannot key by example. Remove torch.compile, "
                    "or noise='example'."
                )
