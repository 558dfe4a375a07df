"""The step of an optimizer that evaluates the loss itself, through the script's closure.

LBFGS calls the closure several times per step, each time with different weights, and chooses the step length from the
loss and the gradient. Each evaluation computes the whole global batch: `run.backward` in the closure leaves the exact
mean gradient in `.grad`. The optimizer receives the mean loss over all processes, with the same bits on each, so all
processes choose the same step. This loss is computed from the losses of the evaluation's backward calls. The closure's
result is not used, since it is the loss of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.scalars import scalar, wide_dtype
from paceline.data.loader import Loader
from paceline.errors import UsageError
from paceline.step.loss import LossRecord
from paceline.step.messages import outside_a_loop, without_backward
from paceline.step.step import Stepper
from paceline.strategies.kit.named_parameters import check_known


def step_by_closure(
    stepper: Stepper,
    optimizer: torch.optim.Optimizer | None,
    schedulers: Sequence[Any],
    closure: Callable[[], object],
) -> None:
    """Make one update of an optimizer with this closure. Raises UsageError if the update would not be exact."""
    optimizer = stepper.updates.prepared(optimizer)
    _check_exact(optimizer, stepper)
    check_known(optimizer, stepper.updates.names)
    if not stepper.ownership.latest():
        raise UsageError(outside_a_loop("step"))
    _check_whole(optimizer, [one.loader for one in stepper.ownership.latest()])
    watched, recorded = stepper.losses, False

    def evaluate() -> Tensor:
        nonlocal recorded
        stepper.restart_global_batch()
        stepper.losses = []
        closure()
        made, stepper.losses = stepper.losses, watched
        if not made:
            raise UsageError(without_backward([p for group in optimizer.param_groups for p in group["params"]]))
        if watched is not None and not recorded:  # report the loss of the first evaluation, before any update
            watched.extend(made)
        recorded = True
        stepper.updates.check_evaluation(optimizer)
        return _mean_loss(made, stepper.device, stepper.strategy.mesh.gradient)

    try:
        made = stepper.guards.allow(stepper.strategy.step_by_closure, optimizer, evaluate)
    finally:
        stepper.losses = watched
    if not made:
        raise UsageError(
            f"run.step({type(optimizer).__name__}, closure): the optimizer evaluates the closure several times per "
            "step, each time with different weights. This is exact only under the strategies single and ddp, without "
            "reproducible and shards. Use --strategy ddp, or an optimizer that needs one gradient per step, such as "
            "AdamW."
        )
    stepper.updates.finish_closure_update(optimizer, schedulers)


def _check_exact(optimizer: torch.optim.Optimizer, stepper: Stepper) -> None:
    name, fp16 = type(optimizer).__name__, stepper.precision.scaler is not None
    if fp16 or stepper.updates.skip:
        raise UsageError(
            f"run.step({name}, closure): {'precision=fp16' if fp16 else 'nonfinite=skip'} skips updates with a "
            f"gradient that is not finite, but {name} cannot skip an update that has begun. Use precision='bf16' or "
            "'fp32', and nonfinite='stop'."
        )


def _check_whole(optimizer: torch.optim.Optimizer, loaders: Sequence[Loader]) -> None:
    """Raises UsageError if one process would split a global batch into micro-batches.

    With more processes there may be no split. The error is the same on any number of processes.
    """
    for loader in loaders:
        if (split := loader.split_alone) is not None:
            raise UsageError(
                f"run.step({type(optimizer).__name__}, closure): each evaluation needs the gradient of the whole "
                f"global batch, but loader {loader.name!r} has micro_batch={split[1]}, which splits a global batch of "
                f"{split[0]}. Leave micro_batch out; with more processes each needs less memory."
            )


def _mean_loss(made: Sequence[LossRecord], device: torch.device, group: Group) -> Tensor:
    """(): the loss of an evaluation, with the same bits on all processes; float64 if the device supports it.

    It is the sum, over the backward calls, of (sum of losses) / (sum of counts) over all processes.
    """
    wide = wide_dtype(device)
    rows = torch.zeros(2, len(made), dtype=wide, device=device)
    for number, (_, value, count, request, summed, *_) in enumerate(made):
        if request.examples:  # a mean over nothing is NaN
            things = request.examples if count is None else count
            rows[0, number] = value.to(wide) if summed else value.to(wide) * things
            rows[1, number] = scalar(things, wide, device)  # assigning a Python number would copy it from the host
    sums, counts = group.all_reduce(rows)
    return torch.where(counts > 0, sums / counts.clamp(min=torch.finfo(wide).tiny), 0).sum()
