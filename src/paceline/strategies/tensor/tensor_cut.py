"""Cuts layers of prepared models over the processes along `tensor`: for tensor, and for fsdp+tensor.

Between a column and a row layer activations are DTensors. torch computes each operation on one as on the whole tensor
(a view into heads, a softmax over them, a norm over the cut features), or raises where it does not know the operation.
So a plan can be slow, or refused, but not wrong. Whole tensors that meet a cut one (masks, other parameters) count as
replicated while a run with this strategy is open: they are the same on all devices of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from paceline.comm import collectives
from paceline.comm.mesh import Mesh
from paceline.errors import ModelError, warn
from paceline.strategies.kit.dtensor_context import dtensor_context
from paceline.strategies.kit.outputs import mapped
from paceline.strategies.kit.sharded_state import shard_loaded
from paceline.strategies.tensor import tensor_layers, tensor_plan
from paceline.torch_private.core import parameters_of


def _style(kind: str, module: nn.Module) -> ParallelStyle:
    if kind == "row":
        return RowwiseParallel(input_layouts=Replicate())  # it uses its own part of a whole input
    if kind == "gather":
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel(use_local_output=False)


class LayerCuts:
    """The cut layers of a run. Their parameters become DTensors along `tensor`. patterns: the plan; where it is empty a
    plan is found in the models."""

    def __init__(self, mesh: Mesh, device: torch.device, patterns: Mapping[str, str]) -> None:
        self._mesh, self._device, self._patterns = mesh, device, patterns
        self._known: set[nn.Module] = set()  # models that were cut
        self._placed: set[Tensor] = set()  # parameters whose gradients get their placements
        self._matched: set[str] = set()  # patterns that fit a layer
        self._hooks: list[Any] = []
        self._context = dtensor_context(mesh.along("tensor"))
        self._context.__enter__()

    def cut(self, models: Sequence[nn.Module]) -> dict[Tensor, Tensor]:
        """Cuts new models. Returns their old parameters -> the new ones. Collective."""
        new = [model for model in models if model not in self._known]
        replaced: dict[Tensor, Tensor] = {}
        for model, plan in zip(new, self._plans(new), strict=True):
            for module, kind in plan.values():
                replaced |= self._cut(module, kind, replaced)
            _replace_tied(model, replaced)
            self._hooks.append(model.register_forward_hook(_whole_outputs))
            self._hooks.append(model.register_load_state_dict_pre_hook(shard_loaded))
            self._known.add(model)
        return replaced

    def place_gradients(self, parameters: Iterable[Tensor]) -> None:
        """From now on each gradient of these is cut as its parameter is, and whole where that is whole."""
        for p in parameters:
            if p.requires_grad and p not in self._placed:
                self._placed.add(p)
                self._hooks.append(p.register_hook(_placed_as(p)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._context.__exit__(None, None, None)

    def _plans(self, models: Sequence[nn.Module]) -> list[tensor_plan.Plan]:
        size = self._mesh.size("tensor")
        if self._patterns:
            plans = []
            for model in models:
                plan, used = tensor_plan.matched(model, self._patterns, size)
                self._matched |= used
                plans.append(plan)
            missing = [pattern for pattern in self._patterns if pattern not in self._matched]
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
            warn(f"strategy tensor: left whole: {'; '.join(left[:2])}{more}")
        return [plan for plan, _ in found]

    def _cut(self, module: nn.Module, kind: str, replaced: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Cuts one layer, so that one layer at a time is whole on the device. Returns its old parameters -> the new
        ones. replaced: those of layers that were cut before; tied ones among them are used here too."""
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
        self._hooks.append(module.register_forward_hook(_fix_output))
        after = {name: parameters_of(module)[name] for name in before}
        return {p: new for name, p in before.items() if (new := after[name]) is not None}


def _replace_tied(model: nn.Module, replaced: Mapping[Tensor, Tensor]) -> None:
    """Puts the new parameters wherever the old ones stand too (tied weights), also into layers that are not cut: a
    DTensor computes as the whole tensor."""
    for module in model.modules():
        for name, p in parameters_of(module).items():
            if p is not None and p in replaced:
                parameters_of(module)[name] = replaced[p]


def _fix_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A hook for cut layers. An output without elements becomes whole, since torch (2.13, `view_groups`) never returns
    from a reshape of a cut one. A whole output gets a whole gradient, also where it met a cut tensor."""
    if isinstance(output, DTensor):
        if output.numel():
            return output
        part = output.to_local()
        return part.new_zeros(output.shape) + part.sum()  # zero, and part of the graph
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    return output


def _whole_outputs(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A hook for models: what they return is whole."""
    return mapped(outputs, DTensor, lambda t: t.full_tensor())


def _placed_as(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """A hook for a parameter: its gradient gets its placements."""

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
    """A better error for torch's about an operation that it cannot compute on a cut tensor; None for others."""
    text = str(error)
    if "harding propagation failed" not in text and "sharding strategy registered" not in text:
        return None
    return ModelError(
        f"strategy tensor: torch cannot compute this operation on a tensor that is cut over devices: "
        f"{text.splitlines()[0]}. {remedy}"
    )
