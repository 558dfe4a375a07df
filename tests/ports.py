"""TCP ports for programs that are told where to listen."""

from __future__ import annotations

import contextlib
import os
import random
import socket

# Below those that Linux gives to outgoing connections (32768 and more): between the choice of a port and its use, no
# connection of another test can get it.
PORTS = range(10_000, 30_000)
_draw = random.Random(os.getpid())
_given: set[int] = set()


def free_port() -> int:
    """A port on which nobody listens, and which this process has not been given before."""
    while True:
        port = _draw.choice(PORTS)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
