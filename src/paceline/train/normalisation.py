"""Batch norm over the whole global batch, or over each shard: what `batch_norm` chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm import collectives
from paceline.errors import ModelError
from paceline.strategies.base import Layout
from paceline.train import batchnorm
from paceline.train.order import Request, micros_of_a_shard


class Normalisation:
    """Converts the batch norms of prepared models, and keeps them right. For replicas that train apart the choice is
    `shard`."""

    def __init__(self, choice: str, layout: Layout) -> None:
        self._choice, self._layout = "shard" if layout.local else choice, layout
        self._found: list[nn.Module] = []

    def convert(self, model: nn.Module) -> None:
        """`global`: its batch norms take their statistics over all replicas. `shard`: they stay as they are, but for
        an empty shard."""
        known = set(self._found)  # of an earlier `prepare`
        present = [module for module in model.modules() if isinstance(module, _BatchNorm) and module not in known]
        if present and self._choice == "global" and self._layout.shards > 1:
            batchnorm.convert(model)
        elif self._layout.shards > 1:
            for module in present:
                module.register_forward_pre_hook(_pass_over_empty)
                module.register_forward_hook(_after_empty, always_call=True)
        self._found += present

    def check(self, request: Request | None, loader: str) -> None:
        """Raises ModelError where `global` would not be what it says: statistics of micro-batches depend on how many
        replicas share the work."""
        if self._choice != "global" or request is None or not any(module.training for module in self._found):
            return
        if self._layout.turns:
            raise ModelError(
                f"this process computes {self._layout.shards} shards one after the other, and the model has batch "
                "norm, whose statistics are to be those of all shards together. Use "
                "--strategy data_parallel:devices=cpu,cpu (a device for each shard), a normalisation within the "
                "example (GroupNorm, LayerNorm), or batch_norm='shard', which changes the model."
            )
        micros = micros_of_a_shard(request, self._layout)
        if micros > 1:
            raise ModelError(
                f"loader {loader!r} cuts a global batch into {micros} micro-batches, and the model has batch norm, "
                "whose statistics would be those of a micro-batch, another one on another number of devices. Raise "
                "micro_batch until one is enough, use a normalisation within the example (GroupNorm, LayerNorm), or "
                "set batch_norm='shard', "
                "which changes the model."
            )

    def agree(self, models: Sequence[nn.Module]) -> None:
        """After an update, with `shard`: running statistics become their mean over the replicas, as every replica is
        to evaluate the same model. (Replicas that train apart average them with their weights.)"""
        if not self._found or self._choice != "shard" or self._layout.local or collectives.size_of() == 1:
            return
        buffers = [
            buffer
            for model in models
            for module in model.modules()
            if isinstance(module, _BatchNorm)
            for buffer in (module.running_mean, module.running_var)
            if isinstance(buffer, Tensor)
        ]
        if buffers:
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            mean = collectives.all_reduce(flat) / collectives.size_of()
            for buffer, part in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))


_PASSED_OVER: Final = "_paceline_passed_over"


def _pass_over_empty(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """torch's batch norm makes its running statistics NaN when it is given nothing: here it only looks on."""
    if module.training and inputs[0].numel() == 0:
        module.training = False
        setattr(module, _PASSED_OVER, True)


def _after_empty(module: nn.Module, *_: object) -> None:
    if getattr(module, _PASSED_OVER, False):
        module.training = True
        delattr(module, _PASSED_OVER)
