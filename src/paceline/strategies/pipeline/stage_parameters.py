"""Keeps the parameters of one pipeline stage, and gathers the whole model when it is needed.

Each parameter has one owner, the first stage that uses it. While a pipeline trains, a process has the weights,
gradients and optimizer state of its stage. Parameters of other stages are empty tensors, so reading one raises an error
instead of returning an outdated value. `gather_weights` broadcasts all weights and buffers from their owners.
Each process then holds the whole model until the next step. All processes call it together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.mesh import Mesh, world_group
from paceline.comm.slices import NATIVE_DTYPES, Box, HeldTensor, whole_box
from paceline.strategies.kit.named_parameters import load_replicated, named_state, parameter_names, replicated_state
from paceline.strategies.kit.unused_parameters import check_copies


class StageParameters:
    """The parameters of this process's stage. stages: for each stage, a module with its parameters and buffers."""

    def __init__(self, model: nn.Module, stages: Sequence[nn.Module], mesh: Mesh, device: torch.device) -> None:
        self._model, self._mesh, self._device = model, mesh, device
        self.optimizers: Sequence[torch.optim.Optimizer] = []
        users: dict[Tensor, list[int]] = {p: [] for p in model.parameters()}
        buffers: dict[Tensor, int] = dict.fromkeys(model.buffers(), 0)
        for number, module in enumerate(stages):
            for p in module.parameters():
                users[p].append(number)
            buffers |= dict.fromkeys(module.buffers(), number)
        self._owner = {p: using[0] if using else 0 for p, using in users.items()}  # stage 0 owns the unused
        stage = mesh.coordinate("stage")
        # The parameters that this stage uses; other stages may own some of them.
        self.used = {p for p, using in users.items() if stage in using or self._owner[p] == stage}
        self._tied = [p for p, using in users.items() if len(using) > 1]  # used by several stages
        self._forms = {p: (p.shape, p.stride()) for p in users}
        self._owner_of = owners = self._owner | buffers
        # For each stage, the parameters and buffers that it owns.
        self._tensors = [[t for t, owner in owners.items() if owner == n] for n in range(mesh.size("stage"))]
        # The parameters that this process's stage owns -> their names.
        self.names = {p: name for p, name in parameter_names([model]).items() if self._owner[p] == stage}
        self._whole = True  # whether this process holds the whole model

    def receive(self) -> None:
        """Receive rank 0's weights stage by stage, so that the device never holds more than one stage besides this
        process's stage."""
        for tensors in self._tensors:
            for tensor in tensors:
                tensor.data = tensor.data.to(self._device)
            world_group().broadcast_tensors(tensors)
            self._empty(tensors)
        self._whole = False

    def _empty(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor in self._owner and tensor not in self.used:
                tensor.data = tensor.data.new_empty(0)

    def free_others(self) -> None:
        """Before a step: free the weights and the optimizer state of other stages."""
        if not self._whole:
            return
        for tensors in self._tensors:
            self._empty(tensors)
        for optimizer in self.optimizers:
            for p in [p for p in optimizer.state if p not in self.names]:
                del optimizer.state[p]
        self._whole = False

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Send all weights and buffers to all processes. Collective."""
        if self._whole:
            return
        for part, tensors in enumerate(self._tensors):
            for tensor in tensors:
                if tensor in self._owner and tensor not in self.used:
                    shape, stride = self._forms[tensor]
                    tensor.data = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=self._device)
            self._mesh.group("stage").broadcast_tensors(tensors, src=self._mesh.at(stage=part))
        self._whole = True

    # --- parameters that several stages use

    @torch.no_grad()
    def sum_tied(self) -> None:
        """After a backward: sum the gradients of each tied parameter over the stages. Only the owner keeps the sum."""
        if not self._tied:
            return
        with_gradient = self._mesh.group("stage").gather([p.grad is not None for p in self._tied])
        for p, anywhere in zip(self._tied, map(any, zip(*with_gradient, strict=True)), strict=True):
            if anywhere:
                shape, _ = self._forms[p]
                grad = p.grad if p.grad is not None else torch.zeros(shape, dtype=p.dtype, device=self._device)
                self._mesh.group("stage").all_reduce(grad)
                p.grad = grad if p in self.names else None

    @torch.no_grad()
    def share_tied(self) -> None:
        """After an update: send the weights of each tied parameter from the owner to all stages that use it."""
        for p in self._tied:
            shape, _ = self._forms[p]
            value = p.data if p in self.used else torch.empty(shape, dtype=p.dtype, device=self._device)
            owner = self._mesh.at(stage=self._owner[p])
            self._mesh.group("stage").broadcast_tensors([value], src=owner)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        check_copies(named_state(self.names, self.optimizers), self._mesh.data, [], "at a checkpoint")
        self.gather_weights()
        state = replicated_state([self._model], self.optimizers)
        for optimizer in state["optimizers"]:
            optimizer["state"] = self._gathered(optimizer["state"])
        return state

    def held_state(self) -> dict[str, Any] | None:
        """`state_dict` with the tensors of this stage only: each of them is a HeldTensor. Collective."""
        if any(tensor.dtype not in NATIVE_DTYPES for tensor in self._owner_of):
            return None
        check_copies(named_state(self.names, self.optimizers), self._mesh.data, [], "at a checkpoint")
        with self._in_shape():
            state = replicated_state([self._model], self.optimizers)
            entries = self._model.state_dict(keep_vars=True)
        state["models"] = [{name: self._held(value) for name, value in entries.items()}]
        for optimizer in state["optimizers"]:
            own = {name: values for name, values in optimizer["state"].items() if name in self.names.values()}
            optimizer["state"] = self._held_states(own)
        return state

    @contextmanager
    def _in_shape(self) -> Iterator[None]:
        """Within the block, parameters of other stages have their shapes, but no memory and no values."""
        others = [] if self._whole else [p for p in self._owner if p not in self.used]
        for p in others:
            p.data = p.data.new_empty(()).expand(self._forms[p][0])
        try:
            yield
        finally:
            self._empty(others)

    def _held(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value not in self._owner_of:
            return value
        shape, stride = self._forms.get(value, (value.shape, value.stride()))
        meta = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
        return HeldTensor(meta, value.detach(), self._boxes(shape, self._owner_of[value]))

    def _boxes(self, shape: Sequence[int], owner: int) -> list[Box]:
        """The boxes that this process writes of a tensor of stage `owner`. The first data shard writes."""
        writes = owner == self._mesh.coordinate("stage") and self._mesh.data.rank == 0
        return whole_box(shape) if writes else []

    def _held_states(self, own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The optimizer state of all stages, by name. Tensors other than numbers are HeldTensors."""

        def form(value: Any) -> Any:
            return {"size": tuple(value.shape), "stride": value.stride(), "dtype": value.dtype}

        def apart(value: Any) -> bool:
            return isinstance(value, Tensor) and value.dim() > 0 and value.dtype in NATIVE_DTYPES

        described = {
            name: [(key, apart(value), form(value) if apart(value) else value) for key, value in values.items()]
            for name, values in own.items()
        }
        found: dict[str, dict[str, Any]] = {}
        for stage, names in enumerate(self._mesh.group("stage").gather(described, "the state of an optimizer")):
            for name, rows in names.items():
                found[name] = {}
                for key, is_apart, value in rows:
                    if is_apart:
                        meta = torch.empty_strided(**value, device="meta")  # of these sizes, strides and dtype
                        local = own[name][key] if name in own else meta
                        value = HeldTensor(meta, local, self._boxes(meta.shape, stage))
                    found[name][key] = value
        return found

    def _gathered(self, own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The optimizer state of all stages, by name."""
        found: dict[str, dict[str, Any]] = {}
        for part in range(self._mesh.size("stage")):
            mine = part == self._mesh.coordinate("stage")
            source, group = self._mesh.at(stage=part), self._mesh.group("stage")
            found |= group.broadcast(own if mine else {}, source, "the state of an optimizer")
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gather_weights()
        load_replicated([self._model], self.optimizers, state)
