"""tensor: all devices of a model-parallel group get the same examples; each computes a different part of the layers.

    4 processes, size=2                 up (column)        down (row)
      shard 0:  rank 0                  rows 0..k/2        columns 0..k/2      } the same examples, a different
                rank 1                  rows k/2..k        columns k/2..k      } half of each split layer
      shard 1:  ranks 2 and 3           as ranks 0 and 1, with other examples

Phase 1, forward: on each device, a layer split by columns takes whole activations and computes a part of the outputs.
  Operations between layers work on this part. A layer split by rows takes the part as input, and an all-reduce adds the
  devices' results. Layers that are not split compute the same on each device of the group.
Phase 2, backward: the same in reverse: the gradient of a column layer's input is all-reduced over the group.
Phase 3, reduce, in the last micro-batch: gradients of split parameters are summed over the data-parallel group. Other
  gradients are summed over all processes and divided by the size of the model-parallel group. Within this group they
  are equal except for nondeterministic kernels; averaging keeps the copies from drifting apart.
Phase 4, step: the user's optimizer makes the update. Split parameters are DTensors.

Traffic within a group, for each pair of column and row layers: one all-reduce of the row layer's output in the forward,
and one of the gradient of each column layer's input in the backward (three for an attention block's q, k and v).
Between groups: gradients, as in ddp, after the backward. Memory: for split layers 1/size of parameters, gradients,
optimizer state and inner activations; everything else in full.

Follows Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
section 3, with torch.distributed.tensor.parallel.parallelize_module; and AlexNet on two GPUs (Krizhevsky et al. 2012).
tensor_cut.py explains why no plan can give wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm import dtensor
from paceline.comm.mesh import Mesh, check_size, world_group
from paceline.config import StrategySpec
from paceline.data.batch_plan import one_shard
from paceline.strategies.base import Backward, Kind, LoopStrategy, backward_here
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.kit.deferred import allocate, is_deferred
from paceline.strategies.kit.named_parameters import (
    named_state,
    parameter_names,
    replicated_state,
    send_models,
)
from paceline.strategies.kit.one_process import as_single
from paceline.strategies.kit.pickling import PickleGuard
from paceline.strategies.kit.sharded_state import full_state, load_full_state, replace_parameters
from paceline.strategies.kit.unused_parameters import UsedParameters, check_copies
from paceline.strategies.tensor import tensor_plan
from paceline.strategies.tensor.tensor_cut import LayerCuts, explained, is_cut
from paceline.torch_private.core import foreach_mul_
from paceline.world import World


def check(world: int | None, strategy: str = "tensor", *, size: int, plan: str) -> dict[str, str]:
    """Parse the plan. strategy: its name in messages. Raises SettingError for options that cannot work on this number
    of processes."""
    if size:
        check_size(size, world, f"strategy {strategy}: size")
    return tensor_plan.read(plan) if plan else {}


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    return as_single("tensor")


class TensorParallel(LoopStrategy):
    """size: number of devices that share a layer; default: all processes. plan: which layers are split and how, as
    pattern:kind separated by commas, or a dict (tensor_plan.py); default: a plan for MLP blocks, attention blocks and
    grouped convolutions."""

    def __init__(self, world: World, device: torch.device, *, size: int = 0, plan: str = "") -> None:
        patterns = check(world.size, size=size, plan=plan)
        self.world, self.device = world, device
        self._pickle_guard = PickleGuard("tensor")
        size = size or world.size
        self.mesh = Mesh(device, world.rank, {"replicate": world.size // size, "tensor": size})
        self.plan = one_shard(self.mesh.shards, self.mesh.shard)
        self.store = GradientStore()
        self._sent: set[Tensor] = set()  # parameters and buffers that have received rank 0's values
        self._names: dict[Tensor, str] = {}
        self._used = UsedParameters("tensor", world.rank)
        self._cuts = LayerCuts(self.mesh, device, patterns)
        self._fill: Callable[[nn.Module], None] | None = None

    # --- setup

    def fill_with(self, fill: Callable[[nn.Module], None]) -> bool:
        self._fill = fill
        return True

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._pickle_guard.install()
        self.models, self.optimizers = list(models), list(optimizers)
        replaced = self._cuts.cut(models)
        for model in models:
            if is_deferred(model):
                allocate([*model.parameters(), *model.buffers()], self.device)
                assert self._fill is not None
                self._fill(model)
        self._sent = send_models(models, self.device, self._sent | set(replaced.values()))
        for optimizer in optimizers:
            replace_parameters(optimizer, replaced)
        self._names = parameter_names(models)
        self._used.clear()

    # --- the step

    def backward(self, work: Backward) -> None:
        self._cuts.place_gradients(self._names)
        whole = [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in work.losses]
        backward_here(work._replace(losses=whole))
        if work.final:
            self._reduce(work.kind)

    @torch.no_grad()
    def _reduce(self, call: Kind) -> None:
        """Phase 3: sum gradients, after the backward."""
        if self._used.untouched:
            self._check_copies("before the first step")
        grads = self._used.gradients(call, self._names, world_group())
        cut = [dtensor.local(grad) for grad in grads if is_cut(grad)]
        whole = [dtensor.local(grad) for grad in grads if not is_cut(grad)]
        self.mesh.data.sum_tensors(cut)
        world_group().sum_tensors(whole)
        if whole:
            foreach_mul_(whole, 1 / self.mesh.size("tensor"))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            optimizer.step()
        except (NotImplementedError, RuntimeError) as error:
            remedy = f"The update by {type(optimizer).__name__} uses it. Use a different optimizer, such as AdamW."
            better = explained(error, remedy)
            if better is None:
                raise
            raise better from error

    def explain(self, error: Exception) -> Exception | None:
        return explained(error, "Leave the layers before and after it out of the plan, or use gather.")

    # --- state

    def _check_copies(self, when: str) -> None:
        """Raises ModelError, on all processes, if copies of a parameter are not bit-identical."""
        named = named_state(self._names, self.optimizers)
        cut = [(name, dtensor.local(tensor)) for name, tensor in named if is_cut(tensor)]
        whole = [(name, dtensor.local(tensor)) for name, tensor in named if not is_cut(tensor)]
        check_copies(cut, self.mesh.data, whole, when)

    def state_dict(self) -> dict[str, Any]:
        self._check_copies("at a checkpoint")
        return full_state(self.models, self.optimizers, {})

    def held_state(self) -> dict[str, Any]:
        self._check_copies("at a checkpoint")
        return replicated_state(self.models, self.optimizers)

    def reads_stored(self) -> bool:
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_full_state(self.models, self.optimizers, {}, state)

    def close(self) -> None:
        self._pickle_guard.close()
        self._cuts.close()
