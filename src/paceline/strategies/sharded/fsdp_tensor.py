"""fsdp+tensor: layers are split over `tensor`, and each part is sharded over `shard`.

    4 processes, size=2        tensor 0                     tensor 1
                  shard 0:     rank 0: half of part 0       rank 1: half of part 1
                  shard 1:     rank 2: other half           rank 3: other half

Ranks of the same shard have the same examples; different shards have different examples.

Phase 1, forward: before a layer computes, this process's part of its parameters is all-gathered over `shard`
  (fsdp2.py). The process computes its part of the layer, and the outputs are combined over `tensor` (tensor_cut.py).
Phase 2, backward: the same in reverse; gradients are reduce-scattered over `shard` once they are ready.
Phase 3, finish: gradients of parameters that are whole along `tensor` are averaged over `tensor`. These gradients are
  equal except for nondeterministic kernels; averaging keeps the copies from drifting apart.
Phase 4, step: each process updates its shards.

Traffic: over `shard` as with fsdp, for parts of 1/size; over `tensor` as with tensor, and once the gradients of whole
parameters. Memory per process with n processes: 1/n of parameters, gradients and optimizer state of split layers, and
1/(n/size) of those of other layers.

Follows torch's composition of fully_shard over tensor parallelism: the inner dimension of the DeviceMesh splits first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.comm import dtensor
from paceline.comm.mesh import Mesh
from paceline.config import StrategySpec
from paceline.data.shard_sizes import ShardSizes
from paceline.errors import SettingError
from paceline.strategies.base import Backward
from paceline.strategies.kit.one_process import line
from paceline.strategies.kit.sharded_state import replace_parameters
from paceline.strategies.sharded import fsdp
from paceline.strategies.sharded.fsdp2 import FSDP2
from paceline.strategies.sharded.fsdp_wrapping import Sharding
from paceline.strategies.tensor import tensor
from paceline.strategies.tensor.tensor_cut import LayerCuts, explained, is_cut
from paceline.torch_private.core import foreach_mul_
from paceline.world import World

SIZE = 2  # default number of devices that share a layer


def check(
    world: int | None, *, size: int, plan: str, stage: int, min_params: int, mixed: str, offload: bool, replicate: int
) -> dict[str, str]:
    """Parse the plan. Raises SettingError for options that cannot work on this number of processes."""
    if stage == 1:
        raise SettingError(
            "strategy fsdp+tensor: stage=1 shards the optimizer state of whole parameters, but the tensor dimension "
            "has already split them. Use stage=2 or stage=3; or strategy='tensor', which keeps 1/size of the state of "
            "split layers."
        )
    common: dict[str, Any] = {"stage": stage, "min_params": min_params, "mixed": mixed, "offload": offload}
    if world == 1:
        fsdp.check(world, "fsdp+tensor", replicate=replicate, **common)
        return tensor.check(world, "fsdp+tensor", size=size, plan=plan)
    size = size or SIZE
    patterns = tensor.check(world, "fsdp+tensor", size=size, plan=plan)
    if world is not None and world // size < 2:
        raise SettingError(
            f"strategy fsdp+tensor: size={size} with {world} processes leaves only one to shard over. Start "
            f"{2 * size} or more; or use strategy='tensor'."
        )
    fsdp.check(None if world is None else world // size, "fsdp+tensor", replicate=1, **common)
    if replicate < 1 or (world is not None and (world // size % replicate or world // size // replicate < 2)):
        raise SettingError(
            f"strategy fsdp+tensor: replicate={replicate}: {world or 'the'} processes cannot form {replicate} "
            f"replicas, each split over {size} processes and sharded over at least two. Start "
            f"{2 * size * max(replicate, 1)} processes, or drop replicate."
        )
    return patterns


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    """Run fsdp, without the options of tensor."""
    options = {key: value for key, value in spec.options.items() if key not in ("size", "plan")}
    return StrategySpec("fsdp", options), line("fsdp+tensor", "shards nothing here and runs as 'fsdp'")


class FSDPTensor(FSDP2):
    """size: devices that share a layer, two by default; plan: which layers are split and how, as in tensor. Other
    options: as in fsdp, with stages 2 and 3."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        size: int = 0,
        plan: str = "",
        stage: int = 3,
        wrap: str = "auto",
        min_params: int = 2**16,
        checkpointing: bool = False,
        mixed: str = "none",
        offload: bool = False,
        find_unused: bool = False,
        replicate: int = 1,
    ) -> None:
        patterns = check(
            world.size,
            size=size,
            plan=plan,
            stage=stage,
            min_params=min_params,
            mixed=mixed,
            offload=offload,
            replicate=replicate,
        )
        size = size or SIZE
        sizes = {"replicate": replicate, "shard": world.size // size // replicate, "tensor": size}
        mesh = Mesh(device, world.rank, {name: n for name, n in sizes.items() if n > 1 or name != "replicate"})
        dtype = fsdp.MIXED[mixed]
        sharding = Sharding(wrap, min_params, checkpointing, find_unused, dtype, offload, keep=stage == 2)
        super().__init__(world, device, mesh, sharding, "fsdp+tensor")
        self._cuts = LayerCuts(mesh, device, patterns)

    def split_by(self, sizes: ShardSizes) -> bool:
        return False

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        replaced = self._cuts.cut(models)
        for optimizer in optimizers:
            replace_parameters(optimizer, replaced)
        super().setup(models, optimizers)

    def backward(self, work: Backward) -> None:
        self._cuts.place_gradients(self.leaves().values())
        whole = [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in work.losses]
        super().backward(work._replace(losses=whole))

    @torch.no_grad()
    def finish(self) -> None:
        """Phase 3: average gradients of parameters that are whole along `tensor`."""
        with_gradient = [p.grad for p in self.store.parameters if p.grad is not None and not is_cut(p)]
        grads = [dtensor.local(grad) for grad in with_gradient]
        self.mesh.group("tensor").sum_tensors(grads)
        if grads:
            foreach_mul_(grads, 1 / self.mesh.size("tensor"))

    def explain(self, error: Exception) -> Exception | None:
        found = explained(error, "Leave the layers before and after it out of the plan, or use gather.")
        return found or super().explain(error)

    def close(self) -> None:
        super().close()
        self._cuts.close()
