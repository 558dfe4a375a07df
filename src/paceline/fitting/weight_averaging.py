"""Averages of a model's weights over the steps (EMA) or the epochs (SWA) of a fit, by the functions of
torch.optim.swa_utils. Training goes on with the model's own weights; evaluations, the best model and, at the end, the
model itself have the average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from paceline.comm import collectives
from paceline.comm.dtensor import is_sharded, local, sharded_like, whole_on_main
from paceline.errors import CheckpointError, ModelError, SettingError
from paceline.fitting.callbacks import Callback

if TYPE_CHECKING:
    from paceline.fitting.fit_state import Fitting


class AveragedWeights:
    """The running average of a model's parameters; in float32 where they are of a lower precision. Buffers are the
    model's own. average: a function of swa_utils, (averages, current values, how many so far)."""

    def __init__(self, model: nn.Module, average: Callable[[Any, Any, Any], None]) -> None:
        self._parameters = dict(model.named_parameters())
        self._average = average
        self._means: dict[str, Tensor] = {}  # sharded as the parameters are
        self._whole: dict[str, Tensor] | None = None  # of sharded parameters, on rank 0, from before_save to `update`
        self.count = 0  # how many values the average has

    @torch.no_grad()
    def update(self) -> None:
        """Take the current weights into the average. The first ones are the average."""
        self._whole = None
        if not self.count:
            self._means = {name: _wide(p.detach()).clone() for name, p in self._parameters.items()}
        else:
            means = [local(self._means[name]) for name in self._parameters]
            current = [_wide(local(p.detach())) for p in self._parameters.values()]
            self._average(means, current, self.count)
        self.count += 1

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the average, within the context. Collective."""
        self._check_alike()
        before = {name: p.detach().clone() for name, p in self._parameters.items()}
        self.write(self._means)
        try:
            yield
        finally:
            self.write(before)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Put values, or the average, into the model."""
        values = self._means if values is None else values
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    def _check_alike(self) -> None:
        """Raises ModelError where each process has an average of its own."""
        if collectives.size_of() == 1 or any(is_sharded(mean) for mean in self._means.values()):
            return
        unlike = collectives.digest_mismatch(self._means.items())
        if unlike:
            raise ModelError(
                f"the averaged weights are not the same on all processes, as of {unlike[0]!r}: each trains weights of "
                "its own. EMA and SWA need a strategy under which all train one model, such as ddp or fsdp."
            )

    def before_save(self) -> None:
        """Gather what is sharded to rank 0. Collective."""
        if any(is_sharded(mean) for mean in self._means.values()):
            self._whole = {
                name: whole_on_main(mean) if is_sharded(mean) else mean for name, mean in self._means.items()
            }

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weights": dict(self._means if self._whole is None else self._whole)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        missing = self._parameters.keys() ^ state["weights"].keys()
        if self.count and missing:
            raise CheckpointError(f"the checkpoint's averaged weights are of another model: see {min(missing)!r}.")
        self._means = (
            {
                name: sharded_like(_wide(p.detach()), whole) if is_sharded(p) else whole.to(p.device, copy=True)
                for (name, p), whole in zip(
                    self._parameters.items(), (state["weights"][name] for name in self._parameters), strict=True
                )
            }
            if self.count
            else {}
        )


class _Averaging(Callback):
    """What EMA and SWA have in common: the average is in the checkpoints, and in the model at the end."""

    def __init__(self, average: Callable[[Any, Any, Any], None]) -> None:
        self._average = average  # as of AveragedWeights
        self._weights: AveragedWeights | None = None  # None before the fit has begun

    @property
    def weights(self) -> AveragedWeights:
        """The average. Only within a fit, and after it."""
        assert self._weights is not None
        return self._weights

    def on_start(self, fit: Fitting) -> None:
        self._weights = AveragedWeights(fit.model, self._average)
        fit.run.track(**{f"{fit.loader.name} {type(self).__name__}": self})

    def before_save(self) -> None:
        self.weights.before_save()

    def state_dict(self) -> dict[str, Any]:
        return self.weights.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights.load_state_dict(state)

    @contextmanager
    def evaluating(self, fit: Fitting) -> Iterator[None]:
        with self.weights.in_model() if self.weights.count else nullcontext():
            yield

    def on_end(self, fit: Fitting) -> None:
        if self.weights.count:
            self.weights.write()


class EMA(_Averaging):
    """The exponential moving average of the weights: after each optimizer step, average = decay x average + (1 - decay)
    x weights. It begins with the weights after the first step."""

    def __init__(self, decay: float = 0.999) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise SettingError(f"EMA(decay={decay!r}): how much of the average stays at each step: 0 or more, below 1.")
        super().__init__(get_ema_multi_avg_fn(decay))

    def on_step(self, fit: Fitting) -> None:
        self.weights.update()


class SWA(_Averaging):
    """Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights at the ends of the epochs from
    `start_epoch` on. The running statistics of batch norm are computed anew for the average, over the training data, in
    global batches, before each evaluation and at the end. The learning rate is the schedule's: see
    torch.optim.swa_utils.SWALR."""

    def __init__(self, start_epoch: int) -> None:
        if isinstance(start_epoch, bool) or not isinstance(start_epoch, int) or start_epoch < 0:
            raise SettingError(f"SWA(start_epoch={start_epoch!r}): the first epoch that counts, from 0, is needed.")
        super().__init__(get_swa_multi_avg_fn())
        self._start = start_epoch
        self._last = -1  # the last epoch that is in the average

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last = state["last"]
        super().load_state_dict(state)

    def _include(self, fit: Fitting) -> None:
        """Take the epoch into the average, once, when its data have been read."""
        if self._start <= fit.epoch != self._last and fit.loader.current is None:
            self._last = fit.epoch
            self.weights.update()

    @contextmanager
    def evaluating(self, fit: Fitting) -> Iterator[None]:
        self._include(fit)
        if not self.weights.count:
            yield
            return
        kept = {buffer: buffer.clone() for norm in _norms(fit.model) for buffer in norm.buffers()}
        with self.weights.in_model():
            update_batch_norm(fit)
            try:
                yield
            finally:
                for buffer, value in kept.items():
                    buffer.copy_(value)

    def on_epoch_end(self, fit: Fitting) -> None:
        self._include(fit)

    def on_end(self, fit: Fitting) -> None:
        super().on_end(fit)
        if self.weights.count:
            update_batch_norm(fit)


def update_batch_norm(fit: Fitting) -> None:
    """As torch.optim.swa_utils.update_bn: the running statistics become the means over the global batches of the
    training data, for the weights that the model has now. Collective; nothing where there is no batch norm."""
    norms = _norms(fit.model)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    modes = {module: module.training for module in fit.model.modules()}
    try:
        fit.model.train()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over the batches
        fit.forward_train_set()
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode


def _norms(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if getattr(m, "running_mean", None) is not None and hasattr(m, "momentum")]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
