"""What the stages of fsdp share: an update on slices, and state that is whole in a checkpoint and sliced in memory.

A master (masters.py) is a DTensor whose memory is this rank's slice of the user's own parameter, so that it costs
nothing: what an optimizer writes to it stands in the parameter. Its gradient is the same slice of the parameter's.
Being a DTensor it has the whole parameter's shape and norm, so that an optimizer that looks at these (LAMB) makes the
update that it would make of the whole. A 0-dim parameter is too small to slice: its master is the whole, on every rank
alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from paceline.comm import dtensor
from paceline.errors import ModelError, UsageError
from paceline.strategies.masters import in_place_of
from paceline.strategies.replicated import load_replicated, parameter_names, replicated_state
from paceline.torch_private.distributed_tensor import set_local


class Masters:
    """The masters of some parameters, which it is given in any order, the same on all ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.of: dict[Tensor, Tensor] = {}
        self._hooks: list[Any] = []

    def add(self, parameter: Tensor) -> None:
        if parameter not in self.of:
            self.of[parameter] = self._slice(parameter, parameter)

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the state that the optimizer has; and, until `close`, what a script loads into it. Its own `state_dict`
        then shows slices."""
        self.take_state(optimizer)
        outside: list[Any] = []

        def enter(_: torch.optim.Optimizer) -> None:
            outside.append(in_place_of(optimizer, self.of))
            outside[-1].__enter__()

        def leave(_: torch.optim.Optimizer, __: dict[str, Any]) -> None:
            outside.pop().__exit__(None, None, None)

        self._hooks += [
            optimizer.register_state_dict_pre_hook(enter),
            optimizer.register_state_dict_post_hook(leave),
            optimizer.register_load_state_dict_post_hook(self.take_state),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """State of whole parameters that the optimizer holds: it is sliced, and belongs to the masters."""
        for parameter, master in self.of.items():
            if parameter in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(parameter)
        slice_state([(p, state) for p, state in optimizer.state.items() if dtensor.is_sharded(p)])

    def update(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The optimizer's step on slices. Returns the parameters of which other ranks hold rows that are newer."""
        given = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p in self.of]
        for p in given:
            master = self.of[p]
            if dtensor.local(master).untyped_storage().data_ptr() != p.untyped_storage().data_ptr():
                set_local(master, self._part(p.detach()))  # p.data was set anew
            master.grad = self._slice(p.grad, p)
        try:
            with in_place_of(optimizer, self.of):
                optimizer.step()
        except RuntimeError as error:
            if "placement" in str(error) or "DTensor" in str(error):
                raise UsageError(_no_rule(optimizer, error)) from error
            raise
        finally:
            for p in given:
                self.of[p].grad = None
        return [p for p in given if p.dim()]

    def _part(self, tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        shard = self.mesh.ndim - 1  # the dimension of the mesh over which they are cut
        first, last = dtensor.rows_of(tensor.size(0), self.mesh.get_local_rank(shard), self.mesh.size(shard))
        return tensor[first:last]

    def _slice(self, tensor: Tensor | None, parameter: Tensor) -> Tensor:
        assert tensor is not None
        made: Tensor = DTensor.from_local(
            self._part(tensor.detach()),
            self.mesh,
            [*[Replicate()] * (self.mesh.ndim - 1), Shard(0) if parameter.dim() else Replicate()],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return made


def _no_rule(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    return (
        f"strategy fsdp: {type(optimizer).__name__} computes something that torch's DTensor cannot compute on slices: "
        f"{str(error).splitlines()[0]} Use another optimizer (SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad, "
        "Adadelta, Adamax and ASGD of torch.optim can), or strategy='ddp'."
    )


def slice_state(states: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
    """Pairs of a sharded parameter and its state: where that is whole it becomes slices, each in memory of its own.

    A tensor of the parameter's shape is sliced as the parameter is. One of another shape, such as Adafactor's row
    means, is kept whole on every rank: DTensor computes with it as the optimizer would. Counters stay as they are.
    """
    counters = {
        key
        for p, state in states
        for key, value in state.items()
        if isinstance(value, Tensor) and not value.dim() and (p.dim() or key == "step")
    }
    for p, state in states:
        for key, value in state.items():
            if isinstance(value, Tensor) and key not in counters and not dtensor.is_sharded(value):
                state[key] = dtensor.sharded_like(p, value)


def sliced_state(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], masters: Mapping[Tensor, Tensor]
) -> dict[str, Any]:
    """The whole state by name; sharded tensors whole on rank 0, without memory on the others. Collective."""
    made: dict[int, Tensor] = {}

    def whole(node: Any) -> Any:
        if dtensor.is_sharded(node):
            if id(node) not in made:  # tied weights stay one tensor
                made[id(node)] = dtensor.whole_on_main(node)
            return made[id(node)]
        if isinstance(node, dict):
            return {key: whole(value) for key, value in node.items()}
        return [whole(item) for item in node] if isinstance(node, list) else node

    state = replicated_state(models, optimizers, masters)
    return {kind: [whole(part) for part in parts] for kind, parts in state.items()}


def load_sliced(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    masters: Mapping[Tensor, Tensor],
    state: dict[str, Any],
) -> None:
    """Takes a whole state, the same on every rank, of which this process keeps its slices."""
    names = _names(models, masters)
    owns = {name: p for p, name in names.items() if dtensor.is_sharded(p)}
    optimizer_states = []
    for saved in state["optimizers"]:  # sliced first, so that no optimizer's state lies whole on the device
        copied = {name: dict(values) for name, values in saved["state"].items()}
        slice_state([(owns[name], values) for name, values in copied.items() if name in owns])
        optimizer_states.append({**saved, "state": copied})
    whole = {**state, "optimizers": optimizer_states}
    load_replicated(models, optimizers, whole, masters)


def _names(models: Sequence[nn.Module], masters: Mapping[Tensor, Tensor]) -> dict[Tensor, str]:
    names = parameter_names(models)
    return names | {masters[p]: name for p, name in names.items() if p in masters}


def check_dense(models: Sequence[nn.Module], strategy: str = "fsdp") -> None:
    """Raises ModelError for layers whose gradients cannot be sliced."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise ModelError(
                    f"strategy {strategy}: {name or type(model).__name__} has sparse=True, and sparse gradients cannot "
                    "be sliced. Build it with sparse=False, or use strategy='ddp'."
                )
