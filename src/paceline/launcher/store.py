"""A run's store on this machine, and who may come to it. A thread of the launcher serves it. No torch.

It listens on loopback for this user's processes: torch's own clients, in the launcher and in the ranks. A socket of TCP
does not say whose process is at its other end, as a Unix socket does. But Linux lists every connection of the machine
with its owner, and one within the machine stands there twice, once from each end.
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

TELL_SECONDS = 30.0  # between two lines about strangers
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = 1
_READINGS = 4  # of the tables: one that changes while it is read may lack a row

Welcome = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Refused(ConnectionError):
    """The other side may not enter."""


class Refusals:
    """Says that strangers were refused: a line in TELL_SECONDS, which counts them.

    place: of the store, in words.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._count, self._last, self._silent = 0, "", False

    def add(self, stranger: str) -> None:
        """stranger: from where, and why it was refused."""
        self._count += 1
        self._last = stranger
        if not self._silent:
            self._silent = True
            self.tell()
            asyncio.get_running_loop().call_later(TELL_SECONDS, self._speak_again)

    def _speak_again(self) -> None:
        self._silent = False
        self.tell()

    def tell(self) -> None:
        if self._count:
            count = "a connection" if self._count == 1 else f"{self._count} connections, the last"
            self._count = 0
            say(f"paceline: refused {count} from {self._last}. (To the run's store, at {self._place}.)\n")


class Service:
    """A socket that listens, and the thread that serves it until `close`.

    Args:
        listener: closed with the rest.
        serving: what the thread does, until it is cancelled.

    Attributes:
        host, port: where it listens.
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
                refusals.tell()

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
    """A store for this user's processes."""
    values = Values()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(values, reader, writer.write)

    return welcome_own_processes(listener, welcome)


def welcome_own_processes(listener: socket.socket, welcome: Welcome) -> Service:
    """Welcome this user's processes that connect, and no other."""

    async def serving(listener: socket.socket, refusals: Refusals) -> None:
        async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            try:
                check_owner(sock)
                await welcome(reader, writer)
            except (Refused, BadRequest) as error:
                refusals.add(f"{place_of(sock)}: {error}")
            except (OSError, EOFError, asyncio.CancelledError):  # it has gone, or this launcher ends
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
    """HOST:PORT, or [HOST]:PORT of IPv6."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def place_of(sock: socket.socket) -> str:
    """The address of the other end."""
    try:
        return str(sock.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return "one that has gone"


# ---------------------------------------------------------------- whose is a connection?


def check_owner(sock: socket.socket) -> None:
    """Raises Refused where the other end is no process of this user. (Where the system does not tell: no check.)"""
    if not can_tell_owner():
        _say_once_that_nobody_is_asked()
        return
    found = _owner(sock)
    if found != os.geteuid():
        who = "no process of this machine" if found is None else f"a process of user {found}"
        raise Refused(f"it is {who}, and the store is of user {os.geteuid()}")


@functools.cache
def can_tell_owner() -> bool:
    """Does this system tell? Tried once, with a connection of our own. (macOS does not, nor do some sandboxes.)"""
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
def _say_once_that_nobody_is_asked() -> None:
    """On Linux one may count on it; elsewhere docs/security.md says that there is no such check."""
    if sys.platform == "linux":
        say(
            "paceline: this system does not tell whose a connection is (/proc/net/tcp), so that other users of this "
            "machine are not kept out of the run's store: docs/security.md.\n"
        )


def _owner(connection: socket.socket) -> int | None:
    """The user id of the other end; None where no process of this machine is there. Raises OSError where the
    connection has ended."""
    ends = _listed(connection.getpeername()), _listed(connection.getsockname())
    found = None
    for _ in range(_READINGS):
        found = next(filter(None, (_owner_in(path, *ends) for path in _TABLES)), None)
        if found is not None:
            break
    # Was it this connection, or one that took its numbers after it had ended? If it lives yet, this one.
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
        raise ConnectionResetError("the connection has ended")
    return None if found is None else int(found)


def _owner_in(path: str, own: set[str], other: set[str]) -> str | None:
    """The user id of the socket between these ends in one of the kernel's tables, which does not know the owner of a
    connection that is closing."""
    with contextlib.suppress(FileNotFoundError), open(path) as file:  # without IPv6 there is no tcp6
        for line in file:
            _, here, there, state, _, _, _, uid, *_ = line.split()
            if here in own and there in other and int(state, 16) == _ESTABLISHED:
                return uid
    return None


def _listed(address: tuple[Any, ...]) -> set[str]:
    """How the kernel writes an end of a connection: words of 4 bytes in the machine's order, and the port. An address
    of IPv4 may be written as one of IPv6."""
    found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    forms = [found.packed] if found.version == 6 else [found.packed, bytes(10) + b"\xff\xff" + found.packed]
    words = [struct.unpack(f"={len(packed) // 4}I", packed) for packed in forms]
    return {"".join(f"{word:08X}" for word in form) + f":{address[1]:04X}" for form in words}
