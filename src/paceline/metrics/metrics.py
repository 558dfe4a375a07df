"""Numbers over all processes: exact with uneven and empty shards, and never a mean of means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.collectives import data_group
from paceline.comm.scalars import upload, wide_dtype
from paceline.errors import UsageError
from paceline.metrics.weighted_sum import WeightedSum
from paceline.step.preparable import modules_of
from paceline.strategies.base import Weight

_CHANGED = "a loss or metric was changed in place after it was returned. Return a new tensor, or a clone."


def total(values: Any, device: torch.device) -> Any:
    """The sum over all processes of a number, a tensor (of one shape everywhere), or a dict of these. The sum of whole
    numbers is a whole number."""
    if isinstance(values, dict):
        return _by_key(values, (Tensor, dict), lambda value: total(value, device), _sum_numbers)
    if isinstance(values, (bool, int, float)):
        return _sum_numbers([values])[0]
    if isinstance(values, Tensor):
        summed = values.detach().to(torch.int64) if values.dtype == torch.bool else values.detach().clone()
        _check_alike(summed)
        return collectives.all_reduce(summed, group=data_group())
    raise UsageError(f"run.sum takes a number, a tensor, or a dict of these, not {type(values).__name__}.")


def ratio(numerator: Any, denominator: Any, device: torch.device) -> float:
    """Sum of numerators / sum of denominators over all processes, in float64. NaN where the denominators sum to 0."""
    return _ratios([(_wide(numerator), _wide(denominator))])[0]


def mean(values: Any, examples: Callable[[], int], device: torch.device) -> Any:
    """The mean over the examples of all processes.

    values: a tensor with an example in each row, any number of them on each process; or a number or 0-dim tensor that
    is the mean over this process's current batch; or a dict of these. examples: returns the size of that batch.
    """
    if isinstance(values, dict):
        return _by_key(
            values,
            (dict,),
            lambda value: mean(value, examples, device),
            lambda own: _ratios([_pair(value, examples) for value in own]),
        )
    return _ratios([_pair(values, examples)])[0]


def gather(values: Any) -> Any:
    """The tensors or lists of all processes, joined; of other objects a list with one of each process."""
    if isinstance(values, Tensor):
        return collectives.gather_uneven(values, data_group())
    everyone = collectives.gather_objects(values, data_group(), "run.gather(values)")
    return [item for own in everyone for item in own] if isinstance(values, list) else everyone


def _pair(values: Any, examples: Callable[[], int]) -> tuple[Tensor, Tensor]:
    """(sum, count) of a value that `mean` takes."""
    if isinstance(values, Tensor) and values.dim() > 0:
        return _wide(values.detach().double().sum()), _wide(values.numel())
    if not isinstance(values, (Tensor, int, float)):
        raise UsageError(f"run.mean takes a number, a tensor, or a dict of these, not {type(values).__name__}.")
    count = _wide(getattr(values, "loss_count", None) if isinstance(values, Tensor) else None, examples)
    # A mean over nothing is NaN, and left out.
    return torch.where(count > 0, _wide(values) * count, 0.0), count


def _ratios(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    rows = collectives.all_reduce(torch.stack([torch.stack(pair) for pair in pairs]), group=data_group()).tolist()
    return [top / bottom if bottom else float("nan") for top, bottom in rows]


def _sum_numbers(values: Sequence[float]) -> list[Any]:
    """Sums of numbers, each of which may be whole on one process and not on another (0 and 0.5). A whole number is sent
    as two halves, which float64 adds exactly."""
    rows = [
        (0.0, 0.0, float(value >> 32), float(value & 0xFFFFFFFF)) if isinstance(value, int) else (value, 1.0, 0.0, 0.0)
        for value in values
    ]
    summed = collectives.all_reduce(torch.tensor(rows, dtype=torch.float64), group=data_group()).tolist()
    whole = [(int(high) << 32) + int(low) for _, _, high, low in summed]
    return [part + own if fractions else own for (part, fractions, _, _), own in zip(summed, whole, strict=True)]


def _by_key(
    values: dict[Any, Any],
    one_by_one: tuple[type, ...],
    reduce_one: Callable[[Any], Any],
    reduce_all: Callable[[list[Any]], list[Any]],
) -> dict[Any, Any]:
    """The values of a dict, reduced in the order of their names, whatever order each process has them in: by one call
    of `reduce_all`, or each by `reduce_one` where some value is of a type in `one_by_one`."""
    names = sorted(values, key=str)
    everyone = collectives.gather_objects(names, data_group())
    if any(other != names for other in everyone):
        rows = "; ".join(f"rank {rank}: {', '.join(map(str, other))}" for rank, other in enumerate(everyone))
        raise UsageError(f"the processes give a dict with different names ({rows}). Give the same on all of them.")
    if not names:
        return {}
    if any(isinstance(value, one_by_one) for value in values.values()):
        found = {name: reduce_one(values[name]) for name in names}
    else:
        found = dict(zip(names, reduce_all([values[name] for name in names]), strict=True))
    return {name: found[name] for name in values}


def _check_alike(tensor: Tensor) -> None:
    everyone = collectives.gather_objects((str(tensor.dtype), tuple(tensor.shape)), data_group())
    if any(other != everyone[0] for other in everyone):
        rows = "; ".join(f"rank {rank}: {dtype} of shape {shape}" for rank, (dtype, shape) in enumerate(everyone))
        raise UsageError(
            f"run.sum: the processes give different tensors ({rows}). run.gather takes different lengths; "
            "run.ratio(sum, count) adds up what was summed."
        )


def _wide(value: Any, default: Callable[[], int] | None = None) -> Tensor:
    """A 0-dim float64 tensor on the CPU. default: gives the number in place of None."""
    if value is None and default is not None:
        value = default()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64).reshape(())
    return torch.tensor(value, dtype=torch.float64)


# --- means over many batches


class Average:
    """A mean over many batches and all processes. Adding a batch does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._local = WeightedSum(device, _CHANGED)  # of this process, since the last reduce_averages
        # (sum, count, rest of the sum) of all processes, until the last reduce_averages. Sum and rest stay apart: added
        # at each of these, they would be rounded, and the mean would tell how often that was.
        self.shared = (0.0, 0.0, 0.0)

    def add_mean(self, value: Any, count: Weight) -> None:
        """Add a mean over `count` things: a number or 0-dim tensor. The mean over no things (NaN) does not count."""
        self._local.add(value, count)

    def add_sum(self, value: Tensor, count: Weight) -> None:
        """Add a sum over `count` things."""
        self._local.add(value, count, summed=True)

    def drain(self) -> Tensor:
        """(sum, count, rest of the sum) of this process, float64, on the device. They are then 0."""
        self._local.fold()
        triple = upload(torch.tensor(self._local.host, dtype=wide_dtype(self._device)), self._device)
        if self._local.device is not None:
            triple = triple + self._local.device
        self._local.clear()
        return triple


def reduce_averages(averages: Sequence[Average]) -> list[float]:
    """The values of averages over all processes, by one all-reduce. NaN where nothing was counted. Collective: with
    the averages in the same order."""
    if not averages:
        return []
    local = torch.stack([average.drain() for average in averages])
    added = collectives.all_reduce(local, group=data_group()).tolist()
    for average, (top, count, rest) in zip(averages, added, strict=True):
        before = average.shared
        average.shared = before[0] + top, before[1] + count, before[2] + rest
    return [(top + rest) / count if count else float("nan") for top, count, rest in (one.shared for one in averages)]


@contextmanager
def evaluating(models: Any) -> Iterator[None]:
    """Put models (one, or a tuple, list or dict of them) into evaluation mode, without gradients. Afterwards each
    module's own mode is put back."""
    modes = [(module, module.training) for model in modules_of(models) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


# --- torchmetrics


def compute(metric: Any) -> Any:
    """The value of a torchmetrics Metric, MetricCollection or wrapper over all processes.

    torchmetrics' own synchronization (1.9, `Metric._sync_dist`) ends the process or hangs where a metric that keeps its
    examples in a list, such as AUROC, has none on some process. Here the states of the processes that were updated are
    merged by the metric's own reductions, and each process computes the value from the merged state.
    """
    if not callable(getattr(metric, "compute", None)) or not hasattr(metric, "modules"):
        raise UsageError(f"run.compute takes a metric of torchmetrics, not {type(metric).__name__}.")
    if hasattr(metric, "items"):
        list(metric.items())  # a collection: metrics that share states take them from the first of their group
    parts = [part for part in metric.modules() if hasattr(part, "_reductions") and hasattr(part, "_defaults")]
    with _merged(parts):
        return metric.compute()


@contextmanager
def _merged(parts: list[Any]) -> Iterator[None]:
    """Give metrics the merged states of all processes, within the context."""
    before = [
        {name: getattr(part, name) for name in [*part._defaults, "_to_sync", "_computed", "_update_count"]}
        for part in parts
    ]
    try:
        for part in parts:
            counts = collectives.gather_objects(part._update_count, data_group())
            for name, reduction in part._reductions.items():
                merged = _merge(getattr(part, name), reduction, [count > 0 for count in counts])
                if merged is not None:
                    setattr(part, name, merged)
            part._to_sync, part._computed, part._update_count = False, None, sum(counts)
        yield
    finally:
        for part, values in zip(parts, before, strict=True):
            for name, value in values.items():
                setattr(part, name, value)


def _merge(state: Any, reduction: Any, updated: list[bool]) -> Any:
    """One state, merged over the processes that were updated. None where none was.

    A list to be joined along dimension 0 is sent as one tensor, of any length. Any other state is small, or its tensors
    differ in shape, and it is sent as an object.
    """
    if not any(updated):
        return None
    if isinstance(state, list) and getattr(reduction, "__name__", "") == "dim_zero_cat":
        own = torch.cat([torch.atleast_1d(item) for item in state]) if state else None
        form = collectives.gather_objects(None if own is None else (own.shape[1:], own.dtype), data_group())
        some = next((known for known in form if known is not None), None)
        if some is None:
            return None
        if own is None:
            own = torch.empty((0, *some[0]), dtype=some[1])
        return [collectives.gather_uneven(own.detach(), data_group())]
    device = next((item.device for item in ([state] if isinstance(state, Tensor) else state)), torch.device("cpu"))
    everyone = collectives.gather_objects(_on(state, torch.device("cpu")), data_group())
    kept = [_on(other, device) for other, counts in zip(everyone, updated, strict=True) if counts]
    if isinstance(state, list):
        joined = [item for other in kept for item in other]
        return joined if reduction is None else reduction(joined)
    return torch.stack(kept) if reduction is None else reduction(torch.stack(kept))


def _on(state: Any, device: torch.device) -> Any:
    return [item.detach().to(device) for item in state] if isinstance(state, list) else state.detach().to(device)
