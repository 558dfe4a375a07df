"""fsdp+tensor: layers cut over `tensor`, and each part sharded over `shard`.

    4 processes, size=2        tensor 0                     tensor 1
                  shard 0:     rank 0: half of a half       rank 1: half of the other half     } the same examples
                  shard 1:     rank 2: the rest of it       rank 3: the rest of it             } other examples

Phase 1, forward: before a layer computes, its part of the parameters is all-gathered over `shard` (fsdp2.py). It
  computes its part, and the parts' outputs are put together over `tensor` (tensor_cut.py).
Phase 2, backward: the same the other way round; gradients are reduce-scattered over `shard` as soon as they are there.
Phase 3, finish: gradients of parameters that are whole along `tensor` are averaged over `tensor`, where they are equal
  up to what a device's kernels leave open. So the copies cannot drift apart.
Phase 4, step: each process updates its shards.

Between processes: what fsdp sends over `shard`, of parts 1/size as large; what tensor sends over `tensor`; and the
gradients of whole parameters once over `tensor`. Memory: of cut layers 1/n of parameters, gradients and optimizer state
over all n processes; of the others 1/(n/size).

Follows torch's composition of fully_shard over tensor parallelism: the inner dimension of the DeviceMesh cuts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.comm import collectives, dtensor
from paceline.comm.mesh import Mesh
from paceline.config import StrategySpec
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

SIZE = 2  # devices that share the parts of a layer, where `size` is not given


def check(
    world: int | None, *, size: int, plan: str, stage: int, min_params: int, mixed: str, offload: bool, replicate: int
) -> dict[str, str]:
    """The plan, read. Raises SettingError for what cannot work on so many processes."""
    if stage == 1:
        raise SettingError(
            "strategy fsdp+tensor: stage=1 slices the optimizer's state beside whole parameters, and here they are cut "
            "already. Use stage=2 or stage=3; or strategy='tensor', which keeps 1/size of the state of cut layers."
        )
    common: dict[str, Any] = {"stage": stage, "min_params": min_params, "mixed": mixed, "offload": offload}
    if world == 1:
        fsdp.check(world, "fsdp+tensor", replicate=replicate, **common)
        return tensor.check(world, "fsdp+tensor", size=size, plan=plan)
    size = size or SIZE
    patterns = tensor.check(world, "fsdp+tensor", size=size, plan=plan)
    if world is not None and world // size < 2:
        raise SettingError(
            f"strategy fsdp+tensor: size={size}: of {world} processes none are left to slice over. Start {2 * size} or "
            "more; or use strategy='tensor'."
        )
    fsdp.check(None if world is None else world // size, "fsdp+tensor", replicate=1, **common)
    if replicate < 1 or (world is not None and (world // size % replicate or world // size // replicate < 2)):
        raise SettingError(
            f"strategy fsdp+tensor: replicate={replicate}: {world or 'so many'} processes cannot be {replicate} "
            f"replicas, each in slices over at least two and in parts over {size}. Start "
            f"{2 * size * max(replicate, 1)} processes, or leave replicate out."
        )
    return patterns


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    """fsdp, with the options that it knows."""
    options = {key: value for key, value in spec.options.items() if key not in ("size", "plan")}
    return StrategySpec("fsdp", options), line("fsdp+tensor", "shards nothing here and runs as 'fsdp'")


class FSDPTensor(FSDP2):
    """size: devices that share the parts of a layer, two by default; plan: which layers are cut and how, as of tensor.
    The others: as of fsdp, with stages 2 and 3."""

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
        """Phase 3."""
        graded = [p.grad for p in self.store.parameters if p.grad is not None and not is_cut(p)]
        grads = [dtensor.local(grad) for grad in graded]
        collectives.sum_all(grads, self.mesh.group("tensor"))
        if grads:
            foreach_mul_(grads, 1 / self.mesh.size("tensor"))

    def explain(self, error: Exception) -> Exception | None:
        found = explained(error, "Leave the layers before and after it out of the plan, or gather.")
        return found or super().explain(error)

    def close(self) -> None:
        super().close()
        self._cuts.close()
