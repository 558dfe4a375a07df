"""ZeroMQ sockets between processes of one run: encrypted, open to known keys only, and telling who has gone.

    Listening   a server's socket, to which many peers talk
    Line        a peer's socket to one server

Both use CURVE (libzmq's elliptic-curve encryption): a server takes only peers whose public key it was given. ZeroMQ's
own heartbeats run in its own threads, whatever Python does; together with the end of a TCP connection, which follows a
kill at once, they say when the other side has gone.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import WorldError

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""A peer that has been silent for so long, its heartbeats too, has gone."""

_LINGER_MS = 2000  # for the last message when a socket is closed


class Keys(NamedTuple):
    """A pair of CURVE keys, as Z85 text."""

    public: bytes
    secret: bytes


def new_keys() -> Keys:
    return Keys(*zmq.curve_keypair())


def address_towards(host: str | None, port: int | None) -> str:
    """The address of this machine's interface from which `host` is reached; loopback where there is none to reach."""
    if host is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def _heartbeats(own: Any) -> None:
    own.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
    own.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_SECONDS * 1000))
    own.setsockopt(zmq.SNDHWM, 0)
    own.setsockopt(zmq.RCVHWM, 0)
    own.setsockopt(zmq.LINGER, _LINGER_MS)


class Gone(NamedTuple):
    """What `Listening.receive` says of a peer whose connection has ended."""

    peer: int


class _Known:
    """Which keys are let in."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = set(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        return bytes(key) in self._keys


class Listening:
    """A server's socket, bound to a free port of `host`. `endpoint` is where to connect to."""

    def __init__(self, host: str) -> None:
        self.keys = new_keys()
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=_Known(()))  # nobody, until `admit`
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer may come again, in another connection
        _heartbeats(self._socket)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = self.keys
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.endpoint = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._peers: dict[int, int] = {}  # file descriptor of a connection -> peer
        self._latest = -1  # connection of the message that came last
        self._over: dict[int, int] = {}  # how many ends of a connection to pass over: another has its number now

    def admit(self, keys: Iterable[bytes]) -> None:
        """From now on peers with these public keys, and no others, are let in."""
        self._authenticator.configure_curve_callback("*", credentials_provider=_Known(keys))

    def anew(self, peer: int, known: bool) -> None:
        """The message that came last is a peer's first over another connection. known: the end of the one before has
        not been told, and is not to be told any more."""
        before = [c for c, p in self._peers.items() if p == peer and c != self._latest]
        for connection in before:
            del self._peers[connection]
        if known and not before:
            self._over[self._latest] = self._over.get(self._latest, 0) + 1

    def receive(self, seconds: float) -> tuple[int, list[Any]] | Gone | None:
        """(peer, its message), or that one has gone; None where nothing came for so long."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(zmq.Again):
                head, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                peer, self._latest = int(bytes(head.buffer)), head.get(zmq.SRCFD)
                self._peers[self._latest] = peer
                return peer, frames
            if self._monitor.poll(0):
                # What it had sent before has been read: it is in the queue before the event.
                connection = recv_monitor_message(self._monitor)["value"]
                if self._over.get(connection):
                    self._over[connection] -= 1
                elif connection in self._peers:
                    return Gone(self._peers.pop(connection))
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
            poller.poll(int(left * 1000) + 1)

    def send(self, peer: int, frames: Sequence[Any]) -> None:
        """To a peer that has gone nothing is sent."""
        self._socket.send_multipart([str(peer).encode(), *frames], copy=False)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._authenticator.stop()
        self._context.term()


class Line:
    """A peer's socket to one server. `name` is what an error calls the server."""

    def __init__(self, endpoint: str, server_key: bytes, keys: Keys, peer: int, name: str) -> None:
        self.name = name
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _heartbeats(self._socket)
        self._socket.identity = str(peer).encode()
        self._socket.curve_serverkey = server_key
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, frames: Sequence[Any]) -> None:
        """The memory of the frames must not change before the answer has come. Raises WorldError where the server has
        gone or lets this process not in."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)  # there is no limit to what may wait
        except zmq.Again:
            raise WorldError(f"{self.name} has gone, or does not know this process's key.") from None

    def receive(self, seconds: float) -> list[Any] | None:
        """The next message; None where none came for so long. Raises WorldError where the server has gone."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(zmq.Again):
                return list(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            if self._monitor.poll(0):
                raise WorldError(
                    f"{self.name} has gone: its connection ended. See what that process said, and start the run again: "
                    "a script that calls run.restore goes on from its last checkpoint."
                )
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._poller.poll(int(left * 1000) + 1)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
