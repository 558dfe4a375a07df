"""fsdp+ulysses: tokens are split over a sequence group, and parameters are sharded over all processes.

    4 processes, size=2
      rank 0  tokens 0..T/2  quarter 0 of the state     rank 1  tokens T/2..T  quarter 1     } the same examples
      rank 2  tokens 0..T/2  quarter 2 of the state     rank 3  tokens T/2..T  quarter 3     } other examples

Phase 1, forward: before a layer computes, its parameters are all-gathered over all processes (fsdp2.py). The process
  computes its tokens, as under ulysses.
Phase 2, backward: the same in reverse. A layer's gradients are reduce-scattered over all processes once they are ready:
  the sum over tokens and examples.
Phase 3, step: each process updates its shard.

Traffic: that of fsdp over all processes, and that of ulysses' attention within a sequence group. Memory per process
with n processes: 1/n of parameters, gradients and optimizer state; 1/size of the activations.

Follows Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.3: ZeRO-3 over the data and sequence groups together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm.mesh import Mesh
from paceline.config import StrategySpec
from paceline.data.shard_sizes import ShardSizes
from paceline.errors import SettingError
from paceline.strategies.base import Backward
from paceline.strategies.kit.one_process import line
from paceline.strategies.sequence import ulysses
from paceline.strategies.sequence.sequence_cut import SequenceCuts
from paceline.strategies.sequence.sequence_shard import SequenceShard
from paceline.strategies.sharded import fsdp
from paceline.strategies.sharded.fsdp2 import FSDP2
from paceline.strategies.sharded.fsdp_wrapping import Sharding
from paceline.torch_private import fully_shard as internals
from paceline.torch_private.core import tree_flatten, tree_unflatten
from paceline.world import World


def check(
    world: int | None, *, size: int, stage: int, min_params: int, mixed: str, offload: bool, replicate: int
) -> None:
    """Raises SettingError for options that cannot work on this number of processes."""
    if stage == 1:
        raise SettingError(
            "strategy fsdp+ulysses: stage=1 is not supported. Use stage=2 or stage=3; or strategy='ulysses', where "
            "parameters are whole."
        )
    ulysses.check(world, "fsdp+ulysses", size=size)
    options: dict[str, Any] = {"stage": stage, "min_params": min_params, "mixed": mixed, "offload": offload}
    fsdp.check(world, "fsdp+ulysses", replicate=replicate, **options)


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    """Run fsdp, without the option of ulysses."""
    options = {key: value for key, value in spec.options.items() if key != "size"}
    return StrategySpec("fsdp", options), line("fsdp+ulysses", "splits nothing here and runs as 'fsdp'")


class FSDPUlysses(FSDP2):
    """size: number of devices that share a sequence; default: all processes. Other options: as in fsdp, with stages 2
    and 3."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        size: int = 0,
        stage: int = 3,
        wrap: str = "auto",
        min_params: int = 2**16,
        checkpointing: bool = False,
        mixed: str = "none",
        offload: bool = False,
        find_unused: bool = False,
        replicate: int = 1,
    ) -> None:
        check(
            world.size,
            size=size,
            stage=stage,
            min_params=min_params,
            mixed=mixed,
            offload=offload,
            replicate=replicate,
        )
        sizes = {"replicate": replicate, "shard": world.size // replicate}
        over = Mesh(device, world.rank, sizes if replicate > 1 else {"shard": world.size})
        sharding = Sharding(wrap, min_params, checkpointing, find_unused, fsdp.MIXED[mixed], offload, keep=stage == 2)
        super().__init__(world, device, over, sharding, "fsdp+ulysses", run_mesh=ulysses.mesh(world, device, size))
        self.store.factor = 1 / self.mesh.size("sequence")
        self._cuts = SequenceCuts(self.mesh.group("sequence"), "fsdp+ulysses")

    def split_by(self, sizes: ShardSizes) -> bool:
        return False

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        known = len(self._states)
        super().setup(models, optimizers)
        for state in self._states[known:]:
            for group in internals.groups_under(state):
                internals.around_inputs(group, _on_held)
        self._cuts.add(models)

    def backward(self, work: Backward) -> None:
        self._cuts.check()
        super().backward(work)

    def close(self) -> None:
        super().close()
        self._cuts.close()


def _on_held(
    register: Callable[[Any, Any], tuple[Any, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Give FSDP2 the inputs of a layer without SequenceShards. It passes inputs through an autograd.Function, whose
    backward marks the end of the layer's backward. Such a function takes plain tensors."""
    inputs, form = tree_flatten((args, kwargs))
    found: tuple[Any, Any] = register(
        *tree_unflatten([value.held if isinstance(value, SequenceShard) else value for value in inputs], form)
    )
    outputs, form = tree_flatten(found)
    for place, value in enumerate(inputs):
        if isinstance(value, SequenceShard):
            outputs[place] = SequenceShard(outputs[place], value.token_dim, value.cut)
    made: tuple[Any, Any] = tree_unflatten(outputs, form)
    return made
