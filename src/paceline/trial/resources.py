"""What a process has used: memory at its peak, and bytes that it has sent."""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
from typing import NamedTuple

import torch

# struct tcp_info of linux/tcp.h, of Linux 4.19 and later: tcpi_bytes_received and tcpi_bytes_sent. Payload, without
# headers; what had to be sent again counts again.
_RECEIVED, _SENT = 128, 200
_TCP_INFO_BYTES = 256


def peak_memory(device: torch.device) -> tuple[int, str]:
    """(bytes, what they count). On an accelerator that counts them "allocated": the most that tensors took up on any
    one device of this process. Else "resident": the most of the machine's memory that the process had."""
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
    """Bytes over all TCP connections that a process has open, since each was opened."""

    sent: int
    received: int


def traffic() -> Traffic | None:
    """Of this process; None where the kernel does not tell. Not the interface's counters: they would count what every
    other program sends as well."""
    sent = received = 0
    try:
        for name in os.listdir("/proc/self/fd"):
            info = _tcp_info(name)
            if info is None:
                continue
            if len(info) < _SENT + 8:
                return None
            sent += struct.unpack_from("=Q", info, _SENT)[0]
            received += struct.unpack_from("=Q", info, _RECEIVED)[0]
    except OSError:
        return None
    return Traffic(sent, received)


def _tcp_info(descriptor: str) -> bytes | None:
    """None where this is no TCP connection, or is closed by now."""
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
