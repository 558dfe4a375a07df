"""Sums, means and metrics over all processes: exact with uneven and empty shards, and never a mean of means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.comm import gathering
from paceline.comm.mesh import data_group
from paceline.comm.scalars import upload, wide_dtype
from paceline.errors import UsageError
from paceline.metrics.weighted_sum import WeightedSum
from paceline.step.preparable import modules_of
from paceline.strategies.base import Weight

_CHANGED = "a loss or metric was changed in place after it was returned. Return a new tensor, or a clone."


def total(values: Any, device: torch.device) -> Any:
    """Return the sum over all processes of a number, a tensor, or a dict of these. Sums of integers are integers.

    A tensor must have the same shape and dtype on all processes.
    """
    if isinstance(values, dict):
        return _by_key(values, (Tensor, dict), lambda value: total(value, device), _sum_numbers)
    if isinstance(values, (bool, int, float)):
        return _sum_numbers([values])[0]
    if isinstance(values, Tensor):
        summed = values.detach().to(torch.int64) if values.dtype == torch.bool else values.detach().clone()
        _check_alike(summed)
        return data_group().all_reduce(summed)
    raise UsageError(f"run.sum takes a number, a tensor, or a dict of these, not {type(values).__name__}.")


def ratio(numerator: Any, denominator: Any, device: torch.device) -> float:
    """Return the sum of numerators / the sum of denominators over all processes, in float64; NaN if the latter is 0."""
    return _ratios([(_wide(numerator), _wide(denominator))])[0]


def mean(values: Any, examples: Callable[[], int], device: torch.device) -> Any:
    """Return the mean over the examples of all processes.

    Args:
        values: a tensor with one row per example, of any length on each process. Or a number or 0-dim tensor: the mean
            over this process's current batch. Or a dict of these.
        examples: returns the size of the current batch.
    """
    if isinstance(values, dict):
        return _by_key(
            values,
            (dict,),
            lambda value: mean(value, examples, device),
            lambda numbers: _ratios([_pair(value, examples) for value in numbers]),
        )
    return _ratios([_pair(values, examples)])[0]


def gather(values: Any) -> Any:
    """Return the joined tensors or lists of all processes. For other objects, return a list with one per process."""
    if isinstance(values, Tensor):
        return gathering.gather_uneven(values, data_group())
    everyone = data_group().gather(values, "run.gather(values)")
    return [item for part in everyone for item in part] if isinstance(values, list) else everyone


def _pair(values: Any, examples: Callable[[], int]) -> tuple[Tensor, Tensor]:
    """Return (sum, count) for an argument of `mean`."""
    if isinstance(values, Tensor) and values.dim() > 0:
        return _wide(values.detach().double().sum()), _wide(values.numel())
    if not isinstance(values, (Tensor, int, float)):
        raise UsageError(f"run.mean takes a number, a tensor, or a dict of these, not {type(values).__name__}.")
    count = _wide(getattr(values, "loss_count", None) if isinstance(values, Tensor) else None, examples)
    # A mean over nothing is NaN; leave it out.
    return torch.where(count > 0, _wide(values) * count, 0.0), count


def _ratios(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    rows = data_group().all_reduce(torch.stack([torch.stack(pair) for pair in pairs])).tolist()
    return [top / bottom if bottom else float("nan") for top, bottom in rows]


def _sum_numbers(values: Sequence[float]) -> list[Any]:
    """Return the sum over all processes of each number.

    A number may be an integer on one process and a float on another (0 and 0.5). An integer is sent as two halves,
    which float64 adds exactly.
    """
    rows = [
        (0.0, 0.0, float(value >> 32), float(value & 0xFFFFFFFF)) if isinstance(value, int) else (value, 1.0, 0.0, 0.0)
        for value in values
    ]
    summed = data_group().all_reduce(torch.tensor(rows, dtype=torch.float64)).tolist()
    whole = [(int(high) << 32) + int(low) for _, _, high, low in summed]
    return [
        part + number if fractions else number for (part, fractions, _, _), number in zip(summed, whole, strict=True)
    ]


def _by_key(
    values: dict[Any, Any],
    one_by_one: tuple[type, ...],
    reduce_one: Callable[[Any], Any],
    reduce_all: Callable[[list[Any]], list[Any]],
) -> dict[Any, Any]:
    """Reduce the values of a dict, sorted by name because processes may insert them in different orders.

    One call of `reduce_all` reduces all values. But if any value has a type in `one_by_one`, `reduce_one` is called for
    each value.
    """
    names = sorted(values, key=str)
    everyone = data_group().gather(names)
    if any(other != names for other in everyone):
        rows = "; ".join(f"rank {rank}: {', '.join(map(str, other))}" for rank, other in enumerate(everyone))
        raise UsageError(f"the processes pass dicts with different names ({rows}). Use the same names on all of them.")
    if not names:
        return {}
    if any(isinstance(value, one_by_one) for value in values.values()):
        found = {name: reduce_one(values[name]) for name in names}
    else:
        found = dict(zip(names, reduce_all([values[name] for name in names]), strict=True))
    return {name: found[name] for name in values}


def _check_alike(tensor: Tensor) -> None:
    everyone = data_group().gather((str(tensor.dtype), tuple(tensor.shape)))
    if any(other != everyone[0] for other in everyone):
        rows = "; ".join(f"rank {rank}: {dtype} of shape {shape}" for rank, (dtype, shape) in enumerate(everyone))
        raise UsageError(
            f"run.sum: the processes pass different tensors ({rows}). run.gather accepts different lengths; "
            "run.ratio(sum, count) adds values that each process has summed."
        )


def _wide(value: Any, default: Callable[[], int] | None = None) -> Tensor:
    """Return a 0-dim float64 tensor on the CPU. If the value is None, `default` returns the number to use."""
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
        self._local = WeightedSum(device, _CHANGED)  # this process's sums since the last reduce_averages
        # (sum, count, rest of the sum) of all processes, up to the last reduce_averages. Sum and rest are stored
        # separately: adding them at each reduction would round, and the mean would depend on the number of reductions.
        self.shared = (0.0, 0.0, 0.0)

    def add_mean(self, value: Any, count: Weight) -> None:
        """Add a mean over `count` items: a number or 0-dim tensor. A mean over no items (NaN) does not count."""
        self._local.add(value, count)

    def add_sum(self, value: Tensor, count: Weight) -> None:
        """Add a sum over `count` items."""
        self._local.add(value, count, summed=True)

    def drain(self) -> Tensor:
        """Return (sum, count, rest of the sum) of this process as a tensor (3,) on the device, and reset them to 0."""
        self._local.fold()
        triple = upload(torch.tensor(self._local.host, dtype=wide_dtype(self._device)), self._device)
        if self._local.device is not None:
            triple = triple + self._local.device
        self._local.clear()
        return triple


def reduce_averages(averages: Sequence[Average]) -> list[float]:
    """Return the values of averages over all processes, with one all-reduce. A value is NaN if nothing was counted.

    Collective: pass the averages in the same order on all processes.
    """
    if not averages:
        return []
    local = torch.stack([average.drain() for average in averages])
    added = data_group().all_reduce(local).tolist()
    for average, (top, count, rest) in zip(averages, added, strict=True):
        before = average.shared
        average.shared = before[0] + top, before[1] + count, before[2] + rest
    return [(top + rest) / count if count else float("nan") for top, count, rest in (one.shared for one in averages)]


@contextmanager
def evaluating(models: Any) -> Iterator[None]:
    """Put a model, or a tuple, list or dict of models, into evaluation mode, without gradients.

    Afterwards, each module returns to its previous mode.
    """
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
    """Return the value of a torchmetrics Metric, MetricCollection or wrapper over all processes.

    torchmetrics' synchronization (1.9, `Metric._sync_dist`) crashes or hangs if a metric that stores its examples in a
    list, such as AUROC, has no examples on some process. So Paceline merges the states itself, with the metric's
    reductions, from the processes that have updated the metric. Each process computes the value from the merged state.
    """
    if not callable(getattr(metric, "compute", None)) or not hasattr(metric, "modules"):
        raise UsageError(f"run.compute takes a torchmetrics metric, not {type(metric).__name__}.")
    if hasattr(metric, "items"):
        list(metric.items())  # in a collection, this copies shared state from the first metric of a group
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
            counts = data_group().gather(part._update_count)
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
    """Merge a state over the processes that have updated the metric. Return None if no process has any state.

    A list to join along dimension 0 is sent as one tensor, of any length. Any other state is small, or its tensors
    differ in shape, so it is sent as an object.
    """
    if not any(updated):
        return None
    if isinstance(state, list) and getattr(reduction, "__name__", "") == "dim_zero_cat":
        mine = torch.cat([torch.atleast_1d(item) for item in state]) if state else None
        form = data_group().gather(None if mine is None else (mine.shape[1:], mine.dtype))
        some = next((known for known in form if known is not None), None)
        if some is None:
            return None
        if mine is None:
            mine = torch.empty((0, *some[0]), dtype=some[1])
        return [gathering.gather_uneven(mine.detach(), data_group())]
    device = next((item.device for item in ([state] if isinstance(state, Tensor) else state)), torch.device("cpu"))
    everyone = data_group().gather(_on(state, torch.device("cpu")))
    kept = [_on(other, device) for other, counts in zip(everyone, updated, strict=True) if counts]
    if isinstance(state, list):
        joined = [item for other in kept for item in other]
        return joined if reduction is None else reduction(joined)
    return torch.stack(kept) if reduction is None else reduction(torch.stack(kept))


def _on(state: Any, device: torch.device) -> Any:
    return [item.detach().to(device) for item in state] if isinstance(state, list) else state.detach().to(device)
