"""The state of a running fit, for callbacks and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.comm.mesh import world_group
from paceline.data.loader import Loader
from paceline.errors import SettingError
from paceline.fitting.fit_plan import Plan
from paceline.fitting.history import History
from paceline.metrics.metrics import Average, reduce_averages
from paceline.run import Run
from paceline.step.loss import parts_of


class Fitting:
    """The state of a running fit. Callbacks receive it.

    Attributes:
        run, model, optimizer, loader: the objects of the fit.
        epoch: number of the epoch, from 0.
        loss: this process's last loss, a detached 0-dim tensor.
        values: at the end of an epoch, the epoch's values; after an evaluation in mid-epoch, the evaluation's values.
        history: the values of all epochs.
        forward_train_set: computes the loss once over the training data of an epoch, in global batches, not shuffled,
            without gradients, in the model's current mode. It does not affect the training. Call it on all processes.
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
        self._recorded = 0  # number of epochs in the history at the start of the current epoch
        self._mean = Average(run.device)
        self._interval = plan.interval if isinstance(plan.interval, int) else None  # in steps of the run
        self._part: int | None = None  # the interval in steps of the epoch
        if isinstance(plan.interval, float):
            self._part = self._part_of_epoch(plan.interval)
        if plan.best is not None:
            plan.best.reset()

    def stop(self) -> None:
        """End the fit after this epoch. A call on a single process is enough."""
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
        """Reduce the mean loss so far over all processes, so that rank 0 can write it. Collective."""
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
        self._mean.shared = total, count, rest[0] if rest else 0.0  # missing in checkpoints of an earlier version
        if self.history.best_epoch is not None:
            self.history.best_path = self._plan.best_path
        if self._plan.best is not None and "best" in state:
            self._plan.best.load_state_dict(state["best"])

    # --- called by the loop

    def call(self, event: str) -> None:
        """Call the method `event` of each callback."""
        for callback in self._callbacks:
            getattr(callback, event)(self)

    def remaining(self) -> Iterator[int]:
        """Yield the remaining epochs, until the fit stops."""
        if self.history.stopped_early:
            return
        for epoch in self.run.epochs(self._plan.epochs):
            self.epoch, self._recorded = epoch, self.history.epochs
            if isinstance(self._plan.interval, float):
                self._part = self._part_of_epoch(self._plan.interval)  # again: the global batch may change
            yield epoch
            if self._stop or self.history.stopped_early or self._plan.dry:
                return

    def add_loss(self, loss: Tensor) -> None:
        """Add a batch's loss to the mean of the epoch."""
        self.loss = loss
        for part, count in parts_of(loss):
            self._mean.add_mean(part, self.loader.examples if count is None else count)

    def end_step(self) -> bool:
        """After an update: evaluate and save if due. Returns whether the fit stops early, in mid-epoch."""
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
        """Evaluate and record the epoch, keep the best model, advance a schedule per epoch, and save a checkpoint.
        All processes use rank 0's values."""
        plan = self._plan
        values = {"loss": self._mean_loss()}
        known = self.history.evaluated_at(self.run.steps, self.epoch)
        if self._evaluation is None or known is not None:
            self.values = world_group().broadcast({**values, **(known or {})})
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
        # Find out whether a process asked to stop. Then save a checkpoint of the whole epoch.
        self._stop = any(world_group().gather(self._stop))
        if plan.checkpoints is not None:
            self._save(self.values)

    def _mean_loss(self) -> float:
        """Return the epoch's mean loss over all examples (or over the loss's counts), on all processes. Starts a new
        mean."""
        (value,) = reduce_averages([self._mean])
        self._mean = Average(self.run.device)
        return value

    def _evaluate(self, values: dict[str, float]) -> None:
        """Evaluate, and record the scores. values: the values of the epoch that are already known."""
        with ExitStack() as contexts:
            for callback in self._callbacks:
                contexts.enter_context(callback.evaluating(self))
            self._evaluate_here(values)

    def _evaluate_here(self, values: dict[str, float]) -> None:
        assert self._evaluation is not None
        scores = self._evaluation()
        self.values = values | {f"val_{name}": value for name, value in scores.items()}
        self.call("on_evaluate")
        self.values = world_group().broadcast(self.values)
        evaluated = {name: value for name, value in self.values.items() if name != "loss"}
        self.history.add_evaluation(self.run.steps, self.epoch, evaluated)
        self.run.log(evaluated)  # without the loss, which every run logs automatically
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
        # A skipped update does not count as a step, so this step may have been evaluated already.
        return due and self.history.evaluated_at(steps, self.epoch) is None

    def _part_of_epoch(self, part: float) -> int:
        """The number of steps in this fraction of an epoch. Raises SettingError if the epoch's length is unknown."""
        try:
            return max(1, int(self.loader.steps * part))
        except TypeError as error:
            raise SettingError(
                f"fit(val_check_interval={part}): the length of an epoch is not known, since the data have no "
                "length. Pass a number of optimizer steps: val_check_interval=1000."
            ) from error

    def _save(self, values: Mapping[str, float]) -> None:
        """Write a checkpoint. values: the values that are known at this step."""
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
