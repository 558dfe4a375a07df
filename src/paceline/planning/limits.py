"""What runs out first: memory of a device, memory of a host, network, or the batch."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.planning.cluster import Cluster
from paceline.planning.cost_model import Cost

DEVICE_MEMORY = "memory of a device"
HOST_MEMORY = "memory of a host"
NETWORK = "network"
BATCH = "batch"


def utilization(cost: Cost, cluster: Cluster, batch: int) -> dict[str, float]:
    """Resource -> the part of it that is used; above 1: it has run out.

    memory: needed / available. network: seconds of communication / seconds of computation; from 1 on, more than half
    of a step without overlap is communication. batch: shards / examples; above 1, some devices have no example.
    """
    found = {NETWORK: (cost.hidden + cost.exposed) / max(cost.compute.total.middle, 1e-12)}
    found[BATCH] = cost.replicas / batch
    if cluster.memory is not None:
        found[DEVICE_MEMORY] = cost.memory.total.middle / cluster.memory
    if cluster.host_memory is not None and cost.host_bytes:
        found[HOST_MEMORY] = cost.host_bytes / cluster.host_memory
    return found


def first(used: Mapping[str, float]) -> str:
    """The resource that is used most."""
    return max(used, key=lambda name: used[name])


def fits(cost: Cost, cluster: Cluster) -> bool | None:
    """Does the strategy fit into memory? None: with the low end of its interval only, or the memory is unknown."""
    if cluster.host_memory is not None and cost.host_bytes > cluster.host_memory:
        return False
    if cluster.memory is None:
        return None
    total = cost.memory.total
    return True if total.high <= cluster.memory else False if total.low > cluster.memory else None
