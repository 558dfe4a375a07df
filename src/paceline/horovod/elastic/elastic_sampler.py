"""hvd.elastic.ElasticSampler: cuts what is left of an epoch over the processes, however many there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from paceline.horovod import hvd_world


class ElasticSampler(Sampler[int]):
    """Indices of this process, of those that the epoch has left, in Horovod's order: Python's shuffle by seed + epoch,
    every nth index to process n, and some of the first once more where they do not come out even.

    Put it into the TorchState, call `record_batch` after each batch, and `set_epoch` at the end of an epoch.

    Args:
        dataset: of a fixed length.
        shuffle: another order in each epoch.
        seed: alike on all processes.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every process has computed another batch of that size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Cut what is left anew."""
        self.num_replicas, self.rank = hvd_world.size(), hvd_world.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = self.remaining_indices
        while indices and len(indices) < self.total_size:  # more than once where fewer are left than processes
            indices = indices + indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
