"""fsdp: shards what ddp replicates: optimizer state (stage 1), gradients too (stage 2), parameters too (stage 3).

Stage 1 (zero1.py): as ddp, but the optimizer updates a shard of each parameter; parameters are then all-gathered.
Stage 2, 3 (fsdp2.py): a layer's parameters are all-gathered before it computes; its gradients are reduce-scattered once
  they are ready. Stage 2 gathers a layer once for forward and backward, stage 3 once for each.

Costs with n replicas and P parameters. Memory is in bytes, for fp32 with Adam, at the peak of the step. It does not
include activations, nor the layer that is being gathered or reduced:

  stage  memory per replica               sent per replica and step                   collectives
  ddp    4 P + 4 P + 8 P                  2 (n - 1) / n of the gradients               all-reduce
  1      4 P + 4 P + 8 P / n              2 (n - 1) / n, and 1 (n - 1) / n of the      all-reduce, all-gather
                                          parameters
  2      4 P + 4 P / n + 4 P / n + 8 P / n    2 (n - 1) / n                            all-gather, reduce-scatter
  3      4 P / n + 4 P / n + 8 P / n      3 (n - 1) / n                                all-gather twice, reduce-scatter

With several micro-batches, stage 1 reduces only in the last backward, as ddp does. Stages 2 and 3 gather and reduce in
each micro-batch.

Follows the stages of Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
and Zhao et al. 2023, "PyTorch FSDP". Stages 2 and 3 are torch.distributed.fsdp.fully_shard. Stage 1 is not torch's
ZeroRedundancyOptimizer, which distributes whole tensors: with a few large tensors (an embedding), some rank needs far
more than 8 P / n.
"""

from __future__ import annotations

import torch

from paceline.comm import process_group
from paceline.comm.mesh import Mesh
from paceline.config import StrategySpec
from paceline.errors import SettingError, suggest, warn
from paceline.strategies.base import LoopStrategy
from paceline.strategies.kit.one_process import line
from paceline.strategies.sharded.fsdp2 import FSDP2
from paceline.strategies.sharded.fsdp_wrapping import Sharding
from paceline.strategies.sharded.zero1 import ZeRO1
from paceline.world import World

MIXED = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check(
    size: int | None,
    strategy: str = "fsdp",
    *,
    stage: int,
    min_params: int,
    mixed: str,
    offload: bool,
    replicate: int,
) -> None:
    """Raises SettingError for options that cannot work. strategy: its name in messages."""
    if stage not in (1, 2, 3):
        raise SettingError(
            f"strategy {strategy}: stage={stage}: use 1 (shards optimizer state), 2 (gradients too) or 3 (parameters "
            "too)."
        )
    if mixed not in MIXED:
        raise SettingError(f"strategy {strategy}: mixed={mixed!r} is not known. {suggest(str(mixed), MIXED)}")
    if min_params < 0:
        raise SettingError(
            f"strategy {strategy}: min_params={min_params}: use a number of parameters that is at least 0."
        )
    if stage == 1 and (mixed != "none" or offload):
        name = f"mixed={mixed}" if mixed != "none" else "offload=true"
        raise SettingError(
            f"strategy {strategy}: {name} needs stage=2 or stage=3; in stage 1 parameters stay whole and unchanged. "
            "(precision='bf16' works with every stage.)"
        )
    if replicate >= 1 and (size is None or (size % replicate == 0 and size // replicate >= 2)):
        return
    if size == replicate == 1:
        return
    where = f"strategy {strategy}: replicate={replicate}"
    if size is None:
        raise SettingError(f"{where}: use a number of replicas that is at least 1.")
    if size == 1:
        raise SettingError(f"{where}: this run has 1 process. Start {2 * max(replicate, 1)}, or drop replicate.")
    fits = [n for n in range(1, size // 2 + 1) if size % n == 0]
    raise SettingError(
        f"{where}: each replica is sharded over at least two processes, and there are {size}. Set replicate to "
        f"{' or '.join(map(str, fits))}; or start {2 * max(replicate, 1)} processes."
    )


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    """One process gathers and reduces nothing. mixed, offload and checkpointing work as on several processes."""
    return spec, line("fsdp", "shards nothing here")


def fsdp(
    world: World,
    device: torch.device,
    *,
    stage: int = 3,
    wrap: str = "auto",
    min_params: int = 2**16,
    checkpointing: bool = False,
    mixed: str = "none",
    offload: bool = False,
    find_unused: bool = False,
    replicate: int = 1,
) -> LoopStrategy:
    """Make the strategy of a ZeRO stage: 1, 2 or 3.

    wrap: the layers that are gathered one by one, and that checkpointing recomputes: "auto" (entries of lists of
    layers), "none", or names of classes joined by "+". min_params: smaller layers join the layer around them.
    checkpointing: recompute layers in the backward, instead of keeping their activations. mixed: "bf16" or "fp16": the
    dtype in which stages 2 and 3 gather parameters and compute. The updated weights keep their dtype, and gradients are
    summed in fp32. offload: stages 2 and 3 keep and update shards on the CPU. find_unused: the parameters that a loss
    reaches may differ between steps; in stage 1 also between ranks. replicate: the number of replicas, each sharded
    over an equal number of processes (HSDP). With a replica on each machine, only gradients go between machines.
    """
    check(world.size, stage=stage, min_params=min_params, mixed=mixed, offload=offload, replicate=replicate)
    if mixed != "none" and world.rank == 0:
        warn(
            f"strategy fsdp: mixed={mixed} computes in {mixed}, so the model is close to that of other strategies, but "
            "not the same.",
        )
    if world.size == 1:
        process_group.join_alone(device)  # fully_shard and DTensor need a group
    sizes = {"replicate": replicate, "shard": world.size // replicate}
    mesh = Mesh(device, world.rank, sizes if replicate > 1 else {"shard": world.size})
    sharding = Sharding(wrap, min_params, checkpointing, find_unused, MIXED[mixed], offload, keep=stage == 2)
    return ZeRO1(world, device, mesh, sharding) if stage == 1 else FSDP2(world, device, mesh, sharding)
