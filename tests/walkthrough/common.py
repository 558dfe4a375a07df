"""What the jobs share: the case, the result, the optimizer. No Paceline in here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .record import Record


@dataclass(frozen=True)
class Case:
    """One way to run a job. `worlds` are numbers of replicas: more than one means stopped at `stops` and resumed. A
    strategy's name is one of strategies.py."""

    job: str  # "a" to "h"
    variant: str = ""
    optimizer: str = "sgd"  # or "adamw"
    micro_batch: int | None = None
    form: str = "closure"  # or "loop"
    worlds: tuple[int, ...] = (1,)
    strategy: str = ""  # that of several processes if not given
    stops: tuple[int, ...] = ()  # optimizer steps after which the run saves and ends
    seed: int = 7
    folder: str = ""  # where checkpoints go
    breakage: str = ""  # planted into the plain reference, to prove that the comparison sees it

    @property
    def name(self) -> str:
        words = [
            self.strategy,
            self.job,
            self.variant,
            self.optimizer,
            f"micro{self.micro_batch}" if self.micro_batch else "whole",
            self.form,
            "w" + ">".join(map(str, self.worlds)),
        ]
        return "-".join(word for word in words if word)


@dataclass
class Result:
    """What a job ends with. Of a Paceline job each process has one, with the record of what that process consumed."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    metrics: dict[str, int] = field(default_factory=dict)  # counts: must be equal
    values: dict[str, float] = field(default_factory=dict)  # means: equal up to rounding
    losses: list[dict[str, float]] = field(default_factory=list)  # per step; a Paceline job's are in its record
    state: dict[str, Tensor] = field(default_factory=dict)  # of optimizer, schedule, EMA: bit for bit after a resume
    record: Record = field(default_factory=Record)
    finished: bool = True  # False: stopped on purpose, to be resumed


def result_of(*models: nn.Module, **rest: Any) -> Result:
    """The weights and buffers of the models, copied; of several models the names start with the model's number."""
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        whole = whole_state(model)
        parameters |= {prefix + name: whole[name].detach().clone().cpu() for name, _ in model.named_parameters()}
        buffers |= {prefix + name: whole[name].detach().clone().cpu() for name, _ in model.named_buffers()}
    return Result(parameters, buffers, **rest)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name. The worker puts one in its place that asks the strategy, since a process may hold
    only a part of them."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state_dict. As for whole_state, the worker puts one in its place that asks the strategy."""
    return optimizer.state_dict()


def state_of(optimizer: torch.optim.Optimizer, schedule: Any) -> dict[str, Tensor]:
    return flat_state("optimizer", optimizer_state(optimizer)) | flat_state("schedule", schedule.state_dict())


def norm(case: Case, channels: int) -> nn.Module:
    """Batch norm; in the cases with micro-batches group norm, since Paceline refuses the other there: its statistics
    would be those of a micro-batch, and depend on the number of processes."""
    return nn.BatchNorm2d(channels) if case.micro_batch is None else nn.GroupNorm(2, channels)


def make_optimizer(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW; with the case's breakage planted, if it has one."""
    params = list(parameters)
    optimizer: torch.optim.Optimizer
    if case.optimizer == "sgd":
        optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-3)
    else:
        optimizer = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05)
    if case.breakage:
        plant(case.breakage, params, optimizer)
    return optimizer


def plant(breakage: str, params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Make gradients wrong by a factor of 2: all of them, or those of every second step.

    AdamW divides a gradient by its own size: a constant factor on a parameter cancels, up to epsilon. A factor that
    changes from step to step does not, so for AdamW the second is the one to plant.
    """
    steps = [0]
    optimizer.register_step_post_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
    wrong = {"doubled": lambda: True, "doubled_every_second_step": lambda: steps[0] % 2 == 1}[breakage]
    for p in params:
        p.register_hook(lambda grad: grad * 2 if wrong() else grad)


def flat_state(prefix: str, state: Any) -> dict[str, Tensor]:
    """Tensors and numbers of a nested `state_dict`, by dotted name."""
    if isinstance(state, Tensor):
        whole = state.full_tensor() if hasattr(state, "full_tensor") else state  # a process may hold a slice
        return {prefix: whole.detach().clone().cpu()}
    if isinstance(state, bool | int | float):
        return {prefix: torch.tensor(float(state), dtype=torch.float64)}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {name: tensor for key, value in items for name, tensor in flat_state(f"{prefix}.{key}", value).items()}
