"""Cuts layers of prepared models over the processes along `tensor`: for tensor, and for fsdp over it.

What is between a column and a row layer is a DTensor, that knows that it is cut: torch computes each operation on it as
on the whole (a view into heads, a softmax over them, a norm over the cut features) or raises for one that it does not
know. So a plan can be slow, or refused, but not wrong. Whole tensors that meet a cut one (masks, other parameters) are
the same on all devices of the group: they count as such while a run with this strategy is open.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from paceline.comm import collectives
from paceline.comm.mesh import Mesh
from paceline.errors import ModelError
from paceline.strategies import tensor_layers, tensor_plan
from paceline.strategies.dtensor_context import surroundings
from paceline.strategies.outputs import mapped
from paceline.torch_private.core import parameters_of


def _style(kind: str, module: nn.Module) -> ParallelStyle:
    if kind == "row":
        return RowwiseParallel(input_layouts=Replicate())  # of a whole input its own part is taken
    if kind == "gather":
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel(use_local_output=False)


class LayerCuts:
    """The cut layers of a run, whose parameters become DTensors along `tensor`. patterns: the plan; found in the models
    where it is empty."""

    def __init__(self, mesh: Mesh, device: torch.device, patterns: Mapping[str, str]) -> None:
        self._mesh, self._device, self._patterns = mesh, device, patterns
        self._known: set[nn.Module] = set()  # models that were cut
        self._placed: set[Tensor] = set()  # whose gradients are placed as they are
        self._used: set[str] = set()  # patterns that fit a layer
        self._hooks: list[Any] = []
        self._surroundings = surroundings(mesh.along("tensor"))
        self._surroundings.__enter__()

    def cut(self, models: Sequence[nn.Module]) -> dict[Tensor, Tensor]:
        """Cuts those of these models that are new. Returns their old parameters -> the new ones. Collective."""
        new = [model for model in models if model not in self._known]
        replaced: dict[Tensor, Tensor] = {}
        for model, plan in zip(new, self._plans(new), strict=True):
            for module, kind in plan.values():
                replaced |= self._cut(module, kind, replaced)
            _follow(model, replaced)
            self._hooks.append(model.register_forward_hook(_whole_outputs))
            self._known.add(model)
        return replaced

    def place_gradients(self, parameters: Iterable[Tensor]) -> None:
        """From now on the gradients of these are cut as they are, and whole where they are whole."""
        for p in parameters:
            if p.requires_grad and p not in self._placed:
                self._placed.add(p)
                self._hooks.append(p.register_hook(_placed_as(p)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._surroundings.__exit__(None, None, None)

    def _plans(self, models: Sequence[nn.Module]) -> list[tensor_plan.Plan]:
        size = self._mesh.size("tensor")
        if self._patterns:
            plans = []
            for model in models:
                plan, used = tensor_plan.matched(model, self._patterns, size)
                self._used |= used
                plans.append(plan)
            missing = [pattern for pattern in self._patterns if pattern not in self._used]
            if missing and models:
                layers = [name for m in models for name, part in m.named_modules() if tensor_plan.can_be_cut(part)]
                raise ModelError(
                    f"strategy tensor: plan: {', '.join(missing)} fits no layer of the prepared model. Its layers that "
                    f"can be cut are: {', '.join(layers[:12])}{' ...' if len(layers) > 12 else ''}. `*` stands for one "
                    "part of a name; prepare all models together."
                )
            return plans
        found = [tensor_plan.found(model, size) for model in models]
        if models and not self._known and not any(plan for plan, _ in found):
            passed = [line for _, lines in found for line in lines]
            why = "Left whole: " + "; ".join(passed[:3]) if passed else "No such block was found."
            raise ModelError(
                f"strategy tensor: nothing of {', '.join(type(model).__name__ for model in models)} can be cut over "
                f"{size} devices: it looks for MLPs (Linear, activation, Linear), attention blocks (q, k, v, out) and "
                f"grouped convolutions. "
                f"{why} Name the layers: plan=encoder.*.up:column,encoder.*.down:row; or use strategy='ddp'."
            )
        left = [line for _, lines in found for line in lines]
        if left and self._mesh.rank == 0:
            more = f"; and {len(left) - 2} more" if len(left) > 2 else ""
            warnings.warn(f"strategy tensor: left whole: {'; '.join(left[:2])}{more}", stacklevel=4)
        return [plan for plan, _ in found]

    def _cut(self, module: nn.Module, kind: str, replaced: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Cuts one layer, which so is the only one that is whole on the device at a time. Returns its old parameters
        -> the new ones. replaced: those of the layers that were cut before; one that stands here too is cut alike."""
        before = {name: p for name, p in parameters_of(module).items() if p is not None}
        tied = {name: replaced[p] for name, p in before.items() if p in replaced}
        parameters_of(module).update(tied)
        module.to(self._device)
        own = {name: p for name, p in parameters_of(module).items() if p is not None and name not in tied}
        collectives.broadcast_tensors(own.values())
        if isinstance(module, (nn.Linear, nn.Embedding)) and kind != "qkv":
            parallelize_module(module, self._mesh.along("tensor"), _style(kind, module), src_data_rank=None)
        else:
            tensor_layers.cut(module, kind, self._mesh.along("tensor"))
        parameters_of(module).update(tied)
        self._hooks.append(module.register_forward_hook(_mended))
        after = {name: parameters_of(module)[name] for name in before}
        return {p: new for name, p in before.items() if (new := after[name]) is not None}


def _follow(model: nn.Module, replaced: Mapping[Tensor, Tensor]) -> None:
    """The new parameters wherever the old ones stand too (tied weights), also in layers that are not cut themselves: a
    DTensor counts as the whole in whatever is computed with it."""
    for module in model.modules():
        for name, p in parameters_of(module).items():
            if p is not None and p in replaced:
                parameters_of(module)[name] = replaced[p]


def replace(optimizer: torch.optim.Optimizer, replaced: Mapping[Tensor, Tensor]) -> None:
    """The new parameters in the place of the old ones, with what state these had."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state and isinstance(new, DTensor):
            optimizer.state[new] = {
                key: distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
                if isinstance(value, Tensor) and value.shape == old.shape
                else value
                for key, value in optimizer.state.pop(old).items()
            }


def _mended(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A cut layer's output. Of no examples it is whole: torch (2.13, `view_groups`) never returns from a reshape of a
    cut tensor without elements. One that is whole gets a whole gradient, also where it met a cut tensor."""
    if isinstance(output, DTensor):
        if output.numel():
            return output
        part = output.to_local()
        return part.new_zeros(output.shape) + part.sum()  # zero, and on the way of the gradient
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    return output


def _whole_outputs(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """What a model gives to the user is whole."""
    return mapped(outputs, DTensor, lambda t: t.full_tensor())


def _placed_as(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """A hook: a gradient cut as its parameter is; whole for a whole one that met a cut tensor."""

    def hook(gradient: Tensor) -> Tensor:
        if not isinstance(gradient, DTensor):
            return gradient
        if not isinstance(parameter, DTensor):
            return gradient.full_tensor()
        if gradient.placements == parameter.placements:
            return gradient
        return gradient.redistribute(placements=parameter.placements)

    return hook


def is_cut(tensor: Tensor) -> bool:
    """Whether the processes along `tensor` have other parts of it."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return "tensor" in names and not tensor.placements[names.index("tensor")].is_replicate()


def explained(error: Exception, remedy: str) -> ModelError | None:
    """For what torch says of an operation that it cannot compute on a cut tensor."""
    text = str(error)
    if "harding propagation failed" not in text and "sharding strategy registered" not in text:
        return None
    return ModelError(
        f"strategy tensor: torch cannot compute this operation on a tensor that is cut over devices: "
        f"{text.splitlines()[0]}. {remedy}"
    )
