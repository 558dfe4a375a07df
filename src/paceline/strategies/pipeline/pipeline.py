"""pipeline: the model is split into stages over processes, and micro-batches flow through them.

    4 processes, stages=2        stage 0 (layers 0 to 2)       stage 1 (layers 3 to 5)
      shard 0:                   rank 0  -- activations -->    rank 1
                                         <-- gradients --
      shard 1:                   rank 2                        rank 3

Phase 1, the split, with the first micro-batch: the order of layer calls shows where a stage can begin.
Phase 2, the schedule (torch.distributed.pipelining): forwards of the micro-batches run from the first stage to the
  last, backwards in reverse. Each stage runs its part of the user's closure (pipeline_calls.py). The last stage
  computes the loss.
    gpipe: all forwards, then all backwards.
    1f1b: each backward as early as possible. A stage holds activations of at most one micro-batch per stage.
    naive: one micro-batch at a time, so only one stage computes at a time.
Phase 3, reduce: each stage's gradients are summed over the shards (the processes that have the same stage).
Phase 4, step: each process updates the parameters of its stage. It holds no weights, gradients or optimizer state of
  other stages. (For evaluation and checkpoints the whole model is gathered from the stages: `stage_parameters.py`.) A
  parameter that several stages use belongs to the first of them, which sends it to the others after each update.

Traffic per step: activations and their gradients between stages; each stage's gradients between shards, as in ddp.
Memory per process: parameters, gradients and optimizer state of its stage; activations of its stage, for all
micro-batches (gpipe), for one micro-batch per stage (1f1b), or for one micro-batch (naive).

Follows Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", and
Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (1F1B). There is only one version
of the weights: the pipeline is flushed before each update, as in Narayanan et al. 2021, "Memory-Efficient
Pipeline-Parallel DNN Training".

torch's stages have fixed shapes, so micro-batches of different sizes go through the stages in separate passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.mesh import ALONE, Mesh, check_size
from paceline.config import StrategySpec
from paceline.data.batch_plan import AllMicroBatches
from paceline.errors import ModelError, SettingError, UsageError, suggest
from paceline.strategies.base import ClosureStrategy, Term, Weight, Work, kind_of
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.kit.named_parameters import load_replicated, replicated_state, send_models
from paceline.strategies.kit.one_process import as_single
from paceline.strategies.kit.pickling import refuse_deepcopy
from paceline.strategies.kit.unused_parameters import UsedParameters
from paceline.strategies.pipeline.pipeline_calls import check_names
from paceline.strategies.pipeline.pipeline_loss import Losses, Share, padded
from paceline.strategies.pipeline.pipeline_schedule import Schedules
from paceline.strategies.pipeline.pipeline_stages import Stages
from paceline.strategies.pipeline.stage_parameters import StageParameters
from paceline.world import World

SCHEDULES = ("gpipe", "1f1b", "naive")
BALANCES = ("parameters", "cost")


def check(size: int | None, *, stages: int, schedule: str, cut: str, balance: str) -> None:
    """Raises SettingError for options that cannot work on this number of processes."""
    if size == 1 and cut:
        raise SettingError(
            f"strategy pipeline: cut={cut}: this run has 1 process. Start one process per stage, or drop cut."
        )
    for name, value, known in (("schedule", schedule, SCHEDULES), ("balance", balance, BALANCES)):
        if value not in known:
            raise SettingError(f"strategy pipeline: {name}={value!r} is not known. {suggest(str(value), known)}")
    if stages:
        check_size(stages, size, "strategy pipeline: stages")


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    return as_single("pipeline")


class Pipeline(ClosureStrategy):
    """stages: number of stages, a divisor of the number of processes; default: one per process. If there are fewer
    stages than processes, several pipelines share each global batch. schedule: gpipe, 1f1b or naive. cut: the layers at
    which stages begin, as numbers or names ("2,4"); default: chosen by `balance`. balance: give each stage about the
    same number of "parameters", or the same "cost" (the time of the forward of the first micro-batch)."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        stages: int = 0,
        schedule: str = "gpipe",
        cut: str = "",
        balance: str = "parameters",
    ) -> None:
        check(world.size, stages=stages, schedule=schedule, cut=cut, balance=balance)
        self.world, self.device = world, device
        self.schedule, self.cut, self.balance = schedule, str(cut), balance
        stages = stages or world.size
        self.mesh = mesh = Mesh(device, world.rank, {"replicate": world.size // stages, "stage": stages})
        self.plan = AllMicroBatches(mesh.shards, (mesh.shard,))
        self.store = GradientStore(model_parallel=mesh.model)
        self._known: set[Tensor] = set()  # the model's parameters and buffers at `prepare`
        # None before the split.
        self._stages: Stages | None = None
        self._parameters: StageParameters | None = None
        self._sent = False  # whether all processes received the whole model with rank 0's weights before the split
        self._used = UsedParameters("pipeline", world.rank)
        self._losses = Losses(mesh, device)
        self._schedules = Schedules(mesh, device, schedule)
        self._hook: Any = None

    # --- setup

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if len(models) > 1:
            names = ", ".join(type(model).__name__ for model in models)
            raise ModelError(f"strategy pipeline takes one model, not {len(models)} ({names}). Use strategy='ddp'.")
        self.mesh.replicas = ALONE  # outside of a step each process computes the whole model
        new = bool(models) and not self.models
        self.models, self.optimizers = list(models), list(optimizers)
        if new:
            self._prepare(models[0])
            self._known = {*models[0].parameters(), *models[0].buffers()}
        elif models and {*models[0].parameters(), *models[0].buffers()} != self._known:
            raise ModelError(
                "strategy pipeline: layers were added to the model after it was prepared, and the stages do not have "
                "them. Call run.prepare when the model is complete."
            )
        if self._parameters is not None:
            self._parameters.optimizers = self.optimizers

    def _prepare(self, model: nn.Module) -> None:
        """Add hooks to the model, and check all that can be checked without examples. The split needs the first
        micro-batch."""
        self._hook = model.register_forward_pre_hook(self._before_forward)
        model.register_state_dict_pre_hook(_refuse_one_stage)
        refuse_deepcopy(model, ModelError(_NO_COPY))
        check_names(model, self.cut, self.mesh.size("stage"))

    def _whole_before_cut(self) -> None:
        """Before the split: give each process the whole model with rank 0's weights, on its device. Collective."""
        if self._parameters is None and not self._sent:
            send_models(self.models, self.device)
            self._sent = True

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """A hook: gather the whole model when the user calls it, as in evaluation. All processes must call it."""
        if self._stages is None or not self._stages.running:
            self.gather_weights()

    # --- the step

    def forward_backward(self, work: Work) -> list[list[Term]]:
        with work.autocast():  # the stages run outside of the closure, but need its autocast
            return self._forward_backward(work)

    def _forward_backward(self, work: Work) -> list[list[Term]]:
        if work.model is not self.models[0]:
            raise UsageError(
                "strategy pipeline: forward_backward got a model that is not the prepared one. Pass the prepared model."
            )
        if self._stages is None:
            self._stages = Stages(self.models[0], self.mesh, self.device, self._schedules, self._losses)
        if self._parameters is None:
            self._parameters = self._cut(work, self._stages)
        key = torch.default_generator.initial_seed()
        placeholders = [[Term(torch.zeros(()), None)] for _ in work.pieces]
        found: list[list[Term]] = []
        for weights, _ in work.passes(placeholders):
            shares = self._shares(work, [weight for (weight,) in weights])
            with self._only(work.inputs):
                terms = self._stages.compute(work, shares, key, self._parameters)
                found = self._summed(work, terms, len(shares))
        return padded(found, [piece for piece, _, _ in shares], work.pieces)

    def _cut(self, work: Work, stages: Stages) -> StageParameters:
        """Split the model with the first micro-batch. Afterwards this process holds only its stage."""
        (model,) = self.models
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        by_cost = self.balance == "cost" and not self.cut
        if by_cost:
            self._whole_before_cut()
        parts = stages.cut(work, self.cut, by_cost)
        _check_buffers(model, parts)
        parameters = StageParameters(model, parts, self.mesh, self.device)
        parameters.optimizers = self.optimizers
        if not self._sent:
            parameters.receive()
        return parameters

    def _shares(self, work: Work, weights: Sequence[Weight | None]) -> list[Share]:
        """The micro-batches that have examples. If all are empty: the first, since other shards wait for this shard."""
        shares = []
        for piece, weight in zip(work.pieces, weights, strict=True):
            value = float(weight or 0.0)
            shares.append((piece, value, value * work.total / piece.count if piece.count else 0.0))
        return [share for share in shares if share[0].count] or shares[:1]

    def _summed(self, work: Work, terms: list[list[Term]], count: int) -> list[list[Term]]:
        """Phase 3: sum the gradients after the backward. Returns the terms of `count` micro-batches on all stages."""
        assert self._parameters is not None
        self._parameters.sum_tied()
        data = self.mesh.data
        data.sum_tensors(self._used.gradients(kind_of(work.call, work.inputs), self._parameters.names, data))
        return self._losses.broadcast(work.call, terms, count)

    @contextmanager
    def _only(self, inputs: Sequence[Tensor] | None) -> Iterator[None]:
        """Within the block only these parameters get gradients (None: all)."""
        if inputs is None or self._parameters is None:
            yield
            return
        chosen = set(inputs)
        others = {p: p.grad for p in self._parameters.names if p not in chosen}
        yield
        for p, grad in others.items():
            p.grad = grad

    # --- updates and state

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._parameters is not None
        self._parameters.free_others()  # the script may have evaluated since the backward
        optimizer.step()
        self._parameters.share_tied()

    def gather_weights(self) -> None:
        self._whole_before_cut()
        if self._parameters is not None:
            self._parameters.gather_weights()

    def holds(self, parameter: Tensor) -> bool:
        return self._parameters is None or parameter in self._parameters.names

    def state_dict(self) -> dict[str, Any]:
        self._whole_before_cut()
        if self._parameters is None:
            return replicated_state(self.models, self.optimizers)
        return self._parameters.state_dict()

    def held_state(self) -> dict[str, Any] | None:
        self._whole_before_cut()
        return None if self._parameters is None else self._parameters.held_state()

    def reads_stored(self) -> bool:
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._whole_before_cut()
        if self._parameters is None:
            load_replicated(self.models, self.optimizers, state)
        else:
            self._parameters.load_state_dict(state)

    def write_weights(self, number: int, write: Callable[[], None]) -> None:
        if self._parameters is not None:
            self._parameters.gather_weights()
        write()

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            vars(self.models[0]).pop("__deepcopy__", None)
        self._schedules.close()
        self.store.model_parallel = ALONE


def _refuse_one_stage(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    if any(p.dim() == 1 and p.numel() == 0 for p in model.parameters()):
        raise UsageError(
            "strategy pipeline: model.state_dict() was called on a process that has only one stage of the model. Call "
            "run.export(path) for the weights, or run.save(directory) for a checkpoint, on all processes."
        )


_NO_COPY = (
    "strategy pipeline: a model that is split into stages cannot be copied with copy.deepcopy. For an average of the "
    "weights use ema = run.ema(model, decay) instead of the copy; otherwise use strategy='ddp', where each process has "
    "a whole model."
)


def _check_buffers(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Raises ModelError if several stages use a buffer, since a stage would not see the writes of other stages."""
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    places: dict[int, list[int]] = {}
    for part, stage in enumerate(stages):
        for buffer in stage.buffers():
            places.setdefault(id(buffer), []).append(part)
    for number, at in places.items():
        if len(at) > 1:
            raise ModelError(
                f"strategy pipeline: the buffer {names[number]} is in stages {' and '.join(map(str, at))}, and each "
                "stage would change only its copy. Use a separate layer in each stage, or strategy='ddp'."
            )
