"""Small tensors between the processes of one machine, over Unix sockets.

Gloo hands each operation to threads of its own, on both sides: an all-reduce of 1 KB takes many times as long as a
message over a socket that the calling thread itself writes and reads (benchmarks/README.md, "Batch norm"). A layer that
needs a sum in the middle of its forward waits for all of that.

Every two neighbours have a connection. In an exchange each of them sends its bytes to all others and then reads theirs.
Nobody can be more than one exchange ahead, so that two messages at most lie in a connection's buffer.
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

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import collectives, mesh
from paceline.comm.mesh import Group
from paceline.comm.waits import waits
from paceline.errors import UsageError
from paceline.torch_private.core import profiling

MOST_BYTES = 2**15
"""Of a tensor. Two of them, in every connection, fit into the buffers of any kernel; larger ones cost gloo no more."""

MOST = 16
"""Neighbours. Each sends to each, so that more of them are better served by gloo's ring."""

_HEAD = struct.Struct("=QQ")  # the number of the exchange, and how many bytes follow
_SECONDS = 1800  # that a neighbour may be late, as gloo's timeout

_open: weakref.WeakSet[Neighbours] = weakref.WeakSet()  # closed in a forked child, as a DataLoader's worker is


@waits("rows")
class Neighbours:
    """The other processes of a group, all on this machine, as one of them sees them."""

    def __init__(self, connections: list[socket.socket | None], group: Group = None) -> None:
        self.group = group
        self._connections = connections  # by rank in the group; None for this process
        self.rank, self.size = connections.index(None), len(connections)
        self._count = 0  # how many exchanges there were
        _open.add(self)

    def rows(self, row: Tensor) -> Tensor:
        """(processes, ...): all processes' tensors, in rank order. Collective.

        row: on the CPU, of one shape and dtype everywhere, of at most MOST_BYTES. Raises ConnectionError where a
        process has gone, and UsageError where another has come to another exchange.
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
        """An open file of rank 0, as a descriptor of this process. Collective. handle: rank 0's."""
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
        """Raises ConnectionError where a process has gone. Between exchanges, when nobody sends; it does not wait."""
        for rank, connection in enumerate(self._connections):
            # Not by recv(MSG_DONTWAIT): a socket with a timeout first waits for that long until it can be read.
            if connection is not None and select.select([connection], [], [], 0)[0]:
                raise _gone(rank)

    def close(self) -> None:
        """Ends the connections. What was sent can still be read at their other ends."""
        for connection in self._connections:
            if connection is not None:
                connection.close()


def meet(group: Group, able: bool = True) -> Neighbours | None:
    """Connect the processes of a group. Collective. None, on all of them, where they are on several machines, too many,
    or cannot reach each other's sockets, as from one container to another; or one is not `able` to do what is meant."""
    size, rank = collectives.size_of(group), collectives.rank_of(group)
    if size > MOST:
        return None
    place = Path(tempfile.mkdtemp(prefix="paceline-"))  # that this user alone may enter
    connections: list[socket.socket | None] = [None] * size
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            path = str(place / "socket")
            try:
                listening.bind(path)
                listening.listen(size)
            except OSError:  # a path that is too long for a socket's address
                path = ""
            paths = collectives.gather_objects((_host(), path if able else ""), group)
            reached = len({host for host, _ in paths}) == 1 and all(path for _, path in paths)
            reached = reached and _connect(connections, [path for _, path in paths[:rank]], rank)
            if all(collectives.gather_objects(reached, group)):
                _accept(listening, connections)
                return Neighbours(connections, group)
        for connection in connections:
            if connection is not None:
                connection.close()
        return None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _host() -> tuple[str, str]:
    """Names this host, or what stands for one: its name, and the namespace of its network, where there are such."""
    try:
        return socket.gethostname(), os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname(), ""


def _connect(connections: list[socket.socket | None], paths: list[str], rank: int) -> bool:
    """Connect to the processes of lower rank and send each this process's rank. Whether all could be reached."""
    for other, path in enumerate(paths):
        connections[other] = connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            connection.sendall(bytes([rank]))
        except OSError:
            return False
    return True


def _accept(listening: socket.socket, connections: list[socket.socket | None]) -> None:
    """The connections of the processes of higher rank, which have all been made."""
    for _ in range(len(connections) - 1 - sum(connection is not None for connection in connections)):
        connection, _ = listening.accept()
        connections[connection.recv(1)[0]] = connection
    for each in connections:
        if each is not None:
            each.settimeout(_SECONDS)


def _receive(connection: socket.socket, into: memoryview, head: bytes, rank: int) -> None:
    """Read one message, which begins with this head."""
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
                f"rank {rank} exchanges {other} bytes as its sum number {theirs}, and this process {size} as number "
                f"{ours}: the processes run different layers. Give all of them one model and one path through it."
            )


def _gone(rank: int) -> ConnectionError:
    return ConnectionError(f"connection closed by peer: rank {rank} of the processes on this machine has gone")


def here(group: Group, tensor: Tensor) -> Neighbours | None:
    """The neighbours that carry this tensor to all processes of the group; None where gloo or NCCL must. Collective at
    the first call for a group, since the processes meet then."""
    here = mesh.current()
    if tensor.device.type != "cpu" or tensor.nbytes > MOST_BYTES:
        return None
    key = id(dist.group.WORLD), group
    if key not in here.neighbours:
        here.neighbours[key] = meet(group)
    found: Neighbours | None = here.neighbours[key]
    return found


def _in_child() -> None:
    for neighbours in list(_open):
        neighbours.close()


os.register_at_fork(after_in_child=_in_child)
