"""evaluate and predict: one pass over a whole data set, exact over uneven and empty shards."""

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
    """The loss and other means over a whole data set, each example counted once, the same on every process.

    Args:
        model, loss_fn: as for `run.forward_backward`: loss_fn(model, batch) returns a mean over the examples, a
            paceline.Total, or a tuple of these, which add. None: the model's own, model(**batch).loss (see `fit`).
            model may also be what `run.ema` returns.
        dataset: a data set, or a loader made by `run.loader(..., train=False)`.
        global_batch: how many examples are computed at once, over all devices. It changes the time, not the result.
        metrics: name -> function(outputs, batch), where outputs is what the model returned in loss_fn. It returns a
            tensor with an entry for each example (their mean is reported), a paceline.Total(sum, count) (their ratio),
            or a number that is the mean over the batch. Or a metric of torchmetrics with one number for its value, on
            the model's device: it is reset, and updated with (predictions, targets).
        target: where the targets of torchmetrics' metrics are: a name in a batch that is a dict, "labels" if not given;
            or a function of (outputs, batch) that returns (predictions, targets). Of other batches they are batch[1].
            The predictions are the output, or its "logits".
        run: else the run that is open, else a new one.
        loader_options: num_workers, collate_fn, micro_batch and so on, as of `run.loader`.

    The model is in evaluation mode meanwhile, without gradients; afterwards each of its modules is as it was. Returns
    {"loss": ..., and each metric's name: ...}; NaN where nothing was counted. Raises SettingError for arguments that
    cannot be, UsageError for a loss or metric that is none of the above.
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
    """One pass over an evaluation loader: the loss, and the metrics."""
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
                # A plain sum is reported per example: batches of another size would otherwise give other numbers.
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
                if loader.examples:  # some metrics cannot take an empty batch
                    metric.update(*predictions_and_target(name, target, capture.output(name), batch))
    values = reduce_averages([*losses, *means.values()])
    own = len(losses)
    found = dict(zip(means, values[own:], strict=True))
    found |= {name: float(run.compute(metric)) for name, metric in objects.items()}
    return {"loss": sum(values[:own]) if own else float("nan"), **{name: found[name] for name in metrics or {}}}


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
    """`run.predict` of the given run; else of the run that is open, else of a new one."""
    own: dict[str, Any] = {"fn": fn, "to": to, "resume": resume, "rows_per_file": rows_per_file, **loader_options}
    return open_run(run, model).predict(model, dataset, global_batch=global_batch, **own)


def open_run(run: Run | None, model: Any) -> Run:
    """The run to use: the given one, or the open one, or a new one, in which the model is then prepared."""
    run = run if run is not None else session.current()
    if run is None:
        run = session.start()
        run.prepare(model)
    return run


def evaluation_loader(run: Run, dataset: Any, global_batch: int | None, options: Mapping[str, Any]) -> Loader:
    """The loader for a data set, or the given evaluation loader. Raises SettingError for a training loader, and for
    options of a loader that exists."""
    if isinstance(dataset, Loader):
        if dataset.train:
            raise SettingError(
                f"evaluate: the loader {dataset.name!r} is one for training. Make one by run.loader(..., train=False)."
            )
        if "limit_batches" in options:
            raise SettingError(
                f"the loader {dataset.name!r} is to be cut short (by limit_batches, fit's limit_val_batches or "
                "fast_dev_run), and is there already. Give the data set in its place, or make the loader by "
                "run.loader(..., train=False, limit_batches=...)."
            )
        if options:
            raise SettingError(f"evaluate: {min(options)!r} belongs to the loader, which is there already.")
        return dataset
    return run.loader(dataset, global_batch=global_batch, train=False, **options)


def check_metrics(metrics: Any) -> None:
    """Raises SettingError."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping) or not all(isinstance(n, str) and callable(f) for n, f in metrics.items()):
        raise SettingError(
            "metrics: a dict of name -> function(outputs, batch) is needed, such as "
            '{"accuracy": lambda outputs, batch: outputs.argmax(1) == batch[1]}.'
        )
    if "loss" in metrics:
        raise SettingError('metrics: the name "loss" is that of loss_fn\'s result. Choose another one.')


def _is_object(metric: Any) -> bool:
    """Is it a torchmetrics metric, which keeps a state, and not a function of one batch?"""
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def _add(average: Average, name: str, value: Any, examples: int) -> None:
    """Add what a metric function returned for a batch. Raises UsageError."""
    if isinstance(value, Total):
        average.add_sum(value.sum, examples if value.count is None else value.count)
    elif isinstance(value, Tensor) and value.dim():
        average.add_sum(value.sum() if not value.is_floating_point() else value.double().sum(), value.numel())
    elif isinstance(value, (Tensor, int, float)):
        average.add_mean(value, examples)
    else:
        raise UsageError(
            f"the metric {name!r} returned a {type(value).__name__}. Return a tensor with an entry for each example, a "
            "paceline.Total(sum, count), or a number that is the mean over the batch."
        )


class _OutputCapture:
    """Stands for the model in loss_fn, and keeps its last output. (A model that is compiled already would not call a
    forward hook.)"""

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
        """The last output. Raises UsageError, for metric `name`, if loss_fn has not called the model."""
        if self._outputs is _NOTHING:
            raise UsageError(
                f"the metric {name!r} needs the model's outputs, but loss_fn did not call model(...) itself. "
                "Let it, or compute the metric in a loop over run.loader(dataset, train=False) with run.ratio."
            )
        return self._outputs
