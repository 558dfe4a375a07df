"""Cluster: the machines that a plan is made for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import SettingError, suggest
from paceline.planning.device_figures import ANY_FRACTION, DEVICES
from paceline.planning.ranges import Range
from paceline.quantities import read_quantity


@dataclass(frozen=True)
class Cluster:
    """Nodes with equal devices. Rates are in bytes per second and direction; None: unknown."""

    nodes: int
    devices_per_node: int
    memory: float | None = None  # bytes of a device
    bandwidth: float | None = None  # from a device to the other devices of its node
    node_bandwidth: float | None = None  # from a node to the other nodes, all its devices together
    latency: float = 0.0  # seconds of a message within a node
    node_latency: float = 0.0  # seconds of a message between nodes
    host_memory: float | None = None  # bytes of a node
    host_bandwidth: float | None = None  # between a device and its host
    flops: float | None = None  # a device's peak FLOP/s; None: compute time comes from the measured seconds
    fraction: Range = ANY_FRACTION  # fraction of the peak that training reaches
    speed: float = 1.0  # of a device, relative to the measured process; used without `flops`
    # Whether sending needs the cores that compute (CPUs). Then communication and computation are expected not to
    # overlap; on accelerators they are expected to.
    shares_cores: bool = False

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class ClusterOptions:
    """The options of the command line that describe a cluster."""

    nodes: int = 1
    gpus: int = 1
    gpu: str | None = None
    memory: str | None = None
    bandwidth: str | None = None
    node_bandwidth: str | None = None
    latency: float = 0.0  # seconds
    node_latency: float = 0.0
    host_memory: str | None = None
    host_bandwidth: str | None = None
    flops: str | None = None
    mfu: str | None = None
    speed: float | None = None


def read_fraction(text: str) -> Range:
    """Read "0.4" or "0.35:0.5", the fraction of a device's peak that training reaches. Raises SettingError."""
    try:
        parts = [float(part) for part in text.split(":")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2) or not all(0 < part <= 1 for part in parts) or parts != sorted(parts):
        raise SettingError(f"--mfu {text}: write a fraction above 0 and up to 1, such as 0.4, or a range: 0.35:0.5.")
    return Range(parts[0], sum(parts) / len(parts), parts[-1])


def make_cluster(options: ClusterOptions, accelerated: bool) -> Cluster:
    """The described cluster.

    Args:
        accelerated: whether the step was measured on an accelerator.

    Raises:
        SettingError: an option is invalid, unknown or missing.
    """
    for option, count in (("--nodes", options.nodes), ("--gpus", options.gpus)):
        if count < 1:
            raise SettingError(f"{option} {count}: give at least 1.")
    for name, seconds in (("--latency", options.latency), ("--node-latency", options.node_latency)):
        if not 0 <= seconds < math.inf:
            raise SettingError(f"{name} {seconds:g}: give seconds, 0 or more.")
    known = None
    if options.gpu is not None:
        known = DEVICES.get(options.gpu.lower())
        if known is None:
            remedy = "Or describe the device with --memory, --bandwidth and --flops."
            raise SettingError(f"--gpu {options.gpu}: not known. {suggest(options.gpu, DEVICES)} {remedy}")
    if options.speed is not None and (options.flops is not None or known is not None):
        raise SettingError(
            f"--speed {options.speed:g}: the compute time comes from the FLOP/s of --{'gpu' if known else 'flops'}. "
            "Drop one of the two."
        )
    if options.speed is not None and not 0 < options.speed < math.inf:
        raise SettingError(f"--speed {options.speed:g}: give a number above 0, such as 2 for a device twice as fast.")

    def read(option: str, text: str | None, kind: str, default: float | None) -> float | None:
        return default if text is None else read_quantity(option, text, kind)

    flops = read("--flops", options.flops, "flops", known.flops if known else None)
    if options.mfu is not None and flops is None:
        raise SettingError(f"--mfu {options.mfu}: needs the peak of a device. Add --gpu NAME or --flops.")
    fraction = known.fraction if known is not None and known.fraction is not None else ANY_FRACTION
    cluster = Cluster(
        options.nodes,
        options.gpus,
        read("--memory", options.memory, "bytes", known.memory if known else None),
        read("--bandwidth", options.bandwidth, "rate", known.bandwidth if known else None),
        read("--node-bandwidth", options.node_bandwidth, "rate", None),
        options.latency,
        options.node_latency,
        read("--host-memory", options.host_memory, "bytes", None),
        read("--host-bandwidth", options.host_bandwidth, "rate", None),
        flops,
        fraction if options.mfu is None else read_fraction(options.mfu),
        1.0 if options.speed is None else options.speed,
        flops is None and not accelerated,
    )
    if cluster.devices_per_node > 1 and cluster.bandwidth is None:
        raise SettingError("--bandwidth is missing: give the rate between the devices of a node, such as 450GB/s.")
    if cluster.nodes > 1 and cluster.node_bandwidth is None:
        raise SettingError("--node-bandwidth is missing: give a node's rate to the other nodes, such as 400Gbit/s.")
    return cluster
