"""Small tensors between the processes of one machine, over Unix sockets.

Gloo passes each operation to its own threads, on both sides. So an all-reduce of 1 KB takes many times longer with gloo
than over sockets that the calling threads write and read (benchmarks/README.md, "Batch norm"). A layer that sums in the
middle of its forward must wait that long.

Every pair of neighbours has a connection. In an exchange each process sends its bytes to all others, and then reads
theirs. A process can be at most one exchange ahead, so a connection's buffer holds at most two messages.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import struct
import tempfile
import weakref
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.waits import waits
from paceline.errors import UsageError
from paceline.torch_private.core import profiling

MOST_BYTES = 2**15
"""The largest tensor. For larger tensors gloo is as fast. Two of this size per connection fit into kernel buffers."""

MOST = 16
"""The largest group. Each process sends to every other, so gloo's ring is faster in larger groups."""


class Peers(Protocol):
    """The part of a group's interface (group.py) that the sockets need."""

    size: int
    rank: int

    def gather(self, obj: Any) -> list[Any]: ...


_HEAD = struct.Struct("=QQ")  # the number of the exchange, and the number of bytes that follow
_SECONDS = 1800  # timeout of a connection, the same as gloo's

_open: weakref.WeakSet[Neighbours] = weakref.WeakSet()  # closed in forked children, such as a DataLoader's workers


@waits("rows")
class Neighbours:
    """The other processes of a group, all on this machine, seen from one of them."""

    def __init__(self, connections: list[socket.socket | None], group: Peers) -> None:
        self.group = group
        self._connections = connections  # by rank in the group; None for this process
        self.rank, self.size = connections.index(None), len(connections)
        self._count = 0  # number of exchanges
        _open.add(self)

    def rows(self, row: Tensor) -> Tensor:
        """(processes, ...): all processes' tensors, in rank order. Collective.

        row: a CPU tensor of at most MOST_BYTES, with the same shape and dtype on all processes. Raises ConnectionError
        if a process has ended, and UsageError if another process makes a different exchange.
        """
        if not profiling():
            return self._rows(row)
        with torch.profiler.record_function("unix:all_gather"):
            return self._rows(row)

    def _rows(self, row: Tensor) -> Tensor:
        table = row.new_empty(len(self._connections), *row.shape)
        table[self.rank] = row
        memory = memoryview(table.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        size = row.nbytes
        head = _HEAD.pack(self._count, size)
        self._count += 1
        own = memory[self.rank * size : (self.rank + 1) * size]
        message = head + own
        for rank, connection in enumerate(self._connections):
            if connection is not None:
                try:
                    connection.sendall(message)
                except OSError as error:
                    raise _gone(rank) from error
        for rank, connection in enumerate(self._connections):
            if connection is not None:
                _receive(connection, memory[rank * size : (rank + 1) * size], head, rank)
        return table

    def share(self, handle: int) -> int:
        """Share an open file of rank 0. Returns this process's descriptor of that file. Collective.

        handle: rank 0's descriptor; ignored on other ranks.
        """
        if self.rank == 0:
            for connection in self._connections:
                if connection is not None:
                    socket.send_fds(connection, [b"f"], [handle])
            return handle
        first = self._connections[0]
        assert first is not None
        _, (received, *_), _, _ = socket.recv_fds(first, 1, 1)
        return received

    def check(self) -> None:
        """Raises ConnectionError if a process has ended. Call it between exchanges; it does not wait."""
        for rank, connection in enumerate(self._connections):
            # Not by recv(MSG_DONTWAIT): a socket with a timeout would first wait for the whole timeout.
            if connection is not None and select.select([connection], [], [], 0)[0]:
                raise _gone(rank)

    def close(self) -> None:
        """Close the connections. Data already sent can still be read at the other ends."""
        for connection in self._connections:
            if connection is not None:
                connection.close()


def find_neighbours(group: Peers, able: bool = True) -> Neighbours | None:
    """Connect the processes of a group. Collective.

    Returns None on all processes if they are on several machines, if there are more than MOST, if they cannot reach
    each other's sockets (as in separate containers), or if one of them passes able=False.
    """
    size, rank = group.size, group.rank
    if size > MOST:
        return None
    place = Path(tempfile.mkdtemp(prefix="paceline-"))  # accessible to this user only
    connections: list[socket.socket | None] = [None] * size
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            path = str(place / "socket")
            try:
                listening.bind(path)
                listening.listen(size)
            except OSError:  # the path is too long for a socket's address
                path = ""
            paths = group.gather((_host(), path if able else ""))
            reached = len({host for host, _ in paths}) == 1 and all(path for _, path in paths)
            reached = reached and _connect(connections, [path for _, path in paths[:rank]], rank)
            if all(group.gather(reached)):
                _accept(listening, connections)
                return Neighbours(connections, group)
        for connection in connections:
            if connection is not None:
                connection.close()
        return None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _host() -> tuple[str, str]:
    """Identify this host: its name and its network namespace ("" on systems without namespaces)."""
    try:
        return socket.gethostname(), os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname(), ""


def _connect(connections: list[socket.socket | None], paths: list[str], rank: int) -> bool:
    """Connect to all processes of lower rank, and send them `rank`. Returns whether all could be reached."""
    for other, path in enumerate(paths):
        connections[other] = connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            connection.sendall(bytes([rank]))
        except OSError:
            return False
    return True


def _accept(listening: socket.socket, connections: list[socket.socket | None]) -> None:
    """Accept the connections of the processes of higher rank, which have all connected by now."""
    for _ in range(len(connections) - 1 - sum(connection is not None for connection in connections)):
        connection, _ = listening.accept()
        connections[connection.recv(1)[0]] = connection
    for each in connections:
        if each is not None:
            each.settimeout(_SECONDS)


def _receive(connection: socket.socket, into: memoryview, head: bytes, rank: int) -> None:
    """Read one message from `rank` into `into`, and check that it begins with `head`."""
    found = bytearray(len(head))
    for part in (memoryview(found), into):
        read = 0
        while read < len(part):
            try:
                count = connection.recv_into(part[read:])
            except OSError as error:
                raise _gone(rank) from error
            if count == 0:
                raise _gone(rank)
            read += count
        if bytes(found) != head:
            (ours, size), (theirs, other) = _HEAD.unpack(head), _HEAD.unpack(found)
            raise UsageError(
                f"rank {rank} sends {other} bytes for its sum number {theirs}, but this process sends {size} bytes for "
                f"sum number {ours}: the processes run different layers. Run the same layers of the same model on all "
                "processes."
            )


def _gone(rank: int) -> ConnectionError:
    return ConnectionError(f"connection closed by peer: rank {rank} on this machine is lost")


def _in_child() -> None:
    for neighbours in list(_open):
        neighbours.close()


os.register_at_fork(after_in_child=_in_child)
