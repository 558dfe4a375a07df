"""Callbacks of `fit`: six events, and a context around evaluations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.fitting.fit_state import Fitting


class Callback:
    """Override what you need. Each event comes on every process, in this order, with the `Fitting`: its run, model,
    optimizer, loader, epoch, loss, values, history, and stop().

    Whatever communicates (run.save, run.mean, run.sum) must be called on every process. State that is to survive a
    restart: `fit.run.track(name=self)` in on_start, with state_dict and load_state_dict.
    """

    def on_start(self, fit: Fitting) -> None:
        """Everything is prepared, and restored where there was a checkpoint."""

    def on_epoch_start(self, fit: Fitting) -> None:
        """Epoch `fit.epoch` begins; also when a restored run continues in the middle of it."""

    def on_step(self, fit: Fitting) -> None:
        """An optimizer step was made. fit.loss: this process's last loss, a 0-dim tensor; float(fit.loss) waits for the
        device."""

    def on_evaluate(self, fit: Fitting) -> None:
        """`evaluate_on` was evaluated; fit.values holds the epoch's values so far."""

    def on_epoch_end(self, fit: Fitting) -> None:
        """The epoch's values are in fit.history, the best model is written; the checkpoint comes after this."""

    def on_end(self, fit: Fitting) -> None:
        """All epochs are over, or `fit` stopped early."""

    def evaluating(self, fit: Fitting) -> AbstractContextManager[None]:
        """A context in which `evaluate_on` is evaluated, on_evaluate is told and the best model is written. EMA and SWA
        put the averaged weights into the model there."""
        return nullcontext()
