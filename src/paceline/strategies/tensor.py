"""tensor: every device of a group gets the same examples and computes another part of the same layers.

    4 processes, size=2                 up (column)        down (row)
      shard 0:  rank 0                  rows 0..k/2        columns 0..k/2      } the same examples, another
                rank 1                  rows k/2..k        columns k/2..k      } half of each cut layer
      shard 1:  ranks 2 and 3           as ranks 0 and 1, of other examples

Phase 1, forward: a layer cut by columns takes whole activations and gives the part of its outputs that is its own; what
  stands between works on that part; a layer cut by rows multiplies it with its columns, and the parts are added by an
  all-reduce. Layers that are not cut compute the same on each device of the group.
Phase 2, backward: the same the other way round: the gradient of a column layer's input is all-reduced over the group.
Phase 3, reduce, in the last micro-batch: gradients of cut parameters are summed over the groups; of the others over all
  processes and divided by the group's size (they are equal within a group, up to what a device's kernels leave open;
  so the copies cannot drift apart).
Phase 4, step: the user's optimizer, whose parameters are DTensors where they are cut.

Between devices of a group, for each pair of column and row layers: one all-reduce of the row layer's output in the
forward, and one of the gradient of each column layer's input in the backward (three for an attention block's q, k and
v). Between groups: gradients, as in ddp, after the backward. Memory: of cut layers 1/size of parameters, gradients,
optimizer state and inner activations; of everything else all.

Follows Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
section 3, on torch.distributed.tensor.parallel.parallelize_module; AlexNet's two GPUs (Krizhevsky et al. 2012) before.

What is between a column and a row layer is a DTensor, that knows that it is cut: torch computes each operation on it as
on the whole (a view into heads, a softmax over them, a norm over the cut features) or raises for one that it does not
know. So a plan can be slow, or refused, but not wrong. Whole tensors that meet a cut one (masks, other parameters) are
the same on all devices of the group: they count as such while a run with this strategy is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from paceline.comm import collectives, many
from paceline.comm.grid import Grid, check_size
from paceline.errors import ModelError, SettingError
from paceline.strategies import tensor_plan
from paceline.strategies.base import BackwardPass, Kind, Layout, Strategy, Term, Work, run_here
from paceline.strategies.pickling import NoPickles
from paceline.strategies.reached import Reached, check_alike, named_state
from paceline.strategies.replicated import (
    load_replicated,
    parameter_names,
    replicated_state,
)
from paceline.strategies.tensor_surroundings import surroundings
from paceline.world import World


def _style(kind: str, module: nn.Module) -> ParallelStyle:
    if kind == "row":
        return RowwiseParallel(input_layouts=Replicate())  # of a whole input its own part is taken
    if kind == "gather":
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel(use_local_output=False)


def check(world: int | None, *, size: int, plan: str) -> dict[str, str]:
    """The plan, read. Raises SettingError for what cannot work on so many processes."""
    if world == 1:
        raise SettingError(
            "strategy tensor needs at least two processes: paceline run --nproc 2 --strategy tensor ... With one, "
            "leave the strategy out."
        )
    if size:
        check_size(size, world, "strategy tensor: size")
    return tensor_plan.read(plan) if plan else {}


class TensorParallel(Strategy):
    """size: devices in a group; all processes by default. plan: which layers are cut and how, as pattern:kind with
    commas between, or a dict (tensor_plan.py); found in plain MLP and attention blocks if not given."""

    def __init__(self, world: World, device: torch.device, *, size: int = 0, plan: str = "") -> None:
        self.patterns = check(world.size, size=size, plan=plan)
        self.world, self.device = world, device
        self._no_pickles = NoPickles("tensor")
        self._grid = grid = Grid(device, size or world.size, "strategy tensor: size")
        self.layout = Layout(shards=grid.shards, mine=(grid.shard,))
        self.group = grid.column
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._known: set[nn.Module] = set()
        self._sent: set[Tensor] = set()  # parameters and buffers that were made alike
        self._followed: set[Tensor] = set()  # parameters whose gradients are placed as they are
        self._used: set[str] = set()
        self._names: dict[Tensor, str] = {}
        self._hooks: list[Any] = []
        self._reached = Reached("tensor", world.rank)
        self._surroundings = surroundings(grid.mesh)
        self._surroundings.__enter__()

    # --- setup

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._no_pickles.guard()
        new = [model for model in models if model not in self._known]
        self.models, self.optimizers = list(models), list(optimizers)
        replaced: dict[Tensor, Tensor] = {}
        for model, plan in zip(new, self._plans(new), strict=True):
            for module, kind in plan.values():
                replaced |= self._cut(module, kind)
            self._hooks.append(model.register_forward_hook(_whole_outputs))
            self._known.add(model)
        sent, self._sent = self._sent | set(replaced.values()), set()
        for model in models:
            model.to(self.device)
            everything = [*model.parameters(), *model.buffers()]
            collectives.broadcast_tensors([t for t in everything if t not in sent])
            self._sent.update(everything)
        for optimizer in optimizers:
            _replace(optimizer, replaced)
        self._names = parameter_names(models)
        self._reached.clear()

    def _plans(self, models: Sequence[nn.Module]) -> list[tensor_plan.Plan]:
        size = self._grid.size
        if self.patterns:
            plans = []
            for model in models:
                plan, used = tensor_plan.matched(model, self.patterns, size)
                self._used |= used
                plans.append(plan)
            missing = [pattern for pattern in self.patterns if pattern not in self._used]
            if missing and models:
                layers = [name for m in models for name, part in m.named_modules() if isinstance(part, nn.Linear)]
                raise ModelError(
                    f"strategy tensor: plan: {', '.join(missing)} fits no layer of the prepared model. Its Linear "
                    f"layers are: {', '.join(layers[:12])}{' ...' if len(layers) > 12 else ''}. `*` stands for one "
                    "part of a name; prepare all models together."
                )
            return plans
        found = [tensor_plan.found(model, size) for model in models]
        if models and not self._known and not any(plan for plan, _ in found):
            passed = [line for _, lines in found for line in lines]
            why = "Left whole: " + "; ".join(passed[:3]) if passed else "No such block was found."
            raise ModelError(
                f"strategy tensor: nothing of {', '.join(type(model).__name__ for model in models)} can be cut over "
                f"{size} devices: it looks for MLPs (Linear, activation, Linear) and attention blocks (q, k, v, out). "
                f"{why} Name the layers: plan=encoder.*.up:column,encoder.*.down:row; or use strategy='ddp'."
            )
        return [plan for plan, _ in found]

    def _cut(self, module: nn.Module, kind: str) -> dict[Tensor, Tensor]:
        """Cuts one layer, which so is the only one that is whole on the device at a time. Returns its old parameters
        -> the new ones."""
        module.to(self.device)
        before = {name: p for name, p in module._parameters.items() if p is not None}
        collectives.broadcast_tensors(before.values())
        parallelize_module(module, self._grid.mesh, _style(kind, module), src_data_rank=None)
        self._hooks.append(module.register_forward_hook(_mended))
        after = {name: module._parameters[name] for name in before}
        return {p: new for name, p in before.items() if (new := after[name]) is not None}

    # --- the step

    def forward_backward(self, work: Work) -> list[list[Term]]:
        with _explained():
            return super().forward_backward(work)

    def backward(self, work: BackwardPass) -> None:
        with _explained():
            for p in self._names:
                if p.requires_grad and p not in self._followed:
                    self._followed.add(p)
                    self._hooks.append(p.register_hook(_placed_as(p)))
            whole = [root.full_tensor() if isinstance(root, DTensor) else root for root in work.roots]
            run_here(work._replace(roots=whole))
        if work.final:
            self._reduce(work.kind)

    def _reduce(self, call: Kind) -> None:
        """Phase 3."""
        if self._reached.fresh:
            self._check_alike("before the first step")
        grads = self._reached.gradients(call, self._names, None)
        cut = [part for grad in grads if (part := _own_part(grad)) is not None]
        whole = [_here(grad) for grad in grads if _own_part(grad) is None]
        many.sum_all(cut, self._grid.column)
        many.sum_all(whole)
        if whole:
            torch._foreach_mul_(whole, 1 / self._grid.size)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        with _explained(
            f" In the update by {type(optimizer).__name__}: use one whose operations torch can cut, AdamW."
        ):
            optimizer.step()

    # --- state

    def _check_alike(self, when: str) -> None:
        """Raises ModelError, on all processes, where copies of a parameter are not the same bits."""
        named = named_state(self._names, self.optimizers)
        cut = [(name, part) for name, tensor in named if (part := _own_part(tensor)) is not None]
        whole = [(name, _here(tensor)) for name, tensor in named if _own_part(tensor) is None]
        check_alike(cut, self._grid.column, whole, when)

    def state_dict(self) -> dict[str, Any]:
        self._check_alike("at a checkpoint")
        return _mapped(replicated_state(self.models, self.optimizers), lambda t: t.full_tensor().cpu())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, self._placed(state))

    def _placed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with what belongs to cut parameters cut as they are."""

        def cut(value: Any, like: Tensor | None) -> Any:
            if not isinstance(value, Tensor) or not isinstance(like, DTensor) or value.shape != like.shape:
                return value
            value = value.to(self.device)
            return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

        models = []
        for model, saved in zip(self.models, state["models"], strict=False):
            own = model.state_dict()
            models.append({name: cut(value, own.get(name)) for name, value in saved.items()})
        by_name = {name: p for p, name in self._names.items()}
        optimizers = [
            {
                **saved,
                "state": {
                    name: {key: cut(value, by_name.get(name)) for key, value in values.items()}
                    for name, values in saved["state"].items()
                },
            }
            for saved in state["optimizers"]
        ]
        return {"models": [*models, *state["models"][len(models) :]], "optimizers": optimizers}

    def close(self) -> None:
        self._no_pickles.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._surroundings.__exit__(None, None, None)
        self._grid.let_go()
        self.group = None


def _replace(optimizer: torch.optim.Optimizer, replaced: Mapping[Tensor, Tensor]) -> None:
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
    return tree_map_only(DTensor, lambda t: t.full_tensor(), outputs)


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


def _here(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _own_part(tensor: Tensor | None) -> Tensor | None:
    """The part of a cut tensor that is here; None for one that is whole here."""
    if not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements):
        return None
    return _here(tensor)


def _mapped(tree: Any, function: Callable[[DTensor], Tensor]) -> Any:
    """A tree of dicts and lists with the function's result for each DTensor."""
    if isinstance(tree, dict):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, function) for value in tree]
    return function(tree) if isinstance(tree, DTensor) else tree


@contextmanager
def _explained(where: str = "") -> Iterator[None]:
    """What torch says of an operation that it cannot compute on a cut tensor, with the remedy."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        text = str(error)
        if "harding propagation failed" not in text and "sharding strategy registered" not in text:
            raise
        raise ModelError(
            f"strategy tensor: torch cannot compute this operation on a tensor that is cut over devices: "
            f"{text.splitlines()[0]}.{where or ' Leave the layers before and after it out of the plan, or gather.'}"
        ) from error
