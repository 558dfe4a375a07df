"""Averages of a model's weights over the steps (EMA) or the epochs (SWA) of a fit, with the functions of
torch.optim.swa_utils. Training continues with the model's current weights. Evaluations and the best model use the
average. At the end of the fit, the average replaces the model's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from paceline.errors import check_whole
from paceline.fitting.callbacks import Callback
from paceline.norm.normalisation import batch_norms
from paceline.run import parts_of
from paceline.state.averaged_weights import AveragedWeights, check_decay

if TYPE_CHECKING:
    from paceline.fitting.fit_state import Fitting


class _Averaging(Callback):
    """Base class of EMA and SWA: saves the average in checkpoints, and puts it into the model at the end."""

    def __init__(self, average: Callable[[Any, Any, Any], None]) -> None:
        self._average = average  # see AveragedWeights
        self._weights: AveragedWeights | None = None  # None before the fit begins

    @property
    def weights(self) -> AveragedWeights:
        """The average. Available during and after a fit."""
        assert self._weights is not None
        return self._weights

    def on_start(self, fit: Fitting) -> None:
        parts = parts_of(fit.run)
        self._weights = AveragedWeights(fit.model, parts.models.index(fit.model), parts.strategy, self._average)
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
    x weights. It starts with the weights after the first step."""

    def __init__(self, decay: float = 0.999) -> None:
        check_decay("EMA", decay)
        super().__init__(get_ema_multi_avg_fn(decay))

    def on_step(self, fit: Fitting) -> None:
        self.weights.update()


class SWA(_Averaging):
    """Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights at the ends of the epochs, starting
    with epoch `start_epoch`. For the average, the running statistics of batch norm are recomputed over the training
    data, in global batches, before each evaluation and at the end. SWA does not set the learning rate: pass a
    scheduler, such as torch.optim.swa_utils.SWALR."""

    def __init__(self, start_epoch: int) -> None:
        check_whole("SWA", "start_epoch", start_epoch, least=0)
        super().__init__(get_swa_multi_avg_fn())
        self._start = start_epoch
        self._last = -1  # the last epoch included in the average

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last = state["last"]
        super().load_state_dict(state)

    def _include(self, fit: Fitting) -> None:
        """Add the weights to the average, once per epoch, when the epoch's data have been read."""
        if self._start <= fit.epoch != self._last and fit.loader.current is None:
            self._last = fit.epoch
            self.weights.update()

    @contextmanager
    def evaluating(self, fit: Fitting) -> Iterator[None]:
        self._include(fit)
        if not self.weights.count:
            yield
            return
        # In this order: putting the average into the model also synchronizes the buffers of independent replicas.
        with self.weights.in_model(), _kept_buffers(batch_norms(fit.model)):
            update_batch_norm(fit)
            yield

    def on_epoch_end(self, fit: Fitting) -> None:
        self._include(fit)

    def on_end(self, fit: Fitting) -> None:
        super().on_end(fit)
        if self.weights.count:
            update_batch_norm(fit)


def update_batch_norm(fit: Fitting) -> None:
    """Recompute the running statistics of batch norm for the model's current weights, like
    torch.optim.swa_utils.update_bn: means over the global batches of the training data, or over the shards if batch
    norm is per shard. Batch norms in evaluation mode are frozen, and keep their statistics. Does nothing if no batch
    norm is in training mode. Collective.
    """
    norms = {norm: norm.momentum for norm in batch_norms(fit.model) if norm.training}
    if not norms:
        return
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over the batches
        with _kept_buffers(module for module in fit.model.modules() if module not in norms):
            fit.forward_train_set()
    finally:
        for norm, momentum in norms.items():
            norm.momentum = momentum
    parts_of(fit.run).normalisation.average_computed(norms)


@contextmanager
def _kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """After the block, restore the buffers of these modules and the buffers' values."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in kept:
            if not torch.equal(buffer, value):  # a buffer with elements that share memory cannot be written to
                buffer.copy_(value)
            setattr(module, name, buffer)
