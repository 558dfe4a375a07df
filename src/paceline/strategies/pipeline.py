"""pipeline: the model cut into stages over processes, micro-batches flowing through them.

    4 processes, stages=2        stage 0 (layers 0 to 2)       stage 1 (layers 3 to 5)
      shard 0:                   rank 0  -- activations -->    rank 1
                                         <-- gradients --
      shard 1:                   rank 2                        rank 3

Phase 1, what goes in: the user's closure is run up to its call of the model, whose argument is the first stage's input.
Phase 2, the schedule (torch.distributed.pipelining): forwards of the micro-batches flow from stage to stage, backwards
  flow back. On the last stage the closure is run again, with a model that returns what came out.
    gpipe: all forwards, then all backwards. 1f1b: a stage's backward as early as it can be, so that it holds the
    activations of no more micro-batches than there are stages. naive: one micro-batch after the other, and so one stage
    after the other.
Phase 3, reduce: each stage's gradients are summed over the shards (the processes that have the same stage).
Phase 4, step: a process updates the parameters of its stage; of the others it has neither gradients, optimizer state
  nor weights. (Who needs the whole model, in evaluation or for a checkpoint, gets it from the stages:
  `stage_parameters.py`.) A parameter that stands in several stages belongs to the first, which sends it on after each
  update.

Between processes, a step: activations and their gradients at each cut; between shards, each stage's gradients, as in
ddp. Memory per process: parameters, gradients and optimizer state of its stage; activations of its stage, of all
micro-batches (gpipe), of as many as there are stages (1f1b), or of one (naive).

Follows Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", and
Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (1F1B; with one version of
the weights, the flush of Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training").

torch's stages have fixed shapes, so that micro-batches of another size go through in a pass of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from paceline.comm import collectives
from paceline.comm.mesh import ALONE, Mesh, OneReplica, check_size
from paceline.comm.replicas import ProcessReplicas
from paceline.errors import ModelError, SettingError, UsageError, suggest
from paceline.strategies.base import ClosureStrategy, Term, Weight, Work, kind_of
from paceline.strategies.batch_plan import AllMicroBatches
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.pipeline_calls import check_names
from paceline.strategies.pipeline_cut import (
    Units,
    UnseenError,
    boundaries,
    parameters_in,
    seconds,
    takes_more,
    units_of,
)
from paceline.strategies.pipeline_loss import Losses, Share, called_with, input_of, padded, terms_from, with_zeros
from paceline.strategies.pipeline_stages import ByCalls, Waiting, seed
from paceline.strategies.replicated import load_replicated, replicated_state
from paceline.strategies.stage_parameters import StageParameters
from paceline.strategies.unused_parameters import Reached
from paceline.torch_private.schedules import NOT_CUT
from paceline.world import World

SCHEDULES = ("gpipe", "1f1b", "naive")
BALANCES = ("parameters", "cost")


def check(size: int | None, *, stages: int, schedule: str, balance: str) -> None:
    """Raises SettingError for what cannot work on so many processes."""
    if size == 1:
        raise SettingError(
            "strategy pipeline needs at least two processes: paceline run --nproc 2 --strategy pipeline ... With one, "
            "leave the strategy out."
        )
    for name, value, known in (("schedule", schedule, SCHEDULES), ("balance", balance, BALANCES)):
        if value not in known:
            raise SettingError(f"strategy pipeline: {name}={value!r} is not known. {suggest(str(value), known)}")
    if stages:
        check_size(stages, size, "strategy pipeline: stages")


class Pipeline(ClosureStrategy):
    """stages: how many, as many as processes by default; with a divisor of their number several pipelines share each
    global batch. schedule: gpipe, 1f1b or naive. cut: where stages begin, as numbers or names of layers ("2,4"); if
    not given, balance: by their parameters, or by what their forward and backward cost on the first micro-batch."""

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
        check(world.size, stages=stages, schedule=schedule, balance=balance)
        self.world, self.device = world, device
        self.schedule, self.cut, self.balance = schedule, str(cut), balance
        stages = stages or world.size
        self.mesh = mesh = Mesh(device, world.rank, {"replicate": world.size // stages, "stage": stages})
        self.plan = AllMicroBatches(mesh.shards, (mesh.shard,))
        self.store = GradientStore(others=mesh.model)
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._known: set[Tensor] = set()
        self._units = Units([], [])
        self._owned: StageParameters | None = None
        self._stage: nn.Module = nn.Sequential()
        self._reached = Reached("pipeline", world.rank)
        self._losses = Losses(mesh, device)
        self._waiting: Waiting | None = None
        self._by_calls: ByCalls | None = None
        self._forms: dict[Any, list[Tensor]] = {}
        self._schedules: dict[Any, Any] = {}
        self._loss: Any = None
        self._hook: Any = None

    # --- setup

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if len(models) > 1:
            names = ", ".join(type(model).__name__ for model in models)
            raise ModelError(f"strategy pipeline takes one model, not {len(models)} ({names}). Use strategy='ddp'.")
        self.mesh.replicas = OneReplica()  # but for the forwards of a step: what else computes the model does so alone
        new = bool(models) and not self.models
        self.models, self.optimizers = list(models), list(optimizers)
        if new:
            self._take(models[0])
            self._known = {*models[0].parameters(), *models[0].buffers()}
        elif models and {*models[0].parameters(), *models[0].buffers()} != self._known:
            raise ModelError(
                "strategy pipeline: the model has got other layers since it was prepared, and the stages do not have "
                "them. Prepare it when it is complete."
            )
        if self._owned is not None:
            self._owned.optimizers = self.optimizers

    def _take(self, model: nn.Module) -> None:
        self._hook = model.register_forward_pre_hook(self._before_forward)
        model.register_state_dict_pre_hook(_refuse_parts)
        vars(model)["__deepcopy__"] = _no_copy  # copy.deepcopy asks the object for it
        # Before anything is moved: what cannot be cut is refused here.
        units: Units | None = None
        with suppress(UnseenError):
            units = units_of(model)
        if units is None or takes_more(model):
            check_names(model, self.cut, self.mesh.size("stage"), units.names if units is not None else ())
            self._waiting = Waiting(model, units)  # how the closure calls it decides
        else:
            self._take_units(model, units)

    def _take_units(self, model: nn.Module, units: Units) -> None:
        self._units = units
        sizes = [parameters_in(unit) for unit in self._units.modules]
        where = boundaries(self._units, self.mesh.size("stage"), self.cut, sizes)
        _check_buffers(model, self._parts_of(where))
        if self.balance == "cost" and not self.cut:  # the first micro-batch is needed
            model.to(self.device)
            collectives.broadcast_tensors([*model.parameters(), *model.buffers()])
        else:
            self._take_stage(self._parts_of(where), send=True)

    def _parts_of(self, where: Sequence[int]) -> list[nn.Module]:
        return [nn.Sequential(*self._units.modules[a:b]) for a, b in pairwise(where)]

    def _take_stage(self, parts: Sequence[nn.Module], send: bool) -> None:
        """The stages are known: this process keeps its own. send: whether rank 0's weights have yet to be sent."""
        self._owned = StageParameters(self.models[0], parts, self.mesh, self.device)
        self._owned.optimizers = self.optimizers
        if send:
            self._owned.receive()
        self._stage = parts[self.mesh.coordinate("stage")]

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """The user calls the model itself, as in evaluation: on all processes, since it is made whole first."""
        if self._by_calls is not None and self._by_calls.running:
            return
        if self._waiting is not None:
            self._waiting.send(self.device)
        if self._owned is not None:
            self._owned.make_whole()

    # --- the step

    def forward_backward(self, work: Work) -> list[list[Term]]:
        with work.autocast():  # the stages run outside of the closure, and belong under it
            return self._forward_backward(work)

    def _forward_backward(self, work: Work) -> list[list[Term]]:
        if work.model is not self.models[0]:
            raise UsageError("strategy pipeline: forward_backward was given another model than the prepared one.")
        mode = self._units.mode
        if mode is not None and mode != work.model.training:
            raise UsageError(
                f"strategy pipeline: the model was cut as it computes in {'training' if mode else 'evaluation'} mode, "
                f"and is trained in the other. Call model.{'train' if mode else 'eval'}() before the step."
            )
        key = torch.default_generator.initial_seed()
        if self._waiting is not None:
            self._begin(self._waiting, work)
        placeholders = [[Term(torch.zeros(()), None)] for _ in work.pieces]
        found: list[list[Term]] = []
        for weights, _ in work.passes(placeholders):
            shares = self._shares(work, [weight for (weight,) in weights])
            with self._only(work.inputs):
                if self._by_calls is None:
                    found = self._compute(work, shares, key)
                else:
                    assert self._owned is not None
                    terms = self._by_calls.compute(work, shares, key, self._owned)
                    found = self._summed(work, terms, len(shares))
        return padded(found, [piece for piece, _, _ in shares], work.pieces)

    def _begin(self, waiting: Waiting, work: Work) -> None:
        """Cuts a model that waits for its first micro-batch."""
        args = called_with(work, work.pieces[0], self.device) if waiting.units is not None else ()
        if waiting.units is not None and len(args) == 1 and isinstance(args[0], Tensor):
            self._take_units(waiting.model, waiting.units)
        else:
            for buffer in waiting.model.buffers():
                buffer.data = buffer.data.to(self.device)
            by_cost = self.balance == "cost" and not self.cut
            if by_cost:
                waiting.send(self.device)
            self._by_calls = by_calls = ByCalls(waiting.model, self.mesh, self.device, self.schedule, self._losses)
            parts = by_calls.cut(work, self.cut, by_cost)
            _check_buffers(waiting.model, parts)
            self._take_stage(parts, send=not waiting.sent)
        self._waiting = None

    def _shares(self, work: Work, weights: Sequence[Weight | None]) -> list[Share]:
        """The micro-batches that have examples; where none has, one of them, since others may wait for this shard."""
        shares = []
        for piece, weight in zip(work.pieces, weights, strict=True):
            value = float(weight or 0.0)
            shares.append((piece, value, value * work.total / piece.count if piece.count else 0.0))
        return [share for share in shares if share[0].count] or shares[:1]

    def _compute(self, work: Work, shares: Sequence[Share], key: int) -> list[list[Term]]:
        mesh = self.mesh
        first, last = mesh.coordinate("stage") == 0, mesh.coordinate("stage") == mesh.size("stage") - 1
        groups = [list(group) for _, group in groupby(shares, key=lambda share: share[0].count)]
        inputs = [[input_of(work, piece, self.device) for piece, _, _ in group] for group in groups] if first else []
        if self._owned is None:
            self._measure(inputs[0][0] if first else None)
        assert self._owned is not None
        self._owned.release()
        forms = [self._forms_of(inputs[number][0] if first else None) for number, group in enumerate(groups)]
        inverse = {}
        if last:
            inverse = self._losses.inverse_counts(
                work, groups, lambda number, piece: with_zeros(work, forms[number][-1], piece, self.device)
            )
        # Other draws on each stage, and at each call: all have the shard's generator.
        own = mesh.coordinate("stage") + mesh.size("stage") * work.call
        seed(key ^ own * 0x9E3779B97F4A7C15 % 2**63, self.device)
        terms: list[list[Term]] = []
        with mesh.computing(ProcessReplicas(mesh.data)):
            for number, group in enumerate(groups):
                size = 1 if self.schedule == "naive" else len(group)
                for start in range(0, len(group), size):
                    chosen = group[start : start + size]
                    given = inputs[number][start : start + size] if first else []
                    terms += self._pass(work, chosen, given, forms[number], inverse)
        return self._summed(work, terms, len(shares))

    def _summed(self, work: Work, terms: list[list[Term]], count: int) -> list[list[Term]]:
        """After the backward: phase 3. Returns the terms of so many micro-batches, on all stages."""
        assert self._owned is not None
        self._owned.sum_tied()
        data = self.mesh.data
        collectives.sum_all(self._reached.gradients(kind_of(work.call, work.inputs), self._owned.names, data), data)
        return self._losses.told(work.call, terms, count)

    def _pass(
        self, work: Work, group: Sequence[Share], inputs: list[Tensor], forms: list[Tensor], inverse: dict[int, Any]
    ) -> list[list[Term]]:
        """Micro-batches of one length through the schedule. Returns their terms, on the last stage."""
        found: list[list[Term]] = []

        def loss(output: Tensor, number: Tensor) -> Tensor:
            piece, weight, scale = group[int(number)]
            terms = terms_from(work, output, piece, self.device)
            self._losses.check_kind(work.call, terms)
            found.append([Term(term.value.detach(), term.count) for term in terms])
            parts = [t.value * (weight if t.count is None else inverse[i] * scale) for i, t in enumerate(terms)]
            return torch.stack([part.reshape(()) for part in parts]).sum()

        self._loss = loss
        schedule = self._schedule_for(len(group), forms)
        if self.mesh.coordinate("stage") == 0:
            schedule.step(torch.cat(inputs))
        elif self.mesh.coordinate("stage") == self.mesh.size("stage") - 1:
            schedule.step(target=torch.arange(len(group)), losses=[])
        else:
            schedule.step()
        return found

    def _schedule_for(self, count: int, forms: list[Tensor]) -> Any:
        key = (count, *((form.shape, form.dtype) for form in forms))
        if key not in self._schedules:
            if len(self._schedules) >= 4:
                self._schedules.clear()  # each keeps buffers for what it receives
            part, stages = self.mesh.coordinate("stage"), self.mesh.size("stage")
            stage = PipelineStage(
                self._stage,
                part,
                stages,
                self.device,
                input_args=(forms[part],),
                output_args=(forms[part + 1],),
                group=self.mesh.along("stage").get_group(),
            )
            whole: Any = (NOT_CUT,) if count == 1 else None  # one is not cut: it may have no examples
            kind = Schedule1F1B if self.schedule == "1f1b" and count >= stages else ScheduleGPipe
            self._schedules[key] = kind(
                stage,
                n_microbatches=count,
                loss_fn=lambda *args: self._loss(*args),
                args_chunk_spec=whole,
                scale_grads=False,
            )
        return self._schedules[key]

    @contextmanager
    def _only(self, inputs: Sequence[Tensor] | None) -> Iterator[None]:
        """Within it only these parameters get gradients (None: all)."""
        if inputs is None or self._owned is None:
            yield
            return
        chosen = set(inputs)
        kept = {p: p.grad for p in self._owned.names if p not in chosen}
        yield
        for p, grad in kept.items():
            p.grad = grad

    # --- what the stages tell each other

    @torch.no_grad()
    def _forms_of(self, value: Tensor | None) -> list[Tensor]:
        """What goes into each stage and out of the last: tensors without memory. Called by a row together.

        torch's stages would find out by running themselves on made-up data, which moves the running statistics of batch
        norms and calls the loss. In evaluation mode nothing of that happens.
        """
        row, first = self.mesh.group("stage"), self.mesh.at(stage=0)
        key = collectives.broadcast_object((value.shape, value.dtype) if value is not None else None, first, row)
        autocast = torch.is_autocast_enabled(self.device.type)
        if (key, autocast) not in self._forms:
            found: list[Any] = [key]
            for part in range(self.mesh.size("stage")):
                form = None
                if part == self.mesh.coordinate("stage"):
                    modes = {module: module.training for module in self._stage.modules()}
                    shape, dtype = found[-1]
                    result = self._stage.eval()(torch.zeros(shape, dtype=dtype, device=self.device))
                    for module, was in modes.items():
                        module.training = was
                    form = _form(result)
                found.append(collectives.broadcast_object(form, self.mesh.at(stage=part), row))
            made = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in found]
            self._forms[key, autocast] = made[:1] + [form.requires_grad_() for form in made[1:]]
        return self._forms[key, autocast]

    def _measure(self, value: Tensor | None) -> None:
        """Cuts by what the units cost, on rank 0, on the first micro-batch."""
        sizes = seconds(self._units.modules, value) if self.world.rank == 0 and value is not None else None
        sizes = collectives.broadcast_object(sizes)
        where = boundaries(self._units, self.mesh.size("stage"), self.cut, sizes)
        _check_buffers(self.models[0], self._parts_of(where))
        self._take_stage(self._parts_of(where), send=False)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._owned is not None
        self._owned.release()  # the script may have evaluated since the backward
        optimizer.step()
        self._owned.share_tied()

    def state_dict(self) -> dict[str, Any]:
        if self._waiting is not None:
            self._waiting.send(self.device)
        return replicated_state(self.models, self.optimizers) if self._owned is None else self._owned.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._waiting is not None:
            self._waiting.send(self.device)
        if self._owned is None:
            load_replicated(self.models, self.optimizers, state)
        else:
            self._owned.load_state_dict(state)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            vars(self.models[0]).pop("__deepcopy__", None)
        if self._by_calls is not None:
            self._by_calls.close()
        self._schedules, self._loss = {}, None
        self.store.others = ALONE


def _refuse_parts(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    if any(p.dim() == 1 and p.numel() == 0 for p in model.parameters()):
        raise UsageError(
            "strategy pipeline: model.state_dict() on a process that has one stage of the model. On all processes call "
            "run.export(path) for the weights, or run.save(directory) for a checkpoint."
        )


def _no_copy(_: Any) -> Any:
    raise ModelError(
        "strategy pipeline: a model of which each process has one stage cannot be copied with copy.deepcopy, as for an "
        "average of the weights (EMA). Use strategy='ddp', where each process has a whole one."
    )


def _form(value: Any) -> tuple[torch.Size, torch.dtype]:
    if not isinstance(value, Tensor):
        raise ModelError(
            f"strategy pipeline: a stage gives a {type(value).__name__} to the next one; it must be one tensor. Set "
            "cut= so that no stage ends there, or pack it into one tensor."
        )
    return value.shape, value.dtype


def _check_buffers(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Raises ModelError for a buffer in several stages: what one of them writes there the others do not see."""
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    places: dict[int, list[int]] = {}
    for part, stage in enumerate(stages):
        for buffer in stage.buffers():
            places.setdefault(id(buffer), []).append(part)
    for number, at in places.items():
        if len(at) > 1:
            raise ModelError(
                f"strategy pipeline: the buffer {names[number]} stands in the stages {' and '.join(map(str, at))}, "
                "each of which would keep one of its own. Give each place its own layer, or use strategy='ddp'."
            )
