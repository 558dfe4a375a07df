"""The base class of `fit`'s callbacks: six events, and a context for evaluations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.fitting.fit_state import Fitting


class Callback:
    """Base class of callbacks. Override the events that you need. Each event is called on every process, in the order
    below. `fit` has run, model, optimizer, loader, epoch, loss, values, history and stop(): see `Fitting`.

    Call collective functions (run.save, run.mean, run.sum) on every process. To keep state over a restart, call
    `fit.run.track(name=self)` in on_start, and define state_dict and load_state_dict.
    """

    def on_start(self, fit: Fitting) -> None:
        """Everything is prepared. If there is a checkpoint, it is restored."""

    def on_epoch_start(self, fit: Fitting) -> None:
        """Epoch `fit.epoch` begins, or continues after a restart in mid-epoch."""

    def on_step(self, fit: Fitting) -> None:
        """An optimizer step was made. fit.loss: this process's last loss, a 0-dim tensor. float(fit.loss) waits for the
        device."""

    def on_evaluate(self, fit: Fitting) -> None:
        """`evaluate_on` was evaluated. fit.values holds the epoch's values so far."""

    def on_epoch_end(self, fit: Fitting) -> None:
        """The epoch's values are in fit.history, and the best model is written. The checkpoint is saved after this."""

    def on_end(self, fit: Fitting) -> None:
        """All epochs are done, or `fit` has stopped early."""

    def evaluating(self, fit: Fitting) -> AbstractContextManager[None]:
        """A context around the evaluation of `evaluate_on`, the on_evaluate events and the export of the best model.
        In this context, EMA and SWA put the averaged weights into the model."""
        return nullcontext()
