"""pipeline: the model cut into stages over processes, micro-batches flowing through them. (Thin for now: one pipeline
of all processes, GPipe, an nn.Sequential.)

Phase 1, what goes in: the user's closure is run up to its call of the model, whose arguments are the first stage's
input.
Phase 2, the schedule (torch.distributed.pipelining, ScheduleGPipe): forwards of all micro-batches flow from stage to
  stage, then backwards flow back. On the last stage the closure is run again, with a model that returns what came out.
Phase 3, share: each stage's gradients and buffers are sent to all processes, which then hold the whole gradient. A
  parameter that stands in several stages has the sum of theirs.
Phase 4, step: each process makes the same update of the whole model.

Between processes, a step: activations and their gradients at each cut, and (thin) the whole gradient. Memory per
process: activations of its own stage; parameters, gradients and optimizer state whole (thin).
Follows Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism".

torch's stages have fixed shapes, so that micro-batches of another size go through in a pass of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from paceline.comm import collectives
from paceline.errors import ModelError, SettingError, UsageError
from paceline.strategies.base import Layout, Piece, Strategy, Term, Weight, Work
from paceline.strategies.replicated import load_replicated, replicated_state
from paceline.world import World


class _Input(Exception):
    """`args`: what the closure called the model with."""


class _Captured:
    """Stands for the model where only its input is wanted."""

    def __call__(self, *args: Any) -> Any:
        raise _Input(*args)


class _Finished:
    """Stands for the model on the last stage: what came out of the pipeline is its output."""

    def __init__(self, output: Tensor) -> None:
        self._output = output

    def __call__(self, *_: Any) -> Tensor:
        return self._output


class Pipeline(Strategy):
    """stages: how many; as many as processes, and the default."""

    closure_only = True

    def __init__(self, world: World, device: torch.device, *, stages: int = 0) -> None:
        if world.size < 2:
            raise SettingError(
                "strategy pipeline needs at least two processes: paceline run --nproc 2 --strategy pipeline ..."
            )
        if stages not in (0, world.size):
            raise SettingError(
                f"strategy pipeline: stages={stages}, but there are {world.size} processes. For now every process is "
                f"a stage: leave stages out, or start {stages} processes."
            )
        self.world, self.device = world, device
        self.layout = Layout(shards=1, mine=(0,), together=True)
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._stages: list[nn.Sequential] = []
        self._tied: list[nn.Parameter] = []  # parameters that stand in several stages

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if len(models) > 1 or not all(isinstance(model, nn.Sequential) for model in models):
            names = ", ".join(type(model).__name__ for model in models)
            raise ModelError(
                f"strategy pipeline takes one nn.Sequential, which it can cut, not {names}. Use strategy='ddp'."
            )
        for model in models:
            _check_forward(model)
        self.models, self.optimizers = list(models), list(optimizers)
        for model in models:
            model.to(self.device)
            collectives.broadcast_tensors([*model.parameters(), *model.buffers()])
            # By their registration: children() names a layer that stands twice only once.
            self._stages = cut_layers(
                [layer for layer in model._modules.values() if layer is not None], self.world.size
            )
            self._tied = _tied(model, self._stages)

    def forward_backward(self, work: Work) -> list[list[Term]]:
        if work.inputs is not None:
            raise UsageError(
                "strategy pipeline: forward_backward(optimizer=...) is not there yet. Leave optimizer out."
            )
        if work.model is not self.models[0]:
            raise UsageError("strategy pipeline: forward_backward was given another model than the prepared one.")
        terms: list[list[Term]] = []
        placeholders = [[Term(torch.zeros(()), None)] for _ in work.pieces]
        for weights, _ in work.passes(placeholders):
            shares = [float(weight) for (weight,) in weights if weight is not None]
            filled = [(piece, share) for piece, share in zip(work.pieces, shares, strict=True) if piece.count]
            for _, group in groupby(filled, key=lambda pair: pair[0].count):
                terms += self._schedule(work, list(group))
            terms = self._share(terms)
            self._correct(terms, work.total)
        return _padded(terms, work.pieces)

    def _schedule(self, work: Work, group: list[tuple[Piece, float]]) -> list[list[Term]]:
        """One pass of equally long micro-batches. Returns their terms, on the last stage."""
        found: list[list[Term]] = []

        def loss(output: Tensor, number: Tensor) -> Tensor:
            piece, share = group[int(number)]
            with collectives.of_one_replica():
                terms = work.compute(_Finished(output), piece, self.device)
            found.append([Term(term.value.detach(), term.count) for term in terms])
            # A sum over counted things is divided by the examples for now (`_correct`).
            parts = [term.value * (share if term.count is None else share / piece.count) for term in terms]
            return torch.stack([part.reshape(()) for part in parts]).sum()

        rank, last = self.world.rank, self.world.size - 1
        inputs = [self._input(work, piece) for piece, _ in group] if rank == 0 else []
        forms = self._forms(inputs[0] if inputs else None)
        stage = PipelineStage(
            self._stages[rank],
            rank,
            self.world.size,
            self.device,
            input_args=(forms[rank],),
            output_args=(forms[rank + 1],),
        )
        schedule = ScheduleGPipe(stage, n_microbatches=len(group), loss_fn=loss, scale_grads=False)
        if rank == 0:
            schedule.step(torch.cat(inputs))
        elif rank == last:
            schedule.step(target=torch.arange(len(group)), losses=[])
        else:
            schedule.step()
        return found

    def _input(self, work: Work, piece: Piece) -> Tensor:
        try:
            with collectives.of_one_replica():
                work.compute(_Captured(), piece, self.device)
        except _Input as captured:
            if len(captured.args) == 1 and isinstance(captured.args[0], Tensor):
                return captured.args[0]
            raise UsageError(
                f"strategy pipeline: the closure calls the model with {len(captured.args)} arguments; it takes one "
                "tensor."
            ) from None
        raise UsageError("strategy pipeline: the closure never called the model. Call it once: output = model(input).")

    @torch.no_grad()
    def _forms(self, value: Tensor | None) -> list[Tensor]:
        """What goes into each stage and out of the last: tensors without memory.

        torch's stages would find out by running themselves on made-up data, which moves the running statistics of batch
        norms and calls the loss. In evaluation mode nothing of that happens.
        """
        forms: list[Any] = []
        for rank, stage in enumerate(self._stages):
            form = collectives.broadcast_object(
                (value.shape, value.dtype) if value is not None else None, src=max(rank - 1, 0)
            )
            assert form is not None  # the stage before it has run
            forms.append(form)
            value = None
            if rank == self.world.rank:
                training = {module: module.training for module in stage.modules()}
                value = stage.eval()(torch.zeros(form[0], dtype=form[1], device=self.device))
                for module, was in training.items():
                    module.training = was
        forms.append(
            collectives.broadcast_object(
                (value.shape, value.dtype) if value is not None else None, src=len(self._stages) - 1
            )
        )
        made = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in forms]
        return made[:1] + [form.requires_grad_() for form in made[1:]]

    def _share(self, terms: list[list[Term]]) -> list[list[Term]]:
        """Every stage's gradients and buffers, and the last one's terms, on all processes."""
        tied = set(self._tied)
        for rank, stage in enumerate(self._stages):
            parameters = [p for p in stage.parameters() if p not in tied]
            present = collectives.broadcast_object([p.grad is not None for p in parameters], src=rank)
            for p, has in zip(parameters, present, strict=True):
                p.grad = None if not has else p.grad if rank == self.world.rank else torch.empty_like(p)
            collectives.broadcast_tensors([p.grad for p in parameters if p.grad is not None], src=rank)
            collectives.broadcast_tensors(stage.buffers(), src=rank)
        if self._tied:  # a stage that does not hold one, or did not reach it, adds nothing
            held = collectives.gather_objects([p.grad is not None for p in self._tied])
            for p, anywhere in zip(self._tied, map(any, zip(*held, strict=True)), strict=True):
                if anywhere:
                    p.grad = collectives.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad)
        return collectives.broadcast_object(terms, src=self.world.size - 1)

    def _correct(self, terms: list[list[Term]], total: int) -> None:
        kinds = {term.count is None for piece in terms for term in piece}
        counted = max((len(piece) for piece in terms), default=0)
        if kinds == {True}:
            return
        if kinds == {True, False} or counted > 1:
            raise UsageError(
                "strategy pipeline: a loss of several terms with counts of their own is not there yet. Give one Total."
            )
        count = sum(float(piece[0].count or 0) for piece in terms)
        grads = [p.grad for p in self.models[0].parameters() if p.grad is not None]
        torch._foreach_mul_(grads, total / count if count else 0.0)

    def backward(
        self,
        roots: Sequence[Tensor],
        weights: Sequence[Weight],
        *,
        final: bool,
        call: int,
        inputs: Sequence[Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        raise UsageError("strategy pipeline needs the closure form: run.forward_backward(loss_fn, model, batch).")

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self.models, self.optimizers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)


def cut_layers(layers: list[nn.Module], stages: int) -> list[nn.Sequential]:
    """Layers in order, cut where the parameters before are nearest to equal parts. Raises ModelError if too few."""
    if len(layers) < stages:
        raise ModelError(
            f"strategy pipeline: the model has {len(layers)} layers, too few for {stages} stages. Start fewer "
            "processes."
        )
    sizes = [sum(p.numel() for p in layer.parameters()) + 1 for layer in layers]
    cuts, before = [0], 0
    for number, size in enumerate(sizes):
        part = len(cuts)
        left = len(layers) - number
        due = before + size / 2 > sum(sizes) * part / stages
        if part < stages and number > cuts[-1] and (due or left == stages - part):
            cuts.append(number)
        before += size
    cuts.append(len(layers))
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(cuts)]


def _check_forward(model: nn.Module) -> None:
    """Raises ModelError where a subclass of nn.Sequential does more than to call its layers, which the stages would
    leave out. The class that precision makes bears the name of its base."""
    for cls in type(model).__mro__:
        if cls is nn.Sequential:
            return
        if "forward" in vars(cls) and cls.__qualname__ != cls.__bases__[0].__qualname__:
            raise ModelError(
                f"strategy pipeline: {cls.__name__} has a forward of its own, which would be left out, since each "
                "process calls only its part of the layers. Make what it does a layer, or use strategy='ddp'."
            )


def _tied(model: nn.Module, stages: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters that stand in several stages. Raises ModelError for a buffer that does: what one stage writes
    there the others do not see."""
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    places: dict[int, list[int]] = {}
    for number, stage in enumerate(stages):
        for tensor in (*stage.parameters(), *stage.buffers()):
            places.setdefault(id(tensor), []).append(number)
    for buffer in model.buffers():
        if len(at := places.get(id(buffer), [])) > 1:
            raise ModelError(
                f"strategy pipeline: the buffer {names[id(buffer)]} stands in the stages {' and '.join(map(str, at))}, "
                "each of which would keep one of its own. Give each place its own layer, or use strategy='ddp'."
            )
    return [p for p in model.parameters() if len(places.get(id(p), [])) > 1]


def _padded(terms: list[list[Term]], pieces: Sequence[Piece]) -> list[list[Term]]:
    """Terms for every piece; those of zero-length ones count nothing."""
    left = iter(terms)
    form = terms[0]
    nothing = [Term(torch.zeros(()), None if term.count is None else 0) for term in form]
    return [next(left) if piece.count else nothing for piece in pieces]
