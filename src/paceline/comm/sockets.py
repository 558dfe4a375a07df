"""ZeroMQ sockets between processes of one run: encrypted, open to known keys only, and reporting lost peers.

    Listening   a server's socket, to which many peers connect
    Line        a peer's socket to one server

Both use CURVE (libzmq's elliptic-curve encryption): a server accepts only peers whose public key it was given. A lost
peer is noticed in two ways: its TCP connection ends, at once when it is killed; or its heartbeats stop, which ZeroMQ
sends in threads of its own, whatever Python does.
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
"""A peer that has sent nothing for so long, no heartbeats either, is lost."""

TEARDOWN_SECONDS = 1.0
"""A server that keeps a new connection for this time has not ended."""

_PROBE_SECONDS = 2.0
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


class Gone(NamedTuple):
    """What `Listening.receive` returns when a peer's connection has ended."""

    peer: int


class _Known:
    """Which public keys may connect."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = set(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        return bytes(key) in self._keys


class _Socket:
    """What both kinds share: a context of its own, encryption, heartbeats, and events when a connection ends."""

    def __init__(self, kind: int, keys: Keys) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_SECONDS * 1000))
        self._socket.setsockopt(zmq.SNDHWM, 0)  # no limit to the messages that wait
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _wait(self, deadline: float) -> bool:
        """Returns when there may be a message or an event; False after the deadline."""
        left = deadline - time.monotonic()
        if left > 0:
            self._poller.poll(int(left * 1000) + 1)
        return left > 0

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()


class Listening(_Socket):
    """A server's socket, bound to a free port of `host`."""

    def __init__(self, host: str) -> None:
        self.keys = new_keys()
        super().__init__(zmq.ROUTER, self.keys)
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self.admit(())  # nobody yet
        self._socket.curve_server = True
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"  # where peers connect to
        self._peers: dict[int, int] = {}  # file descriptor of a connection -> peer

    def admit(self, keys: Iterable[bytes]) -> None:
        """From now on peers with these public keys, and no others, may connect."""
        self._authenticator.configure_curve_callback("*", credentials_provider=_Known(keys))

    def receive(self, seconds: float) -> tuple[int, list[Any]] | Gone | None:
        """(peer, its message), or a peer that is lost; None where nothing came for so long."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(zmq.Again):
                head, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                peer = self._peers[head.get(zmq.SRCFD)] = int(bytes(head.buffer))
                return peer, frames
            if self._monitor.poll(0):
                # All that this peer had sent was read: its messages are in the queue before the event.
                connection = recv_monitor_message(self._monitor)["value"]
                if connection in self._peers:
                    return Gone(self._peers.pop(connection))
            elif not self._wait(deadline):
                return None

    def send(self, peer: int, frames: Sequence[Any]) -> None:
        """To a lost peer nothing is sent."""
        self._socket.send_multipart([str(peer).encode(), *frames], copy=False)

    def close(self) -> None:
        self._authenticator.stop()
        super().close()


class Line(_Socket):
    """A peer's socket to one server. `name` is what an error calls the server."""

    def __init__(self, endpoint: str, server_key: bytes, keys: Keys, peer: int, name: str) -> None:
        super().__init__(zmq.DEALER, keys)
        self.name = name
        self._socket.identity = str(peer).encode()
        self._socket.curve_serverkey = server_key
        self._socket.connect(endpoint)
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._address = host, int(port)

    def send(self, frames: Sequence[Any]) -> None:
        """The memory of the frames must not change before the answer has come. Raises WorldError where the server is
        lost or does not admit this process."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise WorldError(f"{self.name} has gone, or does not know this process's key.") from None

    def _still_listens(self) -> bool:
        """Is the server's process there? The kernel accepts connections for a stopped process, and refuses them for one
        that has ended. A process that ends closes its sockets one by one. Its listening socket may be the last: then
        the kernel resets what it had accepted."""
        try:
            probe = socket.create_connection(self._address, timeout=_PROBE_SECONDS)
        except OSError:
            return False
        with probe:
            probe.settimeout(TEARDOWN_SECONDS)
            try:
                return bool(probe.recv(1))  # the greeting of a process that runs
            except TimeoutError:
                return True
            except OSError:
                return False

    def receive(self, seconds: float) -> list[Any] | None:
        """The next message; None where none came for so long. Raises WorldError where the server is lost."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(zmq.Again):
                return list(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            if self._monitor.poll(0):
                if self._still_listens():
                    raise WorldError(
                        f"{self.name} does not answer: nothing was heard of it for {SILENCE_SECONDS:g} s, though its "
                        "process is there. Is it stopped by a signal (SIGSTOP, Ctrl-Z), or its machine too busy? Start "
                        "the run again: a script that calls run.restore goes on from its last checkpoint."
                    )
                raise WorldError(
                    f"{self.name} has gone: its connection ended. See what that process said, and start the run again: "
                    "a script that calls run.restore goes on from its last checkpoint."
                )
            if not self._wait(deadline):
                return None
