"""pipeline: the model cut into stages over processes, micro-batches flowing through them.

    4 processes, stages=2        stage 0 (layers 0 to 2)       stage 1 (layers 3 to 5)
      shard 0:                   rank 0  -- activations -->    rank 1
                                         <-- gradients --
      shard 1:                   rank 2                        rank 3

Phase 1, input: the first stage runs the user's closure up to its call of the model, whose argument is the input.
Phase 2, the schedule (torch.distributed.pipelining): forwards of the micro-batches flow from stage to stage, backwards
  flow back. The last stage runs the closure with a stub of the model that returns the stage's output.
    gpipe: all forwards, then all backwards. 1f1b: a stage's backward as early as it can be, so that it holds the
    activations of no more micro-batches than there are stages. naive: one micro-batch after the other, and so one stage
    after the other.
Phase 3, reduce: each stage's gradients are summed over the shards (the processes that have the same stage).
Phase 4, step: a process updates the parameters of its stage; of the others it has neither gradients, optimizer state
  nor weights. (For evaluation and checkpoints the whole model is gathered from the stages: `stage_parameters.py`.) A
  parameter that stands in several stages belongs to the first, which sends it on after each update.

Between processes, a step: activations and their gradients at each cut; between shards, each stage's gradients, as in
ddp. Memory per process: parameters, gradients and optimizer state of its stage; activations of its stage, of all
micro-batches (gpipe), of as many as there are stages (1f1b), or of one (naive).

Follows Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", and
Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (1F1B; with one version of
the weights, the flush of Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training").

torch's stages have fixed shapes, so that micro-batches of another size go through the stages in a pass of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import collectives
from paceline.comm.mesh import ALONE, Mesh, OneReplica, check_size
from paceline.comm.replicas import ProcessReplicas
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
from paceline.strategies.pipeline.pipeline_cut import (
    Units,
    UnseenError,
    boundaries,
    has_optional_tensors,
    seconds,
    units_of,
)
from paceline.strategies.pipeline.pipeline_loss import (
    Losses,
    Share,
    called_with,
    input_of,
    padded,
    terms_from,
    with_zeros,
)
from paceline.strategies.pipeline.pipeline_schedule import Schedules
from paceline.strategies.pipeline.pipeline_stages import CallStages, UncutModel, seed
from paceline.strategies.pipeline.stage_parameters import StageParameters
from paceline.world import World

SCHEDULES = ("gpipe", "1f1b", "naive")
BALANCES = ("parameters", "cost")


def check(size: int | None, *, stages: int, schedule: str, cut: str, balance: str) -> None:
    """Raises SettingError for what cannot work on so many processes."""
    if size == 1 and cut:
        raise SettingError(
            f"strategy pipeline: cut={cut}: this run has 1 process. Start a process for each stage, or leave cut out."
        )
    for name, value, known in (("schedule", schedule, SCHEDULES), ("balance", balance, BALANCES)):
        if value not in known:
            raise SettingError(f"strategy pipeline: {name}={value!r} is not known. {suggest(str(value), known)}")
    if stages:
        check_size(stages, size, "strategy pipeline: stages")


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    return as_single("pipeline")


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
        check(world.size, stages=stages, schedule=schedule, cut=cut, balance=balance)
        self.world, self.device = world, device
        self.schedule, self.cut, self.balance = schedule, str(cut), balance
        stages = stages or world.size
        self.mesh = mesh = Mesh(device, world.rank, {"replicate": world.size // stages, "stage": stages})
        self.plan = AllMicroBatches(mesh.shards, (mesh.shard,))
        self.store = GradientStore(others=mesh.model)
        self._known: set[Tensor] = set()  # the model's parameters and buffers at `prepare`
        self._units = Units([], [])
        self._parameters: StageParameters | None = None  # None: the stages are not known yet
        self._stage: nn.Module = nn.Sequential()  # this process's; of units
        self._used = UsedParameters("pipeline", world.rank)
        self._losses = Losses(mesh, device)
        self._uncut: UncutModel | None = None  # until the first micro-batch, where it decides about the cut
        self._call_stages: CallStages | None = None  # where the stages are cut between calls
        self._forms: dict[Any, list[Tensor]] = {}
        self._schedules = Schedules(mesh, device, schedule)
        self._hook: Any = None

    # --- setup

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if len(models) > 1:
            names = ", ".join(type(model).__name__ for model in models)
            raise ModelError(f"strategy pipeline takes one model, not {len(models)} ({names}). Use strategy='ddp'.")
        self.mesh.replicas = OneReplica()  # outside of a step each process computes the model alone
        new = bool(models) and not self.models
        self.models, self.optimizers = list(models), list(optimizers)
        if new:
            self._prepare(models[0])
            self._known = {*models[0].parameters(), *models[0].buffers()}
        elif models and {*models[0].parameters(), *models[0].buffers()} != self._known:
            raise ModelError(
                "strategy pipeline: the model has got other layers since it was prepared, and the stages do not have "
                "them. Prepare it when it is complete."
            )
        if self._parameters is not None:
            self._parameters.optimizers = self.optimizers

    def _prepare(self, model: nn.Module) -> None:
        """Refuses a model that cannot be cut, before anything is moved, and cuts one where no micro-batch is needed."""
        self._hook = model.register_forward_pre_hook(self._before_forward)
        model.register_state_dict_pre_hook(_refuse_one_stage)
        refuse_deepcopy(model, ModelError(_NO_COPY))
        units: Units | None = None
        with suppress(UnseenError):
            units = units_of(model)
        if units is None or has_optional_tensors(model):
            check_names(model, self.cut, self.mesh.size("stage"), units.names if units is not None else ())
            self._uncut = UncutModel(model, units)  # the closure's call of the model decides how it is cut
        else:
            self._cut_units(model, units)

    def _cut_units(self, model: nn.Module, units: Units) -> None:
        self._units = units
        sizes = [sum(p.numel() for p in unit.parameters()) + 1 for unit in self._units.modules]
        where = boundaries(self._units, self.mesh.size("stage"), self.cut, sizes)
        _check_buffers(model, self._stages_of(where))
        if self.balance == "cost" and not self.cut:  # the first micro-batch is needed
            send_models([model], self.device)
        else:
            self._keep_own_stage(self._stages_of(where), send=True)

    def _stages_of(self, where: Sequence[int]) -> list[nn.Module]:
        return [nn.Sequential(*self._units.modules[a:b]) for a, b in pairwise(where)]

    def _keep_own_stage(self, stages: Sequence[nn.Module], send: bool) -> None:
        """This process keeps its own stage. send: whether rank 0's weights have yet to be sent."""
        self._parameters = StageParameters(self.models[0], stages, self.mesh, self.device)
        self._parameters.optimizers = self.optimizers
        if send:
            self._parameters.receive()
        self._stage = stages[self.mesh.coordinate("stage")]

    def _whole_before_cut(self) -> None:
        """Someone needs the model before the first micro-batch. Collective."""
        if self._uncut is not None:
            self._uncut.send(self.device)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """The user calls the model itself, as in evaluation. All processes do, since the model is gathered first."""
        if self._call_stages is not None and self._call_stages.running:
            return
        self.make_whole()

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
        if self._uncut is not None:
            self._cut_by_first_batch(self._uncut, work)
        placeholders = [[Term(torch.zeros(()), None)] for _ in work.pieces]
        found: list[list[Term]] = []
        for weights, _ in work.passes(placeholders):
            shares = self._shares(work, [weight for (weight,) in weights])
            with self._only(work.inputs):
                if self._call_stages is None:
                    found = self._compute(work, shares, key)
                else:
                    assert self._parameters is not None
                    terms = self._call_stages.compute(work, shares, key, self._parameters)
                    found = self._summed(work, terms, len(shares))
        return padded(found, [piece for piece, _, _ in shares], work.pieces)

    def _cut_by_first_batch(self, uncut: UncutModel, work: Work) -> None:
        args = called_with(work, work.pieces[0], self.device) if uncut.units is not None else ()
        if uncut.units is not None and len(args) == 1 and isinstance(args[0], Tensor):
            self._cut_units(uncut.model, uncut.units)
        else:
            for buffer in uncut.model.buffers():
                buffer.data = buffer.data.to(self.device)
            by_cost = self.balance == "cost" and not self.cut
            if by_cost:
                uncut.send(self.device)
            self._call_stages = CallStages(uncut.model, self.mesh, self.device, self._schedules, self._losses)
            stages = self._call_stages.cut(work, self.cut, by_cost)
            _check_buffers(uncut.model, stages)
            self._keep_own_stage(stages, send=not uncut.sent)
        self._uncut = None

    def _shares(self, work: Work, weights: Sequence[Weight | None]) -> list[Share]:
        """The micro-batches that have examples; where none has, one of them, since others may wait for this shard."""
        shares = []
        for piece, weight in zip(work.pieces, weights, strict=True):
            value = float(weight or 0.0)
            shares.append((piece, value, value * work.total / piece.count if piece.count else 0.0))
        return [share for share in shares if share[0].count] or shares[:1]

    def _compute(self, work: Work, shares: Sequence[Share], key: int) -> list[list[Term]]:
        mesh, first = self.mesh, self._schedules.first
        groups = [list(group) for _, group in groupby(shares, key=lambda share: share[0].count)]
        inputs = [[input_of(work, piece, self.device) for piece, _, _ in group] for group in groups] if first else []
        if self._parameters is None:
            self._measure(inputs[0][0] if first else None)
        assert self._parameters is not None
        self._parameters.free_others()
        forms = [self._forms_of(inputs[number][0] if first else None) for number, group in enumerate(groups)]
        inverse = {}
        if self._schedules.last:
            inverse = self._losses.inverse_counts(
                work, groups, lambda number, piece: with_zeros(work, forms[number][-1], piece, self.device)
            )
        # Every stage has the generator of the data shard; each stage, and each call, must draw other numbers.
        own = mesh.coordinate("stage") + mesh.size("stage") * work.call
        seed(key ^ own * 0x9E3779B97F4A7C15 % 2**63, self.device)
        terms: list[list[Term]] = []
        with mesh.computing(ProcessReplicas(mesh.layers)):
            for number, group in enumerate(groups):
                for start, chosen in self._schedules.passes(group):
                    given = inputs[number][start : start + len(chosen)] if first else []
                    terms += self._pass(work, chosen, given, forms[number], inverse)
        return self._summed(work, terms, len(shares))

    def _summed(self, work: Work, terms: list[list[Term]], count: int) -> list[list[Term]]:
        """After the backward: phase 3. Returns the terms of so many micro-batches, on all stages."""
        assert self._parameters is not None
        self._parameters.sum_tied()
        data = self.mesh.data
        collectives.sum_all(self._used.gradients(kind_of(work.call, work.inputs), self._parameters.names, data), data)
        return self._losses.broadcast(work.call, terms, count)

    def _pass(
        self, work: Work, group: Sequence[Share], inputs: list[Tensor], forms: list[Tensor], inverse: dict[int, Any]
    ) -> list[list[Term]]:
        """Runs micro-batches of one length through the stages. Returns their terms, on the last stage."""
        found: list[list[Term]] = []

        def loss(output: Tensor, number: Tensor) -> Tensor:
            share = group[int(number)]
            terms = terms_from(work, output, share[0], self.device)
            found.append([term.detached() for term in terms])
            return self._losses.weighted(work.call, terms, share, inverse)

        stage = self.mesh.coordinate("stage")
        own = (forms[stage], forms[stage + 1])
        self._schedules.run(self._stage, own, lambda: torch.cat(inputs), loss, len(group))
        return found

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

    # --- what the stages tell each other

    @torch.no_grad()
    def _forms_of(self, value: Tensor | None) -> list[Tensor]:
        """What goes into each stage and out of the last: tensors on "meta". All stages call it together.

        torch's stages would find out by running themselves on made-up data, which moves running statistics and calls
        the loss. Here each stage runs in evaluation mode, on zeros.
        """
        group, first = self.mesh.group("stage"), self.mesh.at(stage=0)
        key = collectives.broadcast_object((value.shape, value.dtype) if value is not None else None, first, group)
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
                found.append(collectives.broadcast_object(form, self.mesh.at(stage=part), group))
            made = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in found]
            self._forms[key, autocast] = made[:1] + [form.requires_grad_() for form in made[1:]]
        return self._forms[key, autocast]

    def _measure(self, value: Tensor | None) -> None:
        """Cuts by the cost of the units, which rank 0 measures on the first micro-batch."""
        sizes = seconds(self._units.modules, value) if self.world.rank == 0 and value is not None else None
        sizes = collectives.broadcast_object(sizes)
        where = boundaries(self._units, self.mesh.size("stage"), self.cut, sizes)
        _check_buffers(self.models[0], self._stages_of(where))
        self._keep_own_stage(self._stages_of(where), send=False)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._parameters is not None
        self._parameters.free_others()  # the script may have evaluated since the backward
        optimizer.step()
        self._parameters.share_tied()

    def make_whole(self) -> None:
        self._whole_before_cut()
        if self._parameters is not None:
            self._parameters.make_whole()

    def holds(self, parameter: Tensor) -> bool:
        return self._parameters is None or parameter in self._parameters.names

    def state_dict(self) -> dict[str, Any]:
        self._whole_before_cut()
        if self._parameters is None:
            return replicated_state(self.models, self.optimizers)
        return self._parameters.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._whole_before_cut()
        if self._parameters is None:
            load_replicated(self.models, self.optimizers, state)
        else:
            self._parameters.load_state_dict(state)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            vars(self.models[0]).pop("__deepcopy__", None)
        if self._call_stages is not None:
            self._call_stages.close()
        self._schedules.close()
        self.store.others = ALONE


def _refuse_one_stage(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    if any(p.dim() == 1 and p.numel() == 0 for p in model.parameters()):
        raise UsageError(
            "strategy pipeline: model.state_dict() on a process that has one stage of the model. On all processes call "
            "run.export(path) for the weights, or run.save(directory) for a checkpoint."
        )


_NO_COPY = (
    "strategy pipeline: a model of which each process has one stage cannot be copied with copy.deepcopy. For an "
    "average of the weights write ema = run.ema(model, decay) in place of the copy; else use strategy='ddp', where "
    "each process has a whole model."
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
