"""What the replicas of one process draw from the generators of the host, which all threads share."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch

from paceline.data.randomness import seed_all
from paceline.strategies.replicated.replica_set import ReplicaSet

pytestmark = pytest.mark.timeout(60)


def drawn(*devices: str) -> list[list[float]]:
    """What each replica draws in a closure, as mixup does; a replica that comes to a pause lets others run."""
    met = threading.Barrier(len(devices))

    def closure() -> list[float]:
        found = []
        for _ in range(4):
            with_others(met)
            found += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return found

    seed_all(7)
    replicas = ReplicaSet([torch.device(name) for name in devices])
    with closing(replicas):
        return replicas.team.run([closure] * len(devices))


def with_others(met: threading.Barrier) -> None:
    """Where replicas run at the same time, go on with them; where they take turns, alone."""
    try:
        met.wait(0.05)
    except threading.BrokenBarrierError:
        time.sleep(0)


def test_replicas_on_gpus_draw_as_replicas_on_cpus_do() -> None:
    """Each what one process with its shard would: all the same here, since no shard has reseeded."""
    expected = drawn("cpu", "cpu", "cpu")
    assert expected[0] == expected[1] == expected[2]
    assert len(set(expected[0])) == 12
    assert drawn("cuda:0", "cuda:1", "cuda:2") == expected
