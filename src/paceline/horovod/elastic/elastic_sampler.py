"""hvd.elastic.ElasticSampler: distributes the remaining examples of an epoch over any number of processes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from paceline.horovod import hvd_world


class ElasticSampler(Sampler[int]):
    """Yields this process's share of the epoch's remaining indices, in Horovod's order.

    The order is Python's shuffle with seed + epoch. The index at position i goes to process i mod (number of
    processes). If the indices cannot be divided evenly, the first indices are repeated.

    Put the sampler into the TorchState, call `record_batch` after each batch, and `set_epoch` at the end of an epoch.

    Args:
        dataset: a dataset of fixed length.
        shuffle: use a new order in each epoch.
        seed: the same on all processes.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start the epoch with this number."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every process has computed another batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the remaining indices of the epoch over the current processes."""
        self.num_replicas, self.rank = hvd_world.size(), hvd_world.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = self.remaining_indices
        while indices and len(indices) < self.total_size:  # loops if there are fewer indices than processes
            indices = indices + indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
