"""Which user's process is at the other end of a connection within this machine. Linux.

A socket of TCP does not say it, as a Unix socket does (SO_PEERCRED). But the kernel lists every TCP connection of the
machine with its owner, and a connection within the machine stands there twice, once from each end.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from functools import cache

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = 1
_READINGS = 4  # of the tables: one that changes while it is read may lack a row

End = tuple[str, int]


@cache
def can_tell() -> bool:
    """Does this system tell? Tried once, with a connection of our own. (macOS does not, nor do some sandboxes.)"""
    if sys.platform != "linux":
        return False
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                return owner(accepted) == os.geteuid()
    except OSError:
        return False


def owner(connection: socket.socket) -> int | None:
    """The user id of the other end; None where no process of this machine is there. Raises OSError where the
    connection has ended."""
    wanted = _end(connection.getpeername()), _end(connection.getsockname())
    found = None
    for _ in range(_READINGS):
        found = next((uid for ends, uid in _connections() if ends == wanted), None)
        if found is not None:
            break
    # Was it this connection, or one that took its numbers after it had ended? If it lives yet, this one.
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
        raise ConnectionResetError("the connection has ended")
    return found


def _connections() -> Iterator[tuple[tuple[End, End], int]]:
    """((its own end, the other end), user id) of each established connection."""
    for path in _TABLES:
        try:
            with open(path) as file:
                lines = file.readlines()[1:]
        except FileNotFoundError:  # without IPv6
            continue
        for line in lines:
            _, own, other, state, _, _, _, uid, *_ = line.split()
            if int(state, 16) == _ESTABLISHED:  # of one that is closing, the kernel does not know the owner
                yield (_listed(own), _listed(other)), int(uid)


def _listed(text: str) -> End:
    """ "0100007F:9021": words of 4 bytes in the machine's order, and a port."""
    address, _, port = text.partition(":")
    words = bytes.fromhex(address)
    packed = b"".join(struct.pack("!I", word) for word in struct.unpack(f"={len(words) // 4}I", words))
    return _end((str(ipaddress.ip_address(packed)), int(port, 16)))


def _end(address: tuple[object, ...]) -> End:
    """An address of IPv4 that is written as one of IPv6 is the same address."""
    found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found), int(str(address[1]))
