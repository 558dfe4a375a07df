"""The step of an optimizer that evaluates the loss itself, through the script's closure.

LBFGS calls the closure several times in a step, each time with other weights, and decides by the loss and the gradient
how far to go. Each evaluation computes the whole global batch: `run.backward` in the closure leaves the exact mean
gradient in `.grad`. The optimizer gets the mean loss over all processes, with the same bits on each, so that all
processes decide alike. That loss is computed from the losses of the evaluation's backward calls. The closure's own
result is the loss of one device, and is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.mesh import Group
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
    """Make one update of an optimizer by this closure. Raises UsageError where it could not be exact."""
    optimizer = stepper.updates.prepared(optimizer)
    _check_exact(optimizer, stepper)
    check_known(optimizer, stepper.updates.names)
    if not stepper.ownership.latest():
        raise UsageError(outside_a_loop("step"))
    _check_whole(optimizer, [one.loader for one in stepper.ownership.latest()])
    watched, told = stepper.losses, False

    def evaluate() -> Tensor:
        nonlocal told
        stepper.restart_global_batch()
        stepper.losses = []
        closure()
        made, stepper.losses = stepper.losses, watched
        if not made:
            raise UsageError(without_backward([p for group in optimizer.param_groups for p in group["params"]]))
        if watched is not None and not told:  # a step's loss is that of the first evaluation, before any update
            watched.extend(made)
        told = True
        stepper.updates.check_evaluation(optimizer)
        return _mean_loss(made, stepper.device, stepper.strategy.mesh.gradient)

    try:
        made = stepper.guards.allow(stepper.strategy.step_by_closure, optimizer, evaluate)
    finally:
        stepper.losses = watched
    if not made:
        raise UsageError(
            f"run.step({type(optimizer).__name__}, closure): the closure is evaluated several times in a step, each "
            "time with other weights, which is exact under the strategies single and ddp, without reproducible and "
            "shards. Use --strategy ddp; or an optimizer that takes one gradient a step, such as AdamW."
        )
    stepper.updates.finish_closure_update(optimizer, schedulers)


def _check_exact(optimizer: torch.optim.Optimizer, stepper: Stepper) -> None:
    name, fp16 = type(optimizer).__name__, stepper.precision.scaler is not None
    if fp16 or stepper.updates.skip:
        raise UsageError(
            f"run.step({name}, closure): {'precision=fp16' if fp16 else 'nonfinite=skip'} leaves updates out whose "
            "gradient is not finite, which is known only in the middle of this one. Use precision='bf16' or 'fp32', "
            "and nonfinite='stop'."
        )


def _check_whole(optimizer: torch.optim.Optimizer, loaders: Sequence[Loader]) -> None:
    """On any number of processes alike, also where the part of each is not cut."""
    for loader in loaders:
        if (cut := loader.cut_alone) is not None:
            raise UsageError(
                f"run.step({type(optimizer).__name__}, closure): each evaluation needs the gradient of the whole "
                f"global batch, and loader {loader.name!r} has micro_batch={cut[1]}, which cuts a global batch of "
                f"{cut[0]}. Leave micro_batch out: the more processes there are the less memory each needs."
            )


def _mean_loss(made: Sequence[LossRecord], device: torch.device, group: Group) -> Tensor:
    """(), float64 where the device has it: the sum over the backward calls of an evaluation of (sum of losses) / (sum
    of counts) over all processes, the same bits on each."""
    wide = wide_dtype(device)
    rows = torch.zeros(2, len(made), dtype=wide, device=device)
    for number, (_, value, count, request, summed, *_) in enumerate(made):
        if request.examples:  # a mean over nothing is NaN
            things = request.examples if count is None else count
            rows[0, number] = value.to(wide) if summed else value.to(wide) * things
            rows[1, number] = scalar(things, wide, device)  # to assign a number would copy it from the host
    sums, counts = collectives.all_reduce(rows, group=group)
    return torch.where(counts > 0, sums / counts.clamp(min=torch.finfo(wide).tiny), 0).sum()
