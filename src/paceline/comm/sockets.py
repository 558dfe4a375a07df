"""ZeroMQ sockets between processes of one run: encrypted, open to known keys only, and reporting lost peers.

    Listening   a server's socket, to which many peers connect
    Line        a peer's socket to one server

Both use CURVE (libzmq's elliptic-curve encryption): a server accepts only peers with a known public key. A lost peer is
detected in two ways: its TCP connection ends (immediately, if the peer is killed), or its heartbeats stop. ZeroMQ sends
heartbeats from its own threads, even if Python hangs.
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
"""A peer is lost after this time without a message or a heartbeat."""

TEARDOWN_SECONDS = 1.0
"""If a server keeps a new connection open for this time, its process still exists."""

_PROBE_SECONDS = 2.0
_LINGER_MS = 2000  # time to send the remaining messages when a socket is closed


class Keys(NamedTuple):
    """A pair of CURVE keys, as Z85 text."""

    public: bytes
    secret: bytes


def new_keys() -> Keys:
    return Keys(*zmq.curve_keypair())


def address_towards(host: str | None, port: int | None) -> str:
    """The address of this machine's network interface towards `host`; loopback if `host` is None."""
    if host is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


class Gone(NamedTuple):
    """Returned by `Listening.receive` when a peer's connection has ended."""

    peer: int


class _Known:
    """The public keys of the peers that may connect."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = set(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        return bytes(key) in self._keys


class _Socket:
    """The common part of both sockets: a ZeroMQ context, encryption, heartbeats, and an event if a connection ends."""

    def __init__(self, kind: int, keys: Keys) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_SECONDS * 1000))
        self._socket.setsockopt(zmq.SNDHWM, 0)  # no limit on queued messages
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _wait(self, deadline: float) -> bool:
        """Return True when there may be a message or an event; False after the deadline."""
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
        self.admit(())  # no peers yet
        self._socket.curve_server = True
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"  # the address for peers
        self._peers: dict[int, int] = {}  # file descriptor of a connection -> peer
        self._ended: int | None = None  # a connection that has ended, while its last messages are read

    def admit(self, keys: Iterable[bytes]) -> None:
        """From now on accept only peers with these public keys."""
        self._authenticator.configure_curve_callback("*", credentials_provider=_Known(keys))

    def receive(self, seconds: float) -> tuple[int, list[Any]] | Gone | None:
        """Return (peer, its message), or Gone for a lost peer; None if nothing came within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(zmq.Again):
                head, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                peer = self._peers[head.get(zmq.SRCFD)] = int(bytes(head.buffer))
                return peer, frames
            if self._ended is not None:
                gone, self._ended = self._peers.pop(self._ended, None), None
                if gone is not None:
                    return Gone(gone)
            elif self._monitor.poll(0):
                # A peer's last messages are queued before this event, but maybe after the read above: read again first.
                self._ended = recv_monitor_message(self._monitor)["value"]
            elif not self._wait(deadline):
                return None

    def send(self, peer: int, frames: Sequence[Any]) -> None:
        """Send to a peer. Messages to a lost peer are dropped."""
        self._socket.send_multipart([str(peer).encode(), *frames], copy=False)

    def close(self) -> None:
        self._authenticator.stop()
        super().close()


class Line(_Socket):
    """A peer's socket to one server. `name` names the server in errors."""

    def __init__(self, endpoint: str, server_key: bytes, keys: Keys, peer: int, name: str) -> None:
        super().__init__(zmq.DEALER, keys)
        self.name = name
        self._socket.identity = str(peer).encode()
        self._socket.curve_serverkey = server_key
        self._socket.connect(endpoint)
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._address = host, int(port)

    def send(self, frames: Sequence[Any]) -> None:
        """Send to the server. The frames' memory must not change before the answer has arrived. Raises WorldError if
        the server is lost or rejects this process."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise WorldError(f"{self.name} is lost, or rejects this process's key.") from None

    def _still_listens(self) -> bool:
        """Whether the server's process still exists. The kernel accepts connections to a stopped process, and refuses
        connections to a process that has ended. A process that is ending closes its sockets one by one. The kernel may
        still accept a connection to it, and resets that connection when the listening socket is closed."""
        try:
            probe = socket.create_connection(self._address, timeout=_PROBE_SECONDS)
        except OSError:
            return False
        with probe:
            probe.settimeout(TEARDOWN_SECONDS)
            try:
                return bool(probe.recv(1))  # the greeting of a running process
            except TimeoutError:
                return True
            except OSError:
                return False

    def receive(self, seconds: float) -> list[Any] | None:
        """Return the next message; None if none came within `seconds`. Raises WorldError if the server is lost."""
        deadline = time.monotonic() + seconds
        ended = False
        while True:
            with contextlib.suppress(zmq.Again):
                return list(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            if ended:
                if self._still_listens():
                    raise WorldError(
                        f"{self.name} does not answer: its process exists, but sent nothing for {SILENCE_SECONDS:g} s. "
                        "Was it stopped by a signal (SIGSTOP, Ctrl-Z), or is its machine overloaded? Start the run "
                        "again: a script that calls run.restore continues from its last checkpoint."
                    )
                raise WorldError(
                    f"{self.name} is lost: its connection ended. See that process's output, and start the run again: "
                    "a script that calls run.restore continues from its last checkpoint."
                )
            # The server's last message is queued before this event, but maybe after the read above: read again first.
            ended = bool(self._monitor.poll(0))
            if not ended and not self._wait(deadline):
                return None
