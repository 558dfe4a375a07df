"""Runs this process's pipeline stage with torch's schedules (torch.distributed.pipelining)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from paceline.comm.mesh import Mesh

T = TypeVar("T")

_MOST = 4  # number of schedules to keep, since each has receive buffers


class Schedules:
    """This process's schedules: one for each number and form of micro-batches. name: gpipe, 1f1b or naive."""

    def __init__(self, mesh: Mesh, device: torch.device, name: str) -> None:
        self._mesh, self._device, self._name = mesh, device, name
        self._made: dict[Any, Any] = {}
        self._loss: Callable[[Tensor, Tensor], Tensor] | None = None  # the loss function of the current run

    @property
    def first(self) -> bool:
        return self._mesh.coordinate("stage") == 0

    @property
    def last(self) -> bool:
        return self._mesh.coordinate("stage") == self._mesh.size("stage") - 1

    def passes(self, group: Sequence[T]) -> Iterator[Sequence[T]]:
        """Split micro-batches of one form into parts that go through the stages together."""
        size = 1 if self._name == "naive" else len(group)
        for start in range(0, len(group), size):
            yield group[start : start + size]

    def run(
        self, stage: nn.Module, forms: tuple[Tensor, Tensor], count: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Run forwards and backwards of `count` micro-batches.

        stage: called with the tensor from the previous stage, and with the micro-batch's number as `number`. On the
        first stage both are the number. forms: two tensors on "meta", in the forms of the tensors that the stage
        receives and sends. loss: on the last stage, called with the stage's output and the number.
        """
        self._loss = loss
        numbers = torch.arange(count)
        schedule = self._schedule(stage, count, forms)
        if self.first:
            schedule.step(numbers, number=numbers)
        elif self.last:
            schedule.step(target=numbers, losses=[], number=numbers)
        else:
            schedule.step(number=numbers)

    def _schedule(self, stage: nn.Module, count: int, forms: tuple[Tensor, Tensor]) -> Any:
        key = (count, *((form.shape, form.dtype) for form in forms))
        if key not in self._made:
            if len(self._made) >= _MOST:
                self._made.clear()
            stages = self._mesh.size("stage")
            own = PipelineStage(
                stage,
                self._mesh.coordinate("stage"),
                stages,
                self._device,
                input_args=forms[:1],
                output_args=forms[1:],
                group=self._mesh.along("stage").get_group(),
            )
            kind = Schedule1F1B if self._name == "1f1b" and count >= stages else ScheduleGPipe
            self._made[key] = kind(own, n_microbatches=count, loss_fn=self._loss_of, scale_grads=False)
        return self._made[key]

    def _loss_of(self, output: Tensor, number: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(output, number)

    def close(self) -> None:
        self._made = {}
        self._loss = None
