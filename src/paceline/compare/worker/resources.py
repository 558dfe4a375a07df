"""What a process has used: memory at its peak, and bytes sent over the network."""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
from typing import NamedTuple

import torch

# Offsets in struct tcp_info of linux/tcp.h (Linux 4.19 and later): tcpi_bytes_received, tcpi_bytes_sent and
# tcpi_bytes_retrans. All count the payload without headers. The second counts again what had to be sent again, which
# depends on the network's load and not on the strategy: the third is taken off.
_RECEIVED, _SENT, _SENT_AGAIN = 128, 200, 208
_TCP_INFO_BYTES = 256


def peak_memory(device: torch.device) -> tuple[int, str]:
    """(bytes, what they count).

    "allocated", on an accelerator that counts it: the most that tensors took up on any one device of this process.
    "resident", elsewhere: the most of the machine's memory that the process had.
    """
    module = torch.get_device_module(device.type) if device.type != "cpu" else None
    if module is not None and hasattr(module, "max_memory_allocated"):
        return max(int(module.max_memory_allocated(index)) for index in range(module.device_count())), "allocated"
    try:
        with open("/proc/self/status") as file:  # getrusage would count the launcher's memory before exec as well
            found = [line.split()[1] for line in file if line.startswith("VmHWM:")]
        return int(found[0]) * 1024, "resident"
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident"


class Traffic(NamedTuple):
    """Bytes over all TCP connections that a process has open, since each connection was opened."""

    sent: int
    received: int


def traffic() -> Traffic | None:
    """The traffic of this process; None where the kernel does not tell.

    It is read from each connection. The interface's counters would count what every other program sends as well.
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
    """The kernel's figures of a connection; None where the descriptor is no TCP connection, or is closed by now."""
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
