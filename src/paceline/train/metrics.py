"""Numbers over all processes: exact under uneven and empty shards, and never a mean of means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.collectives import data_group
from paceline.errors import UsageError


def total(values: Any, device: torch.device) -> Any:
    """The sum over all processes. values: a number, a tensor (same shape everywhere), or a dict of these. A whole
    number stays whole where it is one on every process."""
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
    """Sum of numerators / sum of denominators over all processes, both added in float64. NaN where nothing counts."""
    return _ratios([(_wide(numerator), _wide(denominator))])[0]


def mean(values: Any, examples: Callable[[], int], device: torch.device) -> Any:
    """The mean over the examples of all processes.

    values: a tensor with an example in each row, of which each process may have another number, or none; or a number or
    0-dim tensor that is already the mean over this process's current batch; or a dict of these.
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
    """All processes' tensors or lists joined, or else a list of their objects."""
    if isinstance(values, Tensor):
        return collectives.gather_uneven(values, data_group())
    everyone = collectives.gather_objects(values, data_group())
    return [item for own in everyone for item in own] if isinstance(values, list) else everyone


def _pair(values: Any, examples: Callable[[], int]) -> tuple[Tensor, Tensor]:
    """(sum, count) of what `mean` takes."""
    if isinstance(values, Tensor) and values.dim() > 0:
        return _wide(values.detach().double().sum()), _wide(values.numel())
    if not isinstance(values, (Tensor, int, float)):
        raise UsageError(f"run.mean takes a number, a tensor, or a dict of these, not {type(values).__name__}.")
    count = _wide(getattr(values, "loss_count", None) if isinstance(values, Tensor) else None, examples)
    # a mean over nothing is NaN: leave it out
    return torch.where(count > 0, _wide(values) * count, 0.0), count


def _ratios(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    rows = collectives.all_reduce(torch.stack([torch.stack(pair) for pair in pairs]), group=data_group()).tolist()
    return [top / bottom if bottom else float("nan") for top, bottom in rows]


def _sum_numbers(values: Sequence[float]) -> list[Any]:
    """Numbers that may be whole on one process and not on another (0 and 0.5): whole ones travel in two halves, which
    float64 adds exactly."""
    rows = [
        (0.0, 0.0, float(value >> 32), float(value & 0xFFFFFFFF)) if isinstance(value, int) else (value, 1.0, 0.0, 0.0)
        for value in values
    ]
    summed = collectives.all_reduce(torch.tensor(rows, dtype=torch.float64), group=data_group()).tolist()
    whole = [(int(high) << 32) + int(low) for _, _, high, low in summed]
    return [part + own if fractions else own for (part, fractions, _, _), own in zip(summed, whole, strict=True)]


def _by_key(
    values: dict[Any, Any],
    alone: tuple[type, ...],
    single: Callable[[Any], Any],
    together: Callable[[list[Any]], list[Any]],
) -> dict[Any, Any]:
    """In the order of the names, whatever order each process has them in; in one go by
    `together`, or where there is one of the types `alone`, one by one."""
    names = sorted(values, key=str)
    everyone = collectives.gather_objects(names, data_group())
    if any(other != names for other in everyone):
        rows = "; ".join(f"rank {rank}: {', '.join(map(str, other))}" for rank, other in enumerate(everyone))
        raise UsageError(f"the processes give a dict with different names ({rows}). Give the same on all of them.")
    if not names:
        return {}
    if any(isinstance(value, alone) for value in values.values()):
        found = {name: single(values[name]) for name in names}
    else:
        found = dict(zip(names, together([values[name] for name in names]), strict=True))
    return {name: found[name] for name in values}


def _check_alike(tensor: Tensor) -> None:
    everyone = collectives.gather_objects((str(tensor.dtype), tuple(tensor.shape)), data_group())
    if any(other != everyone[0] for other in everyone):
        rows = "; ".join(f"rank {rank}: {dtype} of shape {shape}" for rank, (dtype, shape) in enumerate(everyone))
        raise UsageError(
            f"run.sum: the processes give different tensors ({rows}). run.gather takes different lengths; "
            "run.ratio(sum, count) adds up what was summed."
        )


def _wide(value: Any, otherwise: Callable[[], int] | None = None) -> Tensor:
    """A 0-dim float64 tensor on the CPU."""
    if value is None and otherwise is not None:
        value = otherwise()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64).reshape(())
    return torch.tensor(value, dtype=torch.float64)


# --- torchmetrics


def compute(metric: Any) -> Any:
    """The value of a torchmetrics Metric, MetricCollection or wrapper over all processes.

    Its own way (torchmetrics 1.9, `Metric._sync_dist`) ends the process or hangs where a metric that keeps its examples
    in a list, such as AUROC, has none on some process. Here the states of the processes that were updated are merged,
    by the metric's own reductions, and each process computes from the same whole.
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
    """Metrics with the states of all processes, for as long as the block lasts."""
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
    """One state of all processes that were updated; None where none was.

    A list that is to be joined along dimension 0 travels as one tensor, whatever its lengths. Everything else is small,
    or of shapes of its own, and travels as it is.
    """
    if not any(updated):
        return None
    if isinstance(state, list) and getattr(reduction, "__name__", "") == "dim_zero_cat":
        own = torch.cat([_row(item) for item in state]) if state else None
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


def _row(item: Tensor) -> Tensor:
    return item.unsqueeze(0) if item.dim() == 0 else item


def _on(state: Any, device: torch.device) -> Any:
    return [item.detach().to(device) for item in state] if isinstance(state, list) else state.detach().to(device)
