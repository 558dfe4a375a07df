"""The stages of a pipeline, which is split between layer calls (`pipeline_calls.py`).

All stages of a shard have the same examples, so they make the same records without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.mesh import Mesh, world_group
from paceline.data.bundle import Piece
from paceline.errors import ModelError, PacelineError, UsageError
from paceline.strategies.base import Term, Work
from paceline.strategies.pipeline.pipeline_calls import Calls, Cut, Record, form_of
from paceline.strategies.pipeline.pipeline_cut import boundaries
from paceline.strategies.pipeline.pipeline_loss import Losses, Share, on_one_stage
from paceline.strategies.pipeline.pipeline_schedule import Schedules
from paceline.strategies.pipeline.stage_parameters import StageParameters

LOSS = torch.float32
"""The dtype of the loss that the last stage passes to torch's schedule. The schedule's backward starts with a gradient
of 1."""

MOST_RECORDS = 256
"""Number of records to keep. Each form of examples needs a record."""


class Stages:
    """Splits a model into stages, and runs this process's stage."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, device: torch.device, schedules: Schedules, losses: Losses
    ) -> None:
        self._model, self._mesh, self._device = model, mesh, device
        self._schedules, self._losses = schedules, losses
        self._calls = Calls(model, device)
        self._records: dict[Any, Record] = {}  # by the form of the examples, the mode and the backward call
        self._used: list[set[Tensor]] = []  # for each stage, the parameters that it keeps
        self._checked: dict[int, Record] = {}  # id -> record whose stages need only kept parameters
        self._chosen: list[Cut] = []  # the cuts of the first record at which stages 1, 2, ... begin
        self._stage = _Stage()

    @property
    def running(self) -> bool:
        return self._calls.running

    # --- the cut

    def cut(self, work: Work, cut: str, by_cost: bool) -> list[nn.Module]:
        """Choose where the stages begin, with the first micro-batch. Returns a module for each stage, with the stage's
        parameters and buffers. Raises ModelError or SettingError."""
        with self._calls.intercepted():
            return self._cut(work, cut, by_cost)

    def _cut(self, work: Work, cut: str, by_cost: bool) -> list[nn.Module]:
        piece = next((piece for piece in work.pieces if piece.count), work.pieces[0])
        record = self._record(work, piece)
        names = self._calls.stretches(record)
        if not record.cuts:
            raise ModelError(
                f"strategy pipeline: the forward of {type(self._model).__name__} has no layer call at which only a "
                "single tensor is needed later. Build it from blocks that are called one after the other, each with "
                "the result of the previous one, or use another strategy, such as ddp."
            )
        sizes = self._seconds(work, piece, record) if by_cost and not cut else self._calls.sizes(record)
        where = boundaries(names, self._mesh.size("stage"), cut, sizes)
        chosen = world_group().broadcast([record.cuts[start - 1].call for start in where[1:-1]])
        by_call = {found.call: found for found in record.cuts}
        if not by_call.keys() >= set(chosen):
            raise ModelError(
                "strategy pipeline: the layer calls at which the model can be split differ between ranks, because "
                "their examples differ. Call the same layers in the same order for all examples, or use "
                "strategy='ddp'."
            )
        self._chosen = [by_call[call] for call in chosen]
        parts = self._calls.holdings(record, self._chosen)
        self._used = [set(part.parameters()) for part in parts]
        self._used[0] |= {p for p in self._model.parameters() if not any(p in used for used in self._used)}
        return parts

    def _record(self, work: Work, piece: Piece) -> Record:
        key = (form_of(piece.batch), self._model.training, torch.is_autocast_enabled(self._device.type), work.call)
        if key not in self._records:
            if len(self._records) >= MOST_RECORDS:
                self._records.clear()
                self._checked.clear()
            with on_one_stage():
                self._records[key] = self._calls.record(partial(work.compute, self._model, piece, self._device))
        return self._records[key]

    def _seconds(self, work: Work, piece: Piece, record: Record) -> list[float]:
        """Seconds of each part's forward on rank 0: the minimum of a few trials, in evaluation mode."""
        modes = {module: module.training for module in self._model.modules()}
        trials = []
        for _ in range(3 if self._mesh.rank == 0 else 0):
            with torch.no_grad(), on_one_stage(), torch.random.fork_rng(devices=[]):
                self._model.eval()
                with self._calls.seconds(record.cuts) as seconds:
                    work.compute(self._model, piece, self._device)
                trials.append(seconds)
        for module, was in modes.items():
            module.training = was
        sizes: list[float] = world_group().broadcast([min(times) for times in zip(*trials, strict=True)])
        return sizes

    # --- the step

    def compute(self, work: Work, shares: Sequence[Share], key: int, parameters: StageParameters) -> list[list[Term]]:
        """Run forwards and backwards of the micro-batches. Returns their terms on the last stage, otherwise []."""
        with self._calls.intercepted():
            return self._compute(work, shares, key, parameters)

    def _compute(self, work: Work, shares: Sequence[Share], key: int, parameters: StageParameters) -> list[list[Term]]:
        mesh = self._mesh
        groups = [list(group) for _, group in groupby(shares, key=lambda share: form_of(share[0].batch))]
        records = [self._record(work, group[0][0]) for group in groups]
        for record in records:
            self._check(record)
        parameters.free_others()
        with self._calls.placeholder_parameters(parameters.used):
            inverse = {}
            if self._schedules.last:

                def counted(number: int, piece: Piece) -> list[Term]:
                    seed(key, self._device)
                    compute = partial(work.compute, self._model, piece, self._device)
                    with on_one_stage():
                        terms: list[Term] = self._calls.zeros(records[number], compute)
                    return terms

                inverse = self._losses.inverse_counts(work, groups, counted)
            terms: list[list[Term]] = []
            with mesh.computing(mesh.layers):
                for group, record in zip(groups, records, strict=True):
                    for chosen in self._schedules.passes(group):
                        terms += self._pass(work, chosen, record, key, inverse)
        return terms

    def _pass(
        self, work: Work, group: Sequence[Share], record: Record, key: int, inverse: dict[int, Tensor]
    ) -> list[list[Term]]:
        """Run micro-batches of one form through the stages. Returns the same as `compute`."""
        part = self._mesh.coordinate("stage")
        entry, exit = self._all_ends(record)[part : part + 2]
        found: list[list[Term]] = []

        def reseed() -> None:
            # Each stage draws different random numbers. Before the stage begins, draws are the same on all stages.
            seed(torch.default_generator.initial_seed() ^ part * 0x9E3779B97F4A7C15 % 2**63, self._device)

        def run(received: Tensor, number: int) -> Tensor:
            share = group[number]
            seed(key, self._device)
            compute = partial(work.compute, self._model, share[0], self._device)
            with on_one_stage():
                result = self._calls.stretch(record, entry and (entry, received), exit, reseed, compute)
            if exit is not None:
                output: Tensor = result
                return output
            found.append([term.detached() for term in result])
            return self._losses.weighted(work.call, result, share, inverse).reshape(1).to(LOSS)

        self._stage.run = run
        forms = (_meta(entry, torch.int64), _meta(exit, LOSS))
        try:
            self._schedules.run(self._stage, forms, len(group), _sum_of_loss)
        except RuntimeError as error:  # torch wraps errors of a stage's forward
            if isinstance(error.__cause__, (PacelineError, TypeError, ValueError)):
                raise error.__cause__ from None
            raise
        return found

    def _check(self, record: Record) -> None:
        """Raises UsageError on all stages if a stage would use a parameter that was not kept for it at the split."""
        if id(record) in self._checked:
            return
        ends = self._all_ends(record)
        for part, (start, end) in enumerate(pairwise(ends)):
            lacking = self._calls.lacking(record, start, end, self._used[part])
            if lacking:
                raise UsageError(
                    f"strategy pipeline: this call uses {', '.join(lacking[:3])} in stage {part}, which did not use it "
                    "in the first call, when the model was split. Use the same parameters in every call, or use "
                    "strategy='ddp'."
                )
        self._checked[id(record)] = record

    def _all_ends(self, record: Record) -> list[Cut | None]:
        """The calls where stages begin and end, for examples of this form. The closure's start and end are None."""
        by_call = {cut.call: cut for cut in record.cuts}
        ends: list[Cut | None] = [None, *(by_call.get(cut.call) for cut in self._chosen), None]
        missing = [cut.name for cut, found in zip(self._chosen, ends[1:-1], strict=True) if found is None]
        if missing:
            raise UsageError(
                f"strategy pipeline: a stage begins with {missing[0]}, but for these examples, unlike the first, more "
                "than one tensor is needed after it. Call the same layers in the same order for all examples, or use "
                "strategy='ddp'."
            )
        return ends


def _meta(cut: Cut | None, dtype: torch.dtype) -> Tensor:
    """A "meta" tensor with the form of the tensor that is sent at a cut. Without a cut: shape (1,) and this dtype."""
    shape, dtype = ((1,), dtype) if cut is None else (cut.shape, cut.dtype)
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(dtype.is_floating_point)


def _sum_of_loss(loss: Tensor, _: Tensor) -> Tensor:
    return loss.sum()


class _Stage(nn.Module):
    """The module that torch's schedule calls."""

    run: Callable[[Tensor, int], Tensor]  # (received tensor, number of the micro-batch) -> tensor to send

    def forward(self, received: Tensor, number: Tensor) -> Tensor:
        return self.run(received, int(number))


def seed(key: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)
    elif device.type != "cpu":
        torch.get_device_module(device).manual_seed(key)
