"""The state of a fit while it runs: what callbacks are handed, and what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.comm import collectives
from paceline.data.loader import Loader
from paceline.errors import SettingError
from paceline.fitting.fit_plan import Plan
from paceline.fitting.history import History
from paceline.metrics.metrics import Average, reduce_averages
from paceline.run import Run
from paceline.step.loss import parts_of


class Fitting:
    """A fit while it runs; callbacks are handed it.

    Attributes:
        run, model, optimizer, loader: those of the fit.
        epoch: from 0.
        loss: this process's last loss, a detached 0-dim tensor.
        values: those of the epoch, once it is over; after an evaluation in mid-epoch, those of the evaluation.
        history: those of all epochs.
        forward_train_set: computes the loss of what an epoch trains on, once, not shuffled and in global batches, in
            the mode in which the model is, without gradients; training is not disturbed. All processes call it.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        plan: Plan,
        callbacks: Sequence[Any] = (),
        evaluation: Callable[[], dict[str, float]] | None = None,
        forward_train_set: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self.model, self.optimizer, self.loader = run, model, optimizer, loader
        self.history, self.epoch, self.values = History(), 0, dict[str, float]()
        self.loss = torch.zeros((), device=run.device)
        self._plan, self._callbacks, self._evaluation = plan, callbacks, evaluation
        self.forward_train_set = forward_train_set
        self._stop = False
        self._recorded = 0  # epochs in the history when the current one began
        self._mean = Average(run.device)
        self._interval = plan.interval if isinstance(plan.interval, int) else None  # in steps of the run
        self._part: int | None = None  # in steps of the epoch
        if isinstance(plan.interval, float):
            self._part = self._part_of_epoch(plan.interval)
        if plan.best is not None:
            plan.best.reset()

    def stop(self) -> None:
        """End the fit after this epoch. One process is enough."""
        self._stop = True

    # --- checkpoints

    def restore(self) -> None:
        """Restore the last checkpoint, if there is one."""
        name, plan = self.loader.name, self._plan
        self.run.track(**{f"{name} fit": self})
        if plan.per_epoch is not None:
            self.run.track(**{f"{name} schedule": plan.per_epoch})
        if plan.checkpoints is not None:
            self.run.restore(plan.checkpoints.directory, missing_ok=True)

    def before_save(self) -> None:
        """Share the mean loss so far: rank 0 writes it. Collective."""
        reduce_averages([self._mean])

    def state_dict(self) -> dict[str, Any]:
        best = self._plan.best
        return {
            "history": self.history.state_dict(),
            "loss": list(self._mean.shared),
            **({} if best is None else {"best": best.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        total, count, *rest = state["loss"]
        self._mean.shared = total, count, rest[0] if rest else 0.0  # none in checkpoints of an earlier version
        if self.history.best_epoch is not None:
            self.history.best_path = self._plan.best_path
        if self._plan.best is not None and "best" in state:
            self._plan.best.load_state_dict(state["best"])

    # --- the loop's own

    def call(self, event: str) -> None:
        """Tell the callbacks of an event."""
        for callback in self._callbacks:
            getattr(callback, event)(self)

    def remaining(self) -> Iterator[int]:
        """The epochs that are still to do."""
        if self.history.stopped_early:
            return
        for epoch in self.run.epochs(self._plan.epochs):
            self.epoch, self._recorded = epoch, self.history.epochs
            if isinstance(self._plan.interval, float):
                self._part = self._part_of_epoch(self._plan.interval)  # anew: the global batch may change
            yield epoch
            if self._stop or self.history.stopped_early or self._plan.dry:
                return

    def add_loss(self, loss: Tensor) -> None:
        """Add a batch's loss to the mean of the epoch."""
        self.loss = loss
        for part, count in parts_of(loss):
            self._mean.add_mean(part, self.loader.examples if count is None else count)

    def end_step(self) -> bool:
        """An update was made: what is due after it. Returns whether the fit stops early here, in mid-epoch."""
        self.call("on_step")
        if self._plan.interval is not None and self._is_due():
            self._evaluate({})
            if self.history.stopped_early:
                return True
        where = self._plan.checkpoints
        if where is not None and where.every is not None and self.run.steps % where.every == 0:
            self._save(self.history.evaluated_at(self.run.steps, self.epoch) or {})
        return False

    def end_epoch(self) -> None:
        """Evaluate and record the epoch, keep the best model, move a schedule; all processes by rank 0's numbers."""
        plan = self._plan
        values = {"loss": self._mean_loss()}
        known = self.history.evaluated_at(self.run.steps, self.epoch)
        if self._evaluation is None or known is not None:
            self.values = collectives.broadcast_object({**values, **(known or {})})
        else:
            self._evaluate(values)
        self.history.add(self.values)
        if plan.monitor == "loss":
            self._update_best()
        if isinstance(plan.per_epoch, ReduceLROnPlateau):
            plan.per_epoch.step(self.values[plan.monitor])
        elif plan.per_epoch is not None:
            plan.per_epoch.step()
        self.call("on_epoch_end")
        # Save a checkpoint of a whole epoch, and learn whether some process asked to stop.
        self._stop = any(collectives.gather_objects(self._stop))
        if plan.checkpoints is not None:
            self._save(self.values)

    def _mean_loss(self) -> float:
        """The mean loss over all examples (or what the loss counts) of the epoch, on all processes."""
        (value,) = reduce_averages([self._mean])
        self._mean = Average(self.run.device)
        return value

    def _evaluate(self, values: dict[str, float]) -> None:
        """Evaluate, and record the scores. values: those of the epoch that are known already."""
        with ExitStack() as contexts:
            for callback in self._callbacks:
                contexts.enter_context(callback.evaluating(self))
            self._evaluate_here(values)

    def _evaluate_here(self, values: dict[str, float]) -> None:
        assert self._evaluation is not None
        scores = self._evaluation()
        self.values = values | {f"val_{name}": value for name, value in scores.items()}
        self.call("on_evaluate")
        self.values = collectives.broadcast_object(self.values)
        evaluated = {name: value for name, value in self.values.items() if name != "loss"}
        self.history.add_evaluation(self.run.steps, self.epoch, evaluated)
        self.run.log(evaluated)  # the loss is what every run shows by itself
        if self._plan.monitor != "loss":
            self._update_best()

    def _update_best(self) -> None:
        best, path = self._plan.best, self._plan.best_path
        if best is None:
            return
        if best.record(self.values[self._plan.monitor]):
            history = self.history
            history.best_epoch, history.best_step, history.best_value = self._recorded, self.run.steps, best.value
            if path is not None:
                self.run.export(path, self.model)
                history.best_path = path
        self.history.stopped_early = best.stop

    def _is_due(self) -> bool:
        """Is an evaluation in mid-epoch due after this step?"""
        steps = self.run.steps
        if self._interval is not None:
            due = steps % self._interval == 0
        else:
            assert self._part is not None
            due = (self.loader.step + 1) % self._part == 0
        return due and self.history.evaluated_at(steps, self.epoch) is None  # a step that was left out does not count

    def _part_of_epoch(self, part: float) -> int:
        """Steps in this part of an epoch. Raises SettingError where the length of an epoch is not known."""
        try:
            return max(1, int(self.loader.steps * part))
        except TypeError as error:
            raise SettingError(
                f"fit(val_check_interval={part}): the length of an epoch is not known, since the data have none. Say "
                "after how many optimizer steps: val_check_interval=1000."
            ) from error

    def _save(self, values: Mapping[str, float]) -> None:
        """Write a checkpoint. values: those that are known at this step."""
        where, best = self._plan.checkpoints, self._plan.best
        assert where is not None
        self.run.save(
            where.directory,
            keep=where.keep,
            keep_best=where.keep_best or 0,
            score=values.get(self._plan.monitor),
            mode="min" if best is None else best.mode,
            background=where.background,
        )
