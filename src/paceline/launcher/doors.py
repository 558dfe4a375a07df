"""Who may come to a run's store, and by which door. A thread of the launcher serves them. No torch.

    StoreDoor    on loopback: this user's processes, to a store that is here
    RelayDoor    on loopback: this user's processes, to a room of the keeper's on another machine
    KeeperDoor   on the address that was named: launchers that know the secret, to rooms, each a store of its own

Through the first two come torch's own clients, in the launcher and in the ranks. Linux says whose process is at the
other end (socket_owner.py). Between machines each of these connections is one of its own, sealed (sealed.py).

Strangers cost little: one who has not proved himself has SECONDS_TO_PROVE, a few bytes, and one of MAX_UNPROVED places,
of which a newcomer takes that of the oldest. They are refused and told of, and nobody waits for them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from paceline.launcher import socket_owner
from paceline.launcher.key_values import BadRequest, Session, Values
from paceline.launcher.output import say
from paceline.launcher.sealed import Handshake, Refused, Sealed, answer, call

SECONDS_TO_PROVE = 5.0
SECONDS_TO_REACH = 60.0  # for a relay to reach the keeper and prove itself there
MAX_UNPROVED = 64
MAX_ROOMS = 64
TELL_SECONDS = 30.0  # between two lines about strangers
_WAITING_BYTES = 8 << 20  # to be sent to one that does not read: nothing more is read from who causes it
_READ = 1 << 16
_ACCEPTED_AT_ONCE = 64


class Door(Protocol):
    """What is behind a socket that listens."""

    def welcome(self, doors: Doors, sock: socket.socket) -> None:
        """Somebody has connected."""


class Connection:
    """One connection, and what is to be sent on it.

    Attributes:
        receive: called with what has come.
        gone: called once, when it has ended.
        sink: the connection on which that is sent on which this one's input leads to.
        deadline: until when it must have proved itself; None: it has.
    """

    def __init__(self, doors: Doors, sock: socket.socket) -> None:
        self.doors, self.sock = doors, sock
        self.receive: Callable[[bytes], None] = lambda data: None
        self.gone: Callable[[], None] = lambda: None
        self.sink: Connection = self
        self.source: Connection = self
        self.deadline: float | None = None
        self.paused = False  # is nothing to be read, since the sink is not ready?
        self.closed = False
        self._out = bytearray()
        self._mask = 0
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.place = _place(sock)
        doors.connections.add(self)
        self.update()

    @property
    def crowded(self) -> bool:
        return len(self._out) > _WAITING_BYTES

    def send(self, data: bytes) -> None:
        if not self.closed:
            self._out += data
            self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: self.sock.send(self._out[:_READ])]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()
            return
        self.update()
        if self.source is not self and not self.source.closed:
            self.source.update()

    def update(self) -> None:
        """Look for what can be done now, and for nothing else."""
        if self.closed:
            return
        reading = not self.paused and not self.sink.crowded
        mask = (selectors.EVENT_READ if reading else 0) | (selectors.EVENT_WRITE if self._out else 0)
        if mask == self._mask:
            return
        if not self._mask:
            self.doors.selector.register(self.sock, mask, self)
        elif mask:
            self.doors.selector.modify(self.sock, mask, self)
        else:
            self.doors.selector.unregister(self.sock)
        self._mask = mask

    def ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self.flush()
        if mask & selectors.EVENT_READ and not self.closed:
            try:
                data = self.sock.recv(_READ)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            try:
                self.receive(data)
            except (BadRequest, Refused) as error:
                self.doors.tell(self.place, str(error))
                self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._mask:
            self.doors.selector.unregister(self.sock)
        with contextlib.suppress(OSError):
            self.sock.close()
        self.doors.connections.discard(self)
        self.gone()


class Doors:
    """One thread, which serves connections until `close`.

    Args:
        listener: a socket that listens; closed with the rest.
        door: what is behind it.

    Attributes:
        host, port: where it listens.
    """

    def __init__(self, listener: socket.socket, door: Door) -> None:
        self.host, self.port = listener.getsockname()[:2]
        self.connections: set[Connection] = set()
        self.selector = selectors.DefaultSelector()
        self._listener, self._door = listener, door
        self._name = _written(listener.getsockname())
        self._untold = 0  # strangers of whom nothing was said yet
        self._told_at = -TELL_SECONDS
        self._last = ""
        listener.setblocking(False)
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self._wakes, selectors.EVENT_READ, None)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="paceline-store", daemon=True)
        self._pid = os.getpid()
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._stopped or os.getpid() != self._pid:
            return
        self._stopped = True
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()

    def tell(self, place: str, why: str) -> None:
        """Say that a stranger was refused; no more than a line in TELL_SECONDS, which counts the others."""
        self._untold += 1
        self._last = f"{place}: {why}"
        self._tell_due()

    def make_room(self) -> None:
        """Before another one who has proved nothing: end the oldest of them if they are too many."""
        unproved = [one for one in self.connections if one.deadline is not None]
        if len(unproved) >= MAX_UNPROVED:
            oldest = min(unproved, key=lambda one: one.deadline or 0.0)
            self.tell(oldest.place, "it took its time to prove itself, while many others came")
            oldest.close()

    def _run(self) -> None:
        try:
            while not self._stopped:
                waiting = self._untold or any(one.deadline is not None for one in self.connections)
                for key, mask in self.selector.select(0.5 if waiting else None):
                    if isinstance(key.data, Connection):
                        if not key.data.closed:
                            key.data.ready(mask)
                    elif key.data is not None:
                        key.data()
                self._expire()
        finally:
            for one in list(self.connections):
                one.close()
            self._listener.close()
            self.selector.close()
            self._wakes.close()
            self._wake.close()
            if self._untold:
                self._told_at = -TELL_SECONDS
                self._tell_due()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # no descriptor is left: the next turn tries again
                    time.sleep(0.05)
                return
            try:
                self._door.welcome(self, sock)
            except Refused as error:
                self.tell(_place(sock), str(error))
                sock.close()
            except OSError:  # it has gone already
                sock.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for one in [one for one in self.connections if one.deadline is not None and one.deadline < now]:
            self.tell(one.place, "it did not prove in time that it knows the secret")
            one.close()
        self._tell_due()

    def _tell_due(self) -> None:
        now = time.monotonic()
        if not self._untold or now - self._told_at < TELL_SECONDS:
            return
        count = "a connection" if self._untold == 1 else f"{self._untold} connections, the last"
        self._untold, self._told_at = 0, now
        say(f"paceline: refused {count} from {self._last}. (To the run's store, at {self._name}.)\n")


def _written(address: tuple[object, ...]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _place(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return "one that has gone"


@functools.cache
def _say_once_that_nobody_is_asked() -> None:
    """On Linux one may count on it; elsewhere docs/security.md says that there is no such check."""
    if sys.platform == "linux":
        say(
            "paceline: this system does not tell whose a connection is (/proc/net/tcp), so that other users of this "
            "machine are not kept out of the run's store: docs/security.md.\n"
        )


def check_owner(sock: socket.socket) -> None:
    """Raises Refused where the other end is no process of this user. (Where the system does not tell: no check.)"""
    if not socket_owner.can_tell():
        _say_once_that_nobody_is_asked()
        return
    found = socket_owner.owner(sock)
    if found != os.geteuid():
        who = "no process of this machine" if found is None else f"a process of user {found}"
        raise Refused(f"it is {who}, and the store is of user {os.geteuid()}")


class StoreDoor:
    """To a store that is here, for this user's processes."""

    def __init__(self) -> None:
        self._values = Values()

    def welcome(self, doors: Doors, sock: socket.socket) -> None:
        check_owner(sock)
        connection = Connection(doors, sock)
        session = Session(self._values, connection.send)
        connection.receive, connection.gone = session.feed, session.close


class KeeperDoor:
    """To rooms, each a store of its own, for launchers that know the secret.

    Args:
        secret: alike on all machines.
        own_machine: are all launchers on this machine, so that the user of each can be asked for?
    """

    def __init__(self, secret: bytes, own_machine: bool) -> None:
        self._secret, self._own_machine = secret, own_machine
        self._rooms: dict[str, tuple[Values, set[Connection]]] = {}

    def welcome(self, doors: Doors, sock: socket.socket) -> None:
        if self._own_machine:
            check_owner(sock)
        doors.make_room()
        connection = Connection(doors, sock)
        connection.deadline = time.monotonic() + SECONDS_TO_PROVE
        _shake_hands(connection, answer(self._secret), lambda sealed, rest: self._enter(connection, sealed, rest))

    def _enter(self, connection: Connection, sealed: Sealed, rest: bytes) -> None:
        connection.deadline = None
        if sealed.room not in self._rooms and len(self._rooms) >= MAX_ROOMS:
            for name in [name for name, (_, inside) in self._rooms.items() if not inside]:
                del self._rooms[name]  # of rounds that are over
        values, inside = self._rooms.setdefault(sealed.room, (Values(), set()))
        inside.add(connection)
        session = Session(values, lambda data: connection.send(sealed.seal(data)))

        def gone() -> None:
            inside.discard(connection)
            session.close()

        connection.gone = gone
        connection.receive = lambda data: session.feed(sealed.open(data))
        if rest:
            connection.receive(rest)


class RelayDoor:
    """To a room of the keeper's, for this user's processes.

    Args:
        address: of the keeper.
        secret: alike on all machines.
        room: its name.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, room: str) -> None:
        self._address, self._secret, self._room = address, secret, room
        self._family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET

    def welcome(self, doors: Doors, sock: socket.socket) -> None:
        check_owner(sock)
        there = socket.socket(self._family, socket.SOCK_STREAM)
        there.setblocking(False)
        try:
            there.connect(self._address)
        except BlockingIOError:
            pass
        except OSError:
            there.close()
            raise
        near, far = Connection(doors, sock), Connection(doors, there)
        near.gone, far.gone = far.close, near.close
        near.sink, far.sink = far, near
        near.source, far.source = far, near
        far.place, far.deadline = self._address[0], time.monotonic() + SECONDS_TO_REACH
        near.paused = True
        near.update()

        def through(sealed: Sealed, rest: bytes) -> None:
            far.deadline = None
            near.receive = lambda data: far.send(sealed.seal(data))
            far.receive = lambda data: near.send(sealed.open(data))
            near.paused = False
            near.update()
            if rest:
                far.receive(rest)

        _shake_hands(far, call(self._secret, self._room), through)


def _shake_hands(connection: Connection, handshake: Handshake, then: Callable[[Sealed, bytes], None]) -> None:
    """Let the handshake read and write, and go on with what is sealed, and with what has come beyond the handshake."""
    buffer = bytearray()
    first, need = next(handshake)
    if first:
        connection.send(first)

    def receive(data: bytes) -> None:
        nonlocal need
        buffer.extend(data)
        try:
            while len(buffer) >= need:
                part = bytes(buffer[:need])
                del buffer[:need]
                answered, need = handshake.send(part)
                if answered:
                    connection.send(answered)
        except StopIteration as done:
            then(done.value, bytes(buffer))

    connection.receive = receive


class NoKeeper(ConnectionError):
    """What answers does not speak as a launcher does, or not in time."""


def knock(address: tuple[str, int], secret: bytes, seconds: float) -> None:
    """Is there a keeper that knows the secret? Raises NoKeeper or Refused where what answers is none; OSError where
    nothing does."""
    deadline = time.monotonic() + seconds
    with socket.create_connection(address, timeout=seconds) as sock:
        handshake = call(secret, "knock")
        answered, need = next(handshake)
        try:
            sock.sendall(answered)
            answered, need = handshake.send(_receive(sock, need, deadline))
        except OSError as error:
            raise NoKeeper(str(error)) from None
        try:
            sock.sendall(answered)
            handshake.send(_receive(sock, need, deadline))
        except StopIteration:
            return


def _receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes. Raises Refused where the connection ends before, and TimeoutError."""
    found = b""
    while len(found) < count:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        more = sock.recv(count - len(found))
        if not more:
            raise Refused("it ended the connection")
        found += more
    return found
