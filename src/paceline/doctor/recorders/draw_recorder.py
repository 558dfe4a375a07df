"""Random numbers of the training loop: tensors that the script draws for a batch, seeds, states of generators.

A tensor counts only if it has one row per example, and if the script draws it after reading a batch (without a loader,
after a step) and before the backward pass. Examples: noise, masks, timesteps of a diffusion model. Not counted:
permutations, single numbers, draws of a library's layers (dropout, stochastic depth), draws for a module's parameters
(weight noise is the same on all replicas), and draws of a loader.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Generator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch

from paceline.observe.digests import SOME, digest
from paceline.observe.event_log import EventLog
from paceline.torch_private.observed import direct_parameters, replace_factory

_FUNCTIONS = ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson",
              "multinomial")  # fmt: skip
_METHODS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
            "bernoulli", "multinomial")  # fmt: skip
_SEEDS = ((torch, "manual_seed", "torch's"), (random, "seed", "Python's"), (np.random, "seed", "NumPy's"))
_MAX_DRAWS, _MAX_PENDING = 1000, 16  # digested draws in a run; digested draws for one batch
_MAX_STATES, _MAX_SEEDS = 200, 200  # backward passes with recorded generator states; recorded calls that seed
_MAX_FRAMES = 28


class DrawRecorder:
    """The draws of this process since its last batch."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._pending: list[tuple[tuple[int, ...], list[Any]]] = []  # (shape, entry of "draws" in `take`)
        self._inside = False  # is a draw under way? One function of torch may call another
        self._states = 0
        self._of_weights = False  # has a module drawn numbers for its weights?
        self._begun: int | None = None  # torch's generators at the first forward since the last backward

    def clear(self) -> None:
        """Call it for a new batch or after a step."""
        self._pending.clear()

    def before_forward(self) -> None:
        """Call it before a forward in training mode."""
        if self._begun is None and self._states < _MAX_STATES:
            self._begun = _state()

    def take(self, rows: int | None) -> dict[str, Any]:
        """Return the fields of a "backward" event, and clear the draws.

        "draws": [line, digest, number of elements, seed of the generator object or None] of each tensor with `rows`
        rows. "masked": the state of torch's generators when the forward began, if they have advanced since, "draws" is
        empty and no module drew for its weights; otherwise None.
        """
        kept = [about for shape, about in self._pending if shape[0] == rows]
        self._pending.clear()
        of_weights, self._of_weights = self._of_weights, False
        begun, self._begun = self._begun, None
        moved = begun is not None and _state() != begun
        self._states += begun is not None
        return {"draws": kept, "masked": begun if moved and not kept and not of_weights else None}

    def around_draw(self, *_: Any, **options: Any) -> Generator[None, Any, None]:
        """Record a function that returns random numbers, or a method that fills a tensor with random numbers."""
        if self._inside:
            return
        self._inside = True
        try:
            result = yield
        finally:
            self._inside = False
        if len(self._pending) < _MAX_PENDING:
            self._keep(result, options.get("generator"))

    def _keep(self, tensor: Any, generator: Any) -> None:
        if type(tensor) is not torch.Tensor or not tensor.dim() or len(tensor) < 2 or tensor.device.type == "meta":
            return
        at = self._log.stack.caller()
        purpose = _purpose(tensor.shape) if at else ""
        self._of_weights = self._of_weights or purpose == "weights"
        if at and not purpose and not self._log.stack.called_by_library() and self._log.few("draws", _MAX_DRAWS):
            seed = generator.initial_seed() if isinstance(generator, torch.Generator) else None
            self._pending.append((tuple(tensor.shape), [at, digest(tensor, most=SOME), tensor.numel(), seed]))

    def before_seed(self, name: str, /, *args: Any, **options: Any) -> None:
        """Record a call that seeds a generator."""
        if self._log.few("seeds", _MAX_SEEDS):
            value = next(iter((*args, *options.values())), None)
            self._log.record("seed", generator=name, value=value if isinstance(value, int) else None)


def _purpose(shape: torch.Size) -> str:
    """The purpose of a draw. "weights": a module draws for its parameters (all sizes in the shape are sizes of its
    parameters). "examples": a module draws one number per example, as stochastic depth does. "": neither."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            own = {n for p in direct_parameters(owner) for n in p.shape}
            if set(shape) <= own:
                return "weights"
            if len(shape) > 1 and set(shape[1:]) == {1}:
                return "examples"
        frame = frame.f_back
    return ""


def _state() -> int:
    """A checksum of the states of torch's generators, on the CPU and on the current device."""
    states = [torch.get_rng_state()]
    generators = torch.cuda.default_generators  # empty until the device is used
    if generators:
        states.append(generators[torch.cuda.current_device()].get_state())
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))


def install(log: EventLog) -> None:
    recorder = log.shared.draws = DrawRecorder(log)
    for name in _FUNCTIONS:
        replace_factory(name, partial(log.patches.around, torch, name, recorder.around_draw))
    for name in _METHODS:
        log.patches.around(torch.Tensor, name, recorder.around_draw)
    for owner, name, generator in _SEEDS:
        log.patches.before(owner, name, partial(recorder.before_seed, generator))
