"""What each stage of a pipeline owns, and the whole model where someone needs it.

Each parameter has one owner, the first stage that it stands in. While a pipeline trains, a process has the weights,
gradients and optimizer state of its own stage; the others' parameters are empty tensors, so that whoever reads one
gets an error and not an old value. `make_whole`, on all processes together, brings all weights and buffers from their
owners (each process receives the bytes of the model that it has not, and holds the whole until the next step).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import collectives
from paceline.comm.mesh import Mesh
from paceline.strategies.replicated import load_replicated, named_state, parameter_names, replicated_state
from paceline.strategies.unused_parameters import check_copies


class StageParameters:
    """parts: the stages, as modules. names: this process's own parameters -> their names. kept: those that its stage
    uses, of which other stages may be the owners."""

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module], mesh: Mesh, device: torch.device) -> None:
        self._model, self._mesh, self._device = model, mesh, device
        self.optimizers: list[torch.optim.Optimizer] = []
        places: dict[Tensor, list[int]] = {p: [] for p in model.parameters()}
        buffers: dict[Tensor, int] = dict.fromkeys(model.buffers(), 0)
        for number, part in enumerate(parts):
            for p in part.parameters():
                places[p].append(number)
            buffers |= dict.fromkeys(part.buffers(), number)
        self._owner = {p: at[0] if at else 0 for p, at in places.items()}  # one that no stage uses is kept by the first
        stage = mesh.coordinate("stage")
        self.kept = {p for p, at in places.items() if stage in at or self._owner[p] == stage}
        self._tied = [p for p, at in places.items() if len(at) > 1]
        self._forms = {p: (p.shape, p.stride()) for p in places}
        self._of = [
            [*(p for p, at in self._owner.items() if at == part), *(b for b, at in buffers.items() if at == part)]
            for part in range(mesh.size("stage"))
        ]
        self.names = {p: name for p, name in parameter_names([model]).items() if self._owner[p] == stage}
        self._whole = True

    def receive(self) -> None:
        """Takes rank 0's weights to the device, stage by stage; no more than a stage beside the own one is there."""
        for tensors in self._of:
            for tensor in tensors:
                tensor.data = tensor.data.to(self._device)
            collectives.broadcast_tensors(tensors)
            self._drop(tensors)
        self._whole = False

    def _drop(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor in self._owner and tensor not in self.kept:
                tensor.data = tensor.data.new_empty(0)

    def release(self) -> None:
        """Before a step: keeps what is this process's."""
        if not self._whole:
            return
        for tensors in self._of:
            self._drop(tensors)
        for optimizer in self.optimizers:
            for p in [p for p in optimizer.state if p not in self.names]:
                del optimizer.state[p]
        self._whole = False

    @torch.no_grad()
    def make_whole(self) -> None:
        """All weights and buffers, on all processes. Together on all."""
        if self._whole:
            return
        for part, tensors in enumerate(self._of):
            for tensor in tensors:
                if tensor in self._owner and tensor not in self.kept:
                    shape, stride = self._forms[tensor]
                    tensor.data = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=self._device)
            collectives.broadcast_tensors(tensors, src=self._mesh.at(stage=part), group=self._mesh.group("stage"))
        self._whole = True

    # --- parameters that stand in several stages

    @torch.no_grad()
    def sum_tied(self) -> None:
        """After a backward: the owner has the sum of the stages' gradients."""
        if not self._tied:
            return
        held = collectives.gather_objects([p.grad is not None for p in self._tied], self._mesh.group("stage"))
        for p, anywhere in zip(self._tied, map(any, zip(*held, strict=True)), strict=True):
            if anywhere:
                shape, _ = self._forms[p]
                grad = p.grad if p.grad is not None else torch.zeros(shape, dtype=p.dtype, device=self._device)
                collectives.all_reduce(grad, group=self._mesh.group("stage"))
                p.grad = grad if p in self.names else None

    @torch.no_grad()
    def share_tied(self) -> None:
        """After an update: the owner's weights in all stages that they stand in."""
        for p in self._tied:
            shape, _ = self._forms[p]
            value = p.data if p in self.kept else torch.empty(shape, dtype=p.dtype, device=self._device)
            owner = self._mesh.at(stage=self._owner[p])
            collectives.broadcast_tensors([value], src=owner, group=self._mesh.group("stage"))

    # --- state

    def state_dict(self) -> dict[str, Any]:
        check_copies(named_state(self.names, self.optimizers), self._mesh.data, [], "at a checkpoint")
        self.make_whole()
        state = replicated_state([self._model], self.optimizers)
        for optimizer in state["optimizers"]:
            optimizer["state"] = self._gathered(optimizer["state"])
        return state

    def _gathered(self, own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The optimizer state of all stages, by name."""
        found: dict[str, dict[str, Any]] = {}
        for part in range(self._mesh.size("stage")):
            mine = part == self._mesh.coordinate("stage")
            form = {n: {k: _Slot.of(v) for k, v in values.items()} for n, values in own.items()} if mine else {}
            form = collectives.broadcast_object(form, src=self._mesh.at(stage=part), group=self._mesh.group("stage"))
            values = own if mine else {n: {k: _Slot.made(v) for k, v in vs.items()} for n, vs in form.items()}
            tensors = [v for n, vs in form.items() for k in vs if isinstance(v := values[n][k], Tensor)]
            collectives.broadcast_tensors(tensors, src=self._mesh.at(stage=part), group=self._mesh.group("stage"))
            found |= values
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.make_whole()
        load_replicated([self._model], self.optimizers, state)


class _Slot:
    """The place of a tensor in a tree that travels without its tensors."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    @staticmethod
    def of(value: Any) -> Any:
        return _Slot(value.shape, value.dtype) if isinstance(value, Tensor) else value

    @staticmethod
    def made(value: Any) -> Any:
        return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, _Slot) else value
