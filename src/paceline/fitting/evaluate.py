"""evaluate and predict: one pass over a whole data set, exact even with uneven and empty shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline import session
from paceline.data.loader import Loader
from paceline.errors import SettingError, UsageError
from paceline.fitting.metric_target import Target, check_target, predictions_and_target
from paceline.fitting.model_loss import ModelLoss, used_columns
from paceline.metrics.metrics import Average, evaluating, reduce_averages
from paceline.run import Run
from paceline.state.averaged_weights import weights_of
from paceline.step.loss import Total, terms_of

LossFn = Callable[[Any, Any], Any]
Metrics = Mapping[str, Any]
_NOTHING = object()


def evaluate(
    model: Any,
    loss_fn: LossFn | None,
    dataset: Any,
    *,
    global_batch: int | None = None,
    metrics: Metrics | None = None,
    target: Target = None,
    run: Run | None = None,
    **loader_options: Any,
) -> dict[str, float]:
    """Returns the loss and metrics over a whole data set. Each example counts once. All processes get the same values.

    Args:
        model, loss_fn: as for `run.forward_backward`: loss_fn(model, batch) returns a mean over the examples, a
            paceline.Total, or a tuple of these, which are added. None: the loss that the model computes,
            model(**batch).loss (see `fit`). model may also be the result of `run.ema`.
        dataset: a data set, or a loader made by `run.loader(..., train=False)`.
        global_batch: examples computed at once, over all devices. It affects the speed, not the result.
        metrics: name -> function(outputs, batch), where outputs is the result of the model in loss_fn. The function
            returns a tensor with one entry per example (evaluate reports the mean of the entries), a
            paceline.Total(sum, count) (evaluate reports sum / count), or a number that is the mean over the batch. Or
            name -> a torchmetrics metric with a single number as its value, on the model's device. evaluate resets the
            metric, and updates it with (predictions, targets).
        target: the targets for torchmetrics. For batches that are dicts, a name in the batch (default "labels"). For
            any batches, a function of (outputs, batch) that returns (predictions, targets). By default, the targets in
            other batches are batch[1], and the predictions are the model's output, or its "logits".
        run: default: the open run, or a new one.
        loader_options: num_workers, collate_fn, micro_batch and so on, as in `run.loader`.

    The model runs in evaluation mode, without gradients. Afterwards each module returns to its previous mode. Returns
    {"loss": ..., and each metric's name: ...}. A value is NaN if nothing was counted. Raises SettingError for invalid
    arguments, and UsageError if a loss or metric has an unsupported type.
    """
    run = open_run(run, model)
    check_metrics(metrics)
    check_target(target)
    with run.calls.call("paceline.evaluate"), weights_of(model) as model:
        if loss_fn is None:
            loss_fn, dataset = ModelLoss(), used_columns(dataset, model)
        loader = evaluation_loader(run, dataset, global_batch, loader_options)
        return evaluate_pass(run, model, loss_fn, loader, metrics, target)


def evaluate_pass(
    run: Run, model: Any, loss_fn: LossFn, loader: Loader, metrics: Metrics | None, target: Target = None
) -> dict[str, float]:
    """Return the loss and the metrics of one pass over an evaluation loader."""
    capture = _OutputCapture(model) if metrics else None
    losses: list[Average] = []
    objects = {name: metric for name, metric in (metrics or {}).items() if _is_object(metric)}
    functions = {name: metric for name, metric in (metrics or {}).items() if name not in objects}
    means = {name: Average(run.device) for name in functions}
    for metric in objects.values():
        metric.reset()
    with evaluating(model):
        for batch in loader:
            with run.autocast():
                # Divide a sum without a count by the examples: otherwise the value would depend on the batch size.
                terms = terms_of(loss_fn(model if capture is None else capture, batch), loader.examples)
                losses = losses or [Average(run.device) for _ in terms]
                for average, term in zip(losses, terms, strict=True):
                    if term.count is None:
                        average.add_mean(term.value, loader.examples)
                    else:
                        average.add_sum(term.value, term.count)
            for name, function in functions.items():
                assert capture is not None
                _add(means[name], name, function(capture.output(name), batch), loader.examples)
            for name, metric in objects.items():
                assert capture is not None
                if loader.examples:  # some metrics do not accept an empty batch
                    metric.update(*predictions_and_target(name, target, capture.output(name), batch))
    values = reduce_averages([*losses, *means.values()])
    count = len(losses)
    found = dict(zip(means, values[count:], strict=True))
    found |= {name: float(run.compute(metric)) for name, metric in objects.items()}
    return {"loss": sum(values[:count]) if count else float("nan"), **{name: found[name] for name in metrics or {}}}


def predict(
    model: Any,
    dataset: Any,
    *,
    global_batch: int,
    fn: Callable[[Any, Any], Any] | None = None,
    to: str | Path | None = None,
    resume: bool = False,
    rows_per_file: int | None = None,
    run: Run | None = None,
    **loader_options: Any,
) -> Any:
    """Calls `run.predict`. run: default: the open run, or a new one."""
    options: dict[str, Any] = {"fn": fn, "to": to, "resume": resume, "rows_per_file": rows_per_file, **loader_options}
    return open_run(run, model).predict(model, dataset, global_batch=global_batch, **options)


def open_run(run: Run | None, model: Any) -> Run:
    """Return the given run, otherwise the open run, otherwise a new run with the model prepared."""
    run = run if run is not None else session.current()
    if run is None:
        run = session.start()
        run.prepare(model)
    return run


def evaluation_loader(run: Run, dataset: Any, global_batch: int | None, options: Mapping[str, Any]) -> Loader:
    """Return a loader for the data set, or the data set itself if it is an evaluation loader. Raises SettingError for a
    training loader, and for loader options with an existing loader."""
    if isinstance(dataset, Loader):
        if dataset.train:
            raise SettingError(
                f"evaluate: the loader {dataset.name!r} is for training. Create one with run.loader(..., train=False)."
            )
        if "limit_batches" in options:
            raise SettingError(
                f"the loader {dataset.name!r} should be limited (by limit_batches, fit's limit_val_batches or "
                "fast_dev_run), but it exists already. Pass the data set instead, or create the loader with "
                "run.loader(..., train=False, limit_batches=...)."
            )
        if options:
            raise SettingError(
                f"evaluate: {min(options)!r} is an argument of run.loader, but the loader exists already."
            )
        return dataset
    return run.loader(dataset, global_batch=global_batch, train=False, **options)


def check_metrics(metrics: Any) -> None:
    """Raises SettingError unless `metrics` is None or a dict of name -> callable, without the name "loss"."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping) or not all(isinstance(n, str) and callable(f) for n, f in metrics.items()):
        raise SettingError(
            "metrics: pass a dict of name -> function(outputs, batch), such as "
            '{"accuracy": lambda outputs, batch: outputs.argmax(1) == batch[1]}.'
        )
    if "loss" in metrics:
        raise SettingError('metrics: the name "loss" is taken by the result of loss_fn. Choose another name.')


def _is_object(metric: Any) -> bool:
    """Is the metric a torchmetrics metric, which has state, and not a function of one batch?"""
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def _add(average: Average, name: str, value: Any, examples: int) -> None:
    """Add the result of a metric function for a batch. Raises UsageError if the result has an unsupported type."""
    if isinstance(value, Total):
        average.add_sum(value.sum, examples if value.count is None else value.count)
    elif isinstance(value, Tensor) and value.dim():
        average.add_sum(value.sum() if not value.is_floating_point() else value.double().sum(), value.numel())
    elif isinstance(value, (Tensor, int, float)):
        average.add_mean(value, examples)
    else:
        raise UsageError(
            f"the metric {name!r} returned a {type(value).__name__}. Return a tensor with one entry per example, a "
            "paceline.Total(sum, count), or a number that is the mean over the batch."
        )


class _OutputCapture:
    """Replaces the model in loss_fn, and keeps the model's last output. (A forward hook would not work, because a
    compiled model does not call it.)"""

    def __init__(self, model: Any) -> None:
        self._model, self._outputs = model, _NOTHING

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._outputs = self._model(*args, **kwargs)
        return self._outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __getitem__(self, key: Any) -> Any:
        return self._model[key]

    def output(self, name: str) -> Any:
        """The model's last output. Raises UsageError if loss_fn has not called the model. name: the metric, for the
        error."""
        if self._outputs is _NOTHING:
            raise UsageError(
                f"the metric {name!r} needs the model's outputs, but loss_fn did not call model(...). "
                "Call it in loss_fn, or compute the metric in a loop over run.loader(dataset, train=False) with "
                "run.ratio."
            )
        return self._outputs
