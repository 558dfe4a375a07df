"""noise="example": what a model draws (dropout, a VAE's noise, a diffusion model's time steps) belongs to the examples.

As in collate (draws.py): where the first dimension is the number of examples, each row is drawn from the stream of its
example. So the numbers do not depend on how many processes there are, or on micro_batch.

A mode of torch's functions (about a microsecond for each call in Python) sees those that may draw, and puts the mode of
draws.py around these alone. Draws are numbered in the order of the forward. A segment that is recomputed in the
backward (torch.utils.checkpoint) must find its numbers again: each draw consumes one number of the generator that such
a segment restores, and that number, its token, identifies the draw.
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
"""The layout of draws in functions where the first dimension is not the examples (ExampleDraws)."""

_CALL = 1 << 32  # numbers of draws reserved for each closure of a micro-batch


class MicroBatchDraws:
    """The draws of one micro-batch.

    keys: of its examples. step_key: of its global batch. is_whole: whether it is the whole global batch.
    """

    def __init__(self, keys: RowKeys, step_key: int, is_whole: bool) -> None:
        self.keys, self.step_key, self.is_whole = keys, step_key, is_whole
        self.next = 0  # the number of the next draw


class Noise:
    """Keys the draws of a run's models. Made on the thread of the script. Another thread enters the mode with its first
    closure."""

    def __init__(self) -> None:
        self.unkeyed = 0  # draws that could not be keyed by the example
        self._thread = _ThreadState()
        self._process = os.getpid()
        # (the micro-batch, the number of the draw in it), by the draw's token: of this yield, and of the one before.
        self._drawn: dict[Any, tuple[MicroBatchDraws, int]] = {}
        self._drawn_before: dict[Any, tuple[MicroBatchDraws, int]] = {}
        self._micro_batches: dict[tuple[Any, ...], MicroBatchDraws] = {}  # of this yield, by (loader, shard, micro)
        self._latest: MicroBatchDraws | None = None
        self._warned: set[str] = set()
        self._modes: list[NoiseMode] = []  # of the script's thread
        self._enter_mode()

    def _enter_mode(self) -> None:
        if not self._thread.has_mode:
            self._thread.has_mode = True
            mode = NoiseMode(self)
            mode.__enter__()
            if threading.current_thread() is threading.main_thread():
                self._modes.append(mode)

    def close(self) -> None:
        """Exit the mode, where it is the innermost one. Elsewhere it stays and does nothing."""
        self._thread.micro_batch = None
        for mode in self._modes:
            if current_function_mode() is mode:
                mode.__exit__(None, None, None)
        self._modes.clear()

    # --- which micro-batch is computed

    def begin_yield(self, streams: Streams, request: Request, part: Part | None) -> None:
        """The script computes a yield from here on. part: its micro-batch; None where the yield has several."""
        self._drawn_before, self._drawn = self._drawn, {}
        self._micro_batches.clear()
        self._thread.micro_batch = None if part is None else self._draws_of(streams, request, part, 0)

    def end_yield(self) -> None:
        """From here on to the next yield, draws come from torch's generators."""
        self._thread.micro_batch = None

    @contextmanager
    def _computing(self, micro_batch: MicroBatchDraws | None) -> Iterator[None]:
        before, self._thread.micro_batch = self._thread.micro_batch, micro_batch
        try:
            yield
        finally:
            self._thread.micro_batch = before

    def suspended(self) -> AbstractContextManager[None]:
        """A context in which draws come from torch's generators, as in an evaluation or an update."""
        return self._computing(None)

    def for_closure(self, streams: Streams, request: Request, part: Part, call: int) -> AbstractContextManager[None]:
        """A context for a closure that computes a micro-batch. call: the number of its backward call."""
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
        if micro_batch is None and (_override.past or not self._thread.has_mode):
            micro_batch = self._latest  # in a backward, where a draw that is made again is found by its token
        # A worker of a data loader was forked with this mode.
        if micro_batch is None or os.getpid() != self._process:
            return func(*args, **kwargs)
        fused = name == "scaled_dot_product_attention" and (kwargs.get("dropout_p") or (len(args) > 4 and args[4]))
        drawing = _Drawing(self, micro_batch, _LAYOUTS.get(name, "rows"))
        with drawing, sdpa_kernel(SDPBackend.MATH) if fused else nullcontext():
            return func(*args, **kwargs)

    def numbered(self, device: torch.device, micro_batch: MicroBatchDraws) -> tuple[MicroBatchDraws, int]:
        """(the micro-batch, the number in it) of the draw that is made now, which may repeat an earlier one."""
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
        """Warn once of each kind of draw. All kinds but "one" cannot be keyed by the example."""
        self.unkeyed += kind != "one"
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f'noise="example": {what}')


class _ThreadState(threading.local):
    has_mode = False  # whether this thread has entered a NoiseMode
    micro_batch: MicroBatchDraws | None = None  # which this thread computes

    def __init__(self) -> None:
        self.slot = torch.empty((), dtype=torch.int64)  # where a token is drawn


class NoiseMode(TorchFunctionMode):
    """Sees the functions that may draw."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _DRAWING:
            return self._noise.call(func, name, args, kwargs or {})
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
"""Functions that start autograd's engine. A mode that is active when the engine starts is active in what the engine
calls, such as recomputed segments. But these functions are overridable: a mode that sees one is off inside it."""


class _Override(threading.local):
    past = False  # whether this thread is in _past_overrides


_override = _Override()


@contextmanager
def _past_overrides() -> Iterator[None]:
    """A context in which autograd's functions do not ask active modes whether they override them."""
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
    """The draws of one function."""

    def __init__(self, noise: Noise, micro_batch: MicroBatchDraws, layout: str) -> None:
        super().__init__(micro_batch.keys, self._draw_other, layout=layout)
        self._noise, self._micro_batch = noise, micro_batch

    def number(self, call: DrawCall) -> int:
        self._micro_batch, number = self._noise.numbered(call.device, self._micro_batch)
        self.keys = self._micro_batch.keys
        return number

    def is_batch_level(self, call: DrawCall, number: int) -> bool:
        if any(isinstance(value, torch.nn.Parameter) for value in call.args):
            return True  # noise of the weights
        if len(self.keys) == 1 and call.shape == (1,) and not self._micro_batch.is_whole:
            self._noise.warn(
                "one",
                "a shard of one example has drawn one number, and whether it is that example's own or a choice for the "
                "whole batch cannot be told; it is taken for the example's own. Draw choices for the whole batch "
                "without a dimension, torch.rand(()), or see that no shard has one example.",
            )
        return False

    def _draw_other(self, call: DrawCall, number: int) -> Any:
        if math.prod(call.shape) == 1:  # a choice for the whole batch
            return call.plain(mix(self._micro_batch.step_key, number))
        if math.prod(call.shape) and not any(isinstance(value, torch.nn.Parameter) for value in call.args):
            self._noise.warn(
                "shape",
                f"torch drew numbers of the shape {call.shape} (aten::{call.name}) while {len(self.keys)} examples "
                "were computed. Its first dimension is not the examples, so that these numbers are drawn by shard, and "
                'the model depends on how many there are. Let the examples come first, or keep noise="shard".',
            )
        return call.plain()


def make_noise(settings: Settings, plan: BatchPlan) -> Noise | None:
    """None without noise="example". Raises SettingError under a strategy that cuts the model within a closure."""
    if settings.noise != "example":
        return None
    if plan.whole_shards:
        raise SettingError(
            f"noise='example' does not work under the strategy {settings.strategy}: its stages compute parts of the "
            "model apart from the closure, and number their draws each for itself. Leave noise out, or take another "
            "strategy."
        )
    return Noise()


def check_modules(models: Iterable[torch.nn.Module]) -> None:
    """Raises UsageError for modules that torch.compile has compiled: they draw in kernels of their own."""
    for model in models:
        for name, module in model.named_modules():
            if compiled_call(module) is not None or type(module).__name__ == "OptimizedModule":
                raise UsageError(
                    f"noise='example': {name or 'the model'} ({type(module).__name__}) is compiled by torch.compile, "
                    "and draws in kernels of its own, which no example's stream reaches. Leave torch.compile out, or "
                    "noise='example'."
                )
