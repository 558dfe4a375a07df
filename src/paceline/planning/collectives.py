"""Bytes and seconds of collectives over links within and between nodes.

Rings (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 4;
Patarasuk and Yuan 2009): to all-gather or reduce-scatter S bytes over n devices, each sends (n - 1) / n S bytes in
n - 1 messages. An all-reduce is both, so 2 (n - 1) / n S.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.planning.cluster import Cluster


class Group(NamedTuple):
    """Devices that communicate. All groups of this kind communicate at the same time.

    size: number of devices. nodes: number of nodes that they are on; each holds size / nodes of them.
    """

    size: int
    nodes: int


def whole(cluster: Cluster) -> Group:
    """All devices."""
    return Group(cluster.size, cluster.nodes)


def groups(cluster: Cluster, inner: int) -> tuple[Group, Group]:
    """Split the devices into an inner and an outer dimension.

    Returns (the group of `inner` neighbours, the group of the devices with the same place in each inner group). Ranks
    count through a node first, so neighbours are on one node if they fit.

    inner: a divisor of the number of devices.
    """
    outer = cluster.size // inner
    inner_nodes = -(-inner // cluster.devices_per_node)
    return Group(inner, inner_nodes), Group(outer, min(outer, cluster.nodes))


def sent_by_ring(group: Group, size: float) -> float:
    """Bytes that each device sends to all-gather or reduce-scatter `size` bytes."""
    return (group.size - 1) / group.size * size


def reduce_scatter_passes(cluster: Cluster) -> int:
    """Passes over the ring in a reduce-scatter: 1 with NCCL. gloo, on CPUs, makes a whole all-reduce of it."""
    return 2 if cluster.shares_cores else 1


def pass_seconds(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds to all-gather or reduce-scatter `size` bytes (all devices' parts together) over a ring.

    A ring crosses each node's link once, with as many bytes as a device sends. If the devices of a node are in
    different groups, their rings share this link.
    """
    if group.size < 2 or size <= 0:
        return 0.0
    sent = sent_by_ring(group, size)
    if group.nodes < 2:
        assert cluster.bandwidth is not None
        return sent / cluster.bandwidth + (group.size - 1) * cluster.latency
    assert cluster.node_bandwidth is not None
    rings = cluster.devices_per_node / (group.size / group.nodes)  # through each node's link
    seconds = rings * sent / cluster.node_bandwidth
    if group.size > group.nodes:
        assert cluster.bandwidth is not None
        seconds = max(seconds, sent / cluster.bandwidth)
    return seconds + (group.size - 1) * cluster.node_latency


def reduce_scatter_seconds(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds to reduce-scatter `size` bytes."""
    return reduce_scatter_passes(cluster) * pass_seconds(cluster, group, size)


def all_reduce_seconds(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds to all-reduce `size` bytes over a ring."""
    return 2 * pass_seconds(cluster, group, size)


def message_seconds(cluster: Cluster, between_nodes: bool, size: float) -> float:
    """Seconds of one message between two devices; all devices of a node send at the same time."""
    if between_nodes:
        assert cluster.node_bandwidth is not None
        return cluster.devices_per_node * size / cluster.node_bandwidth + cluster.node_latency
    assert cluster.bandwidth is not None
    return size / cluster.bandwidth + cluster.latency
