"""The resources that a process has used: peak memory, and bytes sent over the network."""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
from typing import NamedTuple

import torch

# Offsets in struct tcp_info of linux/tcp.h (Linux 4.19 and later): tcpi_bytes_received, tcpi_bytes_sent and
# tcpi_bytes_retrans. All count the payload without headers. tcpi_bytes_sent includes retransmissions, which depend on
# the network's load and not on the strategy, so tcpi_bytes_retrans is subtracted.
_RECEIVED, _SENT, _SENT_AGAIN = 128, 200, 208
_TCP_INFO_BYTES = 256


def peak_memory(device: torch.device) -> tuple[int, str]:
    """(peak bytes of this process, their kind).

    "allocated" (accelerators with memory statistics): memory of tensors, on the device with the highest peak.
    "resident" (otherwise): resident memory of the process.
    """
    module = torch.get_device_module(device.type) if device.type != "cpu" else None
    if module is not None and hasattr(module, "max_memory_allocated"):
        return max(int(module.max_memory_allocated(index)) for index in range(module.device_count())), "allocated"
    try:
        with open("/proc/self/status") as file:  # getrusage would include the launcher's memory before exec
            found = [line.split()[1] for line in file if line.startswith("VmHWM:")]
        return int(found[0]) * 1024, "resident"
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident"


class Traffic(NamedTuple):
    """Payload bytes of a process over all its open TCP connections, each counted since it was opened."""

    sent: int
    received: int


def traffic() -> Traffic | None:
    """The traffic of this process; None if the kernel does not report it.

    The bytes are read from each connection, since the network interface's counters would include other programs.
    """
    sent = received = 0
    try:
        for name in os.listdir("/proc/self/fd"):
            info = _tcp_info(name)
            if info is None:
                continue
            if len(info) < _SENT_AGAIN + 8:
                return None
            sent += struct.unpack_from("=Q", info, _SENT)[0] - struct.unpack_from("=Q", info, _SENT_AGAIN)[0]
            received += struct.unpack_from("=Q", info, _RECEIVED)[0]
    except OSError:
        return None
    return Traffic(sent, received)


def _tcp_info(descriptor: str) -> bytes | None:
    """The kernel's struct tcp_info of a connection; None if the descriptor is closed or is not a TCP connection."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        copy = os.dup(int(descriptor))
    except OSError:
        return None
    with socket.socket(fileno=copy) as connection:
        inet = connection.family in (socket.AF_INET, socket.AF_INET6)
        if not inet or connection.type != socket.SOCK_STREAM:
            return None
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
