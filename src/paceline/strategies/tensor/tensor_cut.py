"""Splits layers of prepared models along the mesh dimension `tensor`, for the strategies tensor and fsdp+tensor.

Between a column and a row layer activations are DTensors. torch computes each operation on a DTensor as on the whole
tensor (a view into heads, a softmax over them, a norm over the split features), or raises if it does not support the
operation. So a plan can be slow, or refused, but not wrong. While a run with this strategy is open, whole tensors that
are combined with split tensors (masks, other parameters) count as replicated: they are the same on all devices of the
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from paceline.comm.mesh import Mesh, world_group
from paceline.errors import ModelError, warn
from paceline.strategies.kit.dtensor_context import dtensor_context
from paceline.strategies.kit.outputs import mapped
from paceline.strategies.kit.sharded_state import shard_loaded
from paceline.strategies.tensor import tensor_layers, tensor_plan
from paceline.torch_private.core import parameters_of


def _style(kind: str, module: nn.Module) -> ParallelStyle:
    if kind == "row":
        return RowwiseParallel(input_layouts=Replicate())  # each device uses its part of a whole input
    if kind == "gather":
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel(use_local_output=False)


class LayerCuts:
    """The split layers of a run. Their parameters are DTensors on the mesh dimension `tensor`.

    patterns: the plan; if empty, a plan is found in the models.
    """

    def __init__(self, mesh: Mesh, device: torch.device, patterns: Mapping[str, str]) -> None:
        self._mesh, self._device, self._patterns = mesh, device, patterns
        self._known: set[nn.Module] = set()  # models that were split
        self._placed: set[Tensor] = set()  # parameters with a hook that sets their gradients' placements
        self._matched: set[str] = set()  # patterns that fit a layer
        self._hooks: list[Any] = []
        self._context = dtensor_context(mesh.along("tensor"))
        self._context.__enter__()

    def cut(self, models: Sequence[nn.Module]) -> dict[Tensor, Tensor]:
        """Split new models. Returns old parameter -> new parameter. Collective."""
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
        """From now on give each gradient of these parameters the parameter's placements."""
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
                    f"can be split are: {', '.join(layers[:12])}{' ...' if len(layers) > 12 else ''}. `*` matches one "
                    "part of a name. Prepare all models together."
                )
            return plans
        found = [tensor_plan.found(model, size) for model in models]
        if models and not self._known and not any(plan for plan, _ in found):
            passed = [line for _, lines in found for line in lines]
            why = "Left whole: " + "; ".join(passed[:3]) if passed else "No such block was found."
            raise ModelError(
                f"strategy tensor: found nothing in {', '.join(type(model).__name__ for model in models)} to split "
                f"over {size} devices. It looks for MLPs (Linear, activation, Linear), attention blocks (q, k, v, "
                f"out) and grouped convolutions. {why} Name the layers to split: "
                "plan=encoder.*.up:column,encoder.*.down:row; or use strategy='ddp'."
            )
        left = [line for _, lines in found for line in lines]
        if left and self._mesh.rank == 0:
            more = f"; and {len(left) - 2} more" if len(left) > 2 else ""
            warn(f"strategy tensor: left whole: {'; '.join(left[:2])}{more}")
        return [plan for plan, _ in found]

    def _cut(self, module: nn.Module, kind: str, replaced: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Split one layer, so that the device holds at most one whole layer at a time. Returns old parameter -> new
        parameter. replaced: the same for earlier layers. If a parameter is tied to an earlier layer, its new parameter
        is used."""
        before = {name: p for name, p in parameters_of(module).items() if p is not None}
        tied = {name: replaced[p] for name, p in before.items() if p in replaced}
        parameters_of(module).update(tied)
        own = {name: p for name, p in parameters_of(module).items() if p is not None and name not in tied}
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            module.to(self._device)
            world_group().broadcast_tensors(own.values())
        if isinstance(module, (nn.Linear, nn.Embedding)) and kind != "qkv":
            parallelize_module(module, self._mesh.along("tensor"), _style(kind, module), src_data_rank=None)
        else:
            tensor_layers.cut(module, kind, self._mesh.along("tensor"))
        parameters_of(module).update(tied)
        self._hooks.append(module.register_forward_hook(_fix_output))
        after = {name: parameters_of(module)[name] for name in before}
        return {p: new for name, p in before.items() if (new := after[name]) is not None}


def _replace_tied(model: nn.Module, replaced: Mapping[Tensor, Tensor]) -> None:
    """Replace all other uses of the old parameters (tied weights), even in layers that are not split: operations on a
    DTensor compute the same as on the whole tensor."""
    for module in model.modules():
        for name, p in parameters_of(module).items():
            if p is not None and p in replaced:
                parameters_of(module)[name] = replaced[p]


def _fix_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A hook for split layers. An empty output is made whole, since torch (2.13, `view_groups`) hangs in a reshape of
    an empty split tensor. A whole output gets a whole gradient, even if it was combined with a split tensor."""
    if isinstance(output, DTensor):
        if output.numel():
            return output
        part = output.to_local()
        return part.new_zeros(output.shape) + part.sum()  # zeros, connected to the graph
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    return output


def _whole_outputs(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A hook for models: make their outputs whole."""
    return mapped(outputs, DTensor, lambda t: t.full_tensor())


def _placed_as(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a hook that gives the parameter's gradient the placements of the parameter."""

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
    """Whether the processes along the mesh dimension `tensor` hold different parts of this tensor."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return "tensor" in names and not tensor.placements[names.index("tensor")].is_replicate()


def explained(error: Exception, remedy: str) -> ModelError | None:
    """A better error if torch does not support an operation on a split tensor; None for other errors."""
    text = str(error)
    if "harding propagation failed" not in text and "sharding strategy registered" not in text:
        return None
    return ModelError(
        f"strategy tensor: torch does not support this operation on a tensor that is split over devices: "
        f"{text.splitlines()[0]}. {remedy}"
    )
