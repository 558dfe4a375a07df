"""ulysses: the tokens of each sequence are split over the devices of a sequence group.

    4 processes, size=2
      shard 0:  rank 0  tokens 0..T/2     rank 1  tokens T/2..T     } the same examples, different tokens
      shard 1:  rank 2  tokens 0..T/2     rank 3  tokens T/2..T     } other examples

Phase 1, forward: the input of an embedding (or a model's input of the shape (batch, tokens, width)) becomes a
  SequenceShard. Layers compute on this process's tokens. Attention exchanges tokens for heads by all-to-all, and back.
  A loss over tokens adds the processes' sums and divides by the number of tokens of the whole batch.
Phase 2, backward: the same in reverse. All processes of a group have the same loss, weighted by 1 / size.
Phase 3, reduce, in the last micro-batch: gradients are summed over all processes.
Phase 4, step: each process makes the same update.

Traffic of a process in a group of n, for each attention: all-to-alls of q, k, v and the output in the forward, and of
their gradients in the backward. Each sends (n - 1) / n of the process's part of the tensor. Between all processes:
gradients, after the backward.
Memory per process: parameters, gradients and optimizer state in full; activations 1/n. Within attention a process has
1/n of the heads for all tokens.

Follows Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models", sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.mesh import Mesh, check_size, world_group
from paceline.config import StrategySpec
from paceline.data.batch_plan import one_shard
from paceline.strategies.base import Backward, LoopStrategy, backward_here
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.kit.named_parameters import (
    CHANGED_AT_START,
    check_same_bits,
    load_replicated,
    named_state,
    parameter_names,
    replicated_state,
    send_models,
)
from paceline.strategies.kit.one_process import as_single
from paceline.strategies.kit.unused_parameters import UsedParameters
from paceline.strategies.sequence.sequence_cut import SequenceCuts
from paceline.world import World


def check(world: int | None, strategy: str = "ulysses", *, size: int) -> None:
    """Raises SettingError for options that cannot work on this number of processes. strategy: its name in messages."""
    if size:
        check_size(size, world, f"strategy {strategy}: size")


def mesh(world: World, device: torch.device, size: int) -> Mesh:
    """size: number of devices that share a sequence; 0: all."""
    size = size or world.size
    return Mesh(device, world.rank, {"replicate": world.size // size, "sequence": size})


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    return as_single("ulysses")


class Ulysses(LoopStrategy):
    """size: number of devices that share a sequence; default: all processes."""

    def __init__(self, world: World, device: torch.device, *, size: int = 0) -> None:
        check(world.size, size=size)
        self.world, self.device = world, device
        self.mesh = mesh(world, device, size)
        self.plan = one_shard(self.mesh.shards, self.mesh.shard)
        self.store = GradientStore()
        self.store.factor = 1 / self.mesh.size("sequence")
        self._cuts = SequenceCuts(self.mesh.group("sequence"), "ulysses")
        self._sent: set[Tensor] = set()  # parameters and buffers that have received rank 0's values
        self._names: dict[Tensor, str] = {}
        self._used = UsedParameters("ulysses", world.rank)

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        self._sent = send_models(models, self.device, self._sent)
        self._names = parameter_names(models)
        self._used.clear()
        self._cuts.add(models)

    def backward(self, work: Backward) -> None:
        self._cuts.check()
        backward_here(work)
        if work.final:
            if self._used.untouched:
                check_same_bits(named_state(self._names, self.optimizers), "before the first step", CHANGED_AT_START)
            world_group().sum_tensors(self._used.gradients(work.kind, self._names, world_group()))

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self.models, self.optimizers)

    def local_state(self) -> dict[str, Any]:
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, dict(state))

    def close(self) -> None:
        self._cuts.close()
