"""A run's store on this machine, and its access control. A thread of the launcher serves it. Does not import torch.

The store listens on loopback for this user's processes: torch's clients, in the launcher and in the ranks. Unlike a
Unix socket, a TCP socket does not identify the process at its other end. But Linux lists all sockets of the machine
with their owners, including both ends of a local connection.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import ipaddress
import os
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from paceline.launcher.checks import HOST
from paceline.launcher.key_values import BadRequest, Values, serve
from paceline.launcher.output import say

REPORT_SECONDS = 30.0  # between two messages about refused clients
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = 1
_READINGS = 4  # attempts: a table that changes while it is read may lack a row

Welcome = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Refused(ConnectionError):
    """The client is not authorized."""


class Refusals:
    """Reports refused clients: at most one line every REPORT_SECONDS, with their number.

    Args:
        place: address of the store, for the message.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._count, self._last, self._silent = 0, "", False

    def add(self, client: str) -> None:
        """Count a refused client, given by its address and the reason."""
        self._count += 1
        self._last = client
        if not self._silent:
            self._silent = True
            self.report()
            asyncio.get_running_loop().call_later(REPORT_SECONDS, self._speak_again)

    def _speak_again(self) -> None:
        self._silent = False
        self.report()

    def report(self) -> None:
        if self._count:
            count = "a connection" if self._count == 1 else f"{self._count} connections, the last"
            self._count = 0
            say(f"paceline: refused {count} from {self._last}. (The run's store is at {self._place}.)\n")


class Service:
    """A listening socket, and a thread that serves it until `close`.

    Args:
        listener: the socket, closed by `close`.
        serving: the coroutine that the thread runs until it is cancelled.

    Attributes:
        host, port: the socket's address.
    """

    def __init__(
        self, listener: socket.socket, serving: Callable[[socket.socket, Refusals], Coroutine[Any, Any, None]]
    ) -> None:
        self.host, self.port = listener.getsockname()[:2]
        self._pid = os.getpid()
        began: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, Any]] = concurrent.futures.Future()

        async def main() -> None:
            began.set_result((asyncio.get_running_loop(), asyncio.current_task()))
            refusals = Refusals(written((self.host, self.port)))
            try:
                await serving(listener, refusals)
            finally:
                listener.close()
                refusals.report()

        def run() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(main())

        self._thread = threading.Thread(target=run, name="paceline-store", daemon=True)
        self._thread.start()
        self._loop, self._task = began.result()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        if os.getpid() == self._pid and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()


def open_store(listener: socket.socket) -> Service:
    """Open a store for this user's processes."""
    values = Values()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(values, reader, writer.write)

    return welcome_own_processes(listener, welcome)


def welcome_own_processes(listener: socket.socket, welcome: Welcome) -> Service:
    """Serve connections from this user's processes, and refuse all others."""

    async def serving(listener: socket.socket, refusals: Refusals) -> None:
        async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            try:
                check_owner(sock)
                await welcome(reader, writer)
            except (Refused, BadRequest) as error:
                refusals.add(f"{place_of(sock)}: {error}")
            except (OSError, EOFError, asyncio.CancelledError):  # the client is gone, or this launcher ends
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(enter, sock=listener)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()

    return Service(listener, serving)


def written(address: tuple[str, int]) -> str:
    """Format an address as HOST:PORT, or [HOST]:PORT for IPv6."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


UNKNOWN_PLACE = "an unknown address (it closed at once)"


def place_of(sock: socket.socket) -> str:
    """Return the IP address of the connection's other end. The system no longer knows it if the connection closed."""
    try:
        return str(sock.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return UNKNOWN_PLACE


# ---------------------------------------------------------------- the owner of a connection


def check_owner(sock: socket.socket) -> None:
    """Raise Refused if the other end is not a process of this user. Skipped if the system does not report owners."""
    if not can_tell_owner():
        _warn_once_of_no_check()
        return
    found = _owner(sock)
    if found != os.geteuid():
        who = "not a process of this machine" if found is None else f"a process of user {found}"
        raise Refused(f"it is {who}, but the store belongs to user {os.geteuid()}")


@functools.cache
def can_tell_owner() -> bool:
    """Return whether this system reports the owner of a connection. (macOS and some sandboxes do not.)

    The first call tests this with a connection to this process itself.
    """
    if sys.platform != "linux":
        return False
    try:
        with socket.create_server((HOST, 0)) as listener, socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                return _owner(accepted) == os.geteuid()
    except OSError:
        return False


@functools.cache
def _warn_once_of_no_check() -> None:
    """Warn on Linux, where users expect the check. For other systems, docs/security.md says so."""
    if sys.platform == "linux":
        say(
            "paceline: this system does not list the owners of connections (/proc/net/tcp), so other users of this "
            "machine can access the run's store. See docs/security.md.\n"
        )


def _owner(connection: socket.socket) -> int | None:
    """Return the user id of the other end, or None if it is not on this machine. Raises OSError if it was closed."""
    ends = _listed(connection.getpeername()), _listed(connection.getsockname())
    found = None
    for _ in range(_READINGS):
        found = next(filter(None, (_owner_in(path, *ends) for path in _TABLES)), None)
        if found is not None:
            break
    # If this connection has been closed, the row may belong to a newer connection with the same ports.
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
        raise ConnectionResetError("the connection has ended")
    return None if found is None else int(found)


def _owner_in(path: str, own: set[str], other: set[str]) -> str | None:
    """Return the owner of the socket with these ends from one of the kernel's tables, or None.

    Only open connections count, because the kernel lists no owner for a connection that is closing.
    """
    with contextlib.suppress(FileNotFoundError), open(path) as file:  # without IPv6 there is no tcp6
        for line in file:
            _, here, there, state, _, _, _, uid, *_ = line.split()
            if here in own and there in other and int(state, 16) == _ESTABLISHED:
                return uid
    return None


def _listed(address: tuple[Any, ...]) -> set[str]:
    """Format an address as in the kernel's tables: 4-byte words in the machine's byte order, and the port.

    Two forms are returned for an IPv4 address, because the kernel may also list it as an IPv6 address.
    """
    found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    forms = [found.packed] if found.version == 6 else [found.packed, bytes(10) + b"\xff\xff" + found.packed]
    words = [struct.unpack(f"={len(packed) // 4}I", packed) for packed in forms]
    return {"".join(f"{word:08X}" for word in form) + f":{address[1]:04X}" for form in words}
