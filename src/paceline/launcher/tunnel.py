"""The stores of a run on several machines: one launcher hosts them, the others forward to them. Does not import torch.

    open_rendezvous_host  hosts the stores at the rendezvous host's address, for launchers that know the secret
    open_relay   forwards a loopback port to one of these stores, for this user's processes

torch's clients, in the launcher and in the ranks, connect to a relay. For each connection, the relay opens a ZeroMQ
connection to the rendezvous host, encrypted with CURVE (https://rfc.zeromq.org/spec/26). The keys of both sides are
derived from the run's secret. A CURVE client must know the server's public key, so a client without the secret gets no
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import os
import socket
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from paceline.launcher.checks import HOST, listen
from paceline.launcher.key_values import PING, PONG, BadRequest, Values, serve
from paceline.launcher.store import UNKNOWN_PLACE, Refusals, Refused, Service, place_of, welcome_own_processes, written

SECONDS_TO_PROVE = 5.0
SILENT_SECONDS = 30.0  # without a heartbeat of the other launcher: its machine is down
_READ = 1 << 16
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_GREETING_BYTES = 10  # every ZeroMQ socket first sends 0xFF, 8 arbitrary bytes, 0x7F


class NotALauncher(ConnectionError):
    """The peer does not speak the launcher's protocol, or does not answer in time."""


def open_rendezvous_host(listener: socket.socket, secret: bytes) -> Service:
    """Host named stores for launchers that know the secret."""

    async def keep(listener: socket.socket, refusals: Refusals) -> None:
        stores: dict[bytes, Values] = {}
        sessions: dict[bytes, asyncio.StreamReader] = {}
        tasks: set[asyncio.Future[None]] = set()
        unauthenticated: dict[int, str] = {}  # descriptor -> address, of connections that have sent nothing yet

        async def welcome(peer: bytes, store: bytes, reader: asyncio.StreamReader) -> None:
            send = functools.partial(_send, router, peer)
            with contextlib.suppress(BadRequest, EOFError):
                await serve(stores.setdefault(store, Values()), reader, send)
            send(b"")  # the relay closes its connection

        with zmq.asyncio.Context() as context, _encrypted(context.socket(zmq.ROUTER), secret, keeps=True) as router:
            router.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
            with router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED) as monitor:
                router.bind(_endpoint(listener.getsockname()[:2]))
                tasks.add(asyncio.ensure_future(_report_refused(monitor, unauthenticated, refusals)))
                try:
                    while True:
                        peer, message = await router.recv_multipart(copy=False)
                        unauthenticated.pop(message.get(zmq.SRCFD), None)
                        peer, data = peer.bytes, message.bytes
                        if peer not in sessions:
                            sessions[peer] = asyncio.StreamReader()
                            task = asyncio.ensure_future(welcome(peer, data, sessions[peer]))
                            tasks.add(task)
                            task.add_done_callback(tasks.discard)
                        elif data:
                            sessions[peer].feed_data(data)
                        else:
                            sessions.pop(peer).feed_eof()
                finally:
                    await _end(*tasks)
                    router.disable_monitor()

    return Service(listener, keep)


def open_relay(address: tuple[str, int], secret: bytes, store: str) -> Service:
    """Forward a free port of this machine's loopback to a store on the rendezvous host.

    Args:
        address: the rendezvous host's address.
        secret: the run's secret.
        store: the store's name.
    """

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        context = zmq.asyncio.Context.instance()
        with _encrypted(context.socket(zmq.DEALER), secret) as there, there.get_monitor_socket(_LOST) as lost:
            there.connect(_endpoint(address))
            await there.send(store.encode())

            async def to_host() -> None:
                while data := await reader.read(_READ):
                    await there.send(data)
                await there.send(b"")  # the client has disconnected

            async def to_client() -> None:
                while data := await there.recv():
                    writer.write(data)
                    await writer.drain()

            ways = [asyncio.ensure_future(way) for way in (to_host(), to_client(), lost.recv_multipart())]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end(*ways)
                there.disable_monitor()

    return welcome_own_processes(listen(HOST, 0), welcome)


def knock(address: tuple[str, int], secret: bytes, seconds: float) -> None:
    """Check that a rendezvous host with the same secret answers.

    Raises:
        NotALauncher: the peer is not a launcher.
        Refused: the launcher there has a different secret.
        OSError: nothing answers.
    """
    with zmq.Context() as context, _encrypted(context.socket(zmq.DEALER), secret) as there:
        with there.get_monitor_socket(_LOST) as lost:
            there.connect(_endpoint(address))
            for message in (b"knock", PING):
                there.send(message)
            poller = zmq.Poller()
            poller.register(there, zmq.POLLIN)
            poller.register(lost, zmq.POLLIN)
            answered = there in dict(poller.poll(int(seconds * 1000))) and there.recv() == PONG
            there.send(b"")
            there.disable_monitor()
    if answered:
        return
    with socket.create_connection(address, timeout=seconds) as sock:
        try:
            greeting = sock.recv(_GREETING_BYTES, socket.MSG_WAITALL)
        except OSError as error:
            raise NotALauncher(str(error)) from None
    if greeting[:1] + greeting[-1:] != b"\xff\x7f":
        raise NotALauncher("it does not speak a launcher's protocol")
    raise Refused("it has a different secret")


def _encrypted(sock: Any, secret: bytes, keeps: bool = False) -> Any:
    """Set up the socket to encrypt its connections with keys from the secret.

    Args:
        keeps: whether the socket belongs to the rendezvous host, not to a relay.
    """
    host, relay = _keys(secret, b"host"), _keys(secret, b"relay")
    sock.curve_publickey, sock.curve_secretkey = host if keeps else relay
    if keeps:
        sock.curve_server = True
    else:
        sock.curve_serverkey = host[0]
        sock.setsockopt(zmq.RECONNECT_IVL, -1)  # do not reconnect a broken connection
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.LINGER, 1000)
    sock.setsockopt(zmq.SNDHWM, 0)  # unlimited queues: messages beyond a limit would be lost
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(SECONDS_TO_PROVE * 1000))
    sock.setsockopt(zmq.HEARTBEAT_IVL, int(SILENT_SECONDS * 1000 / 6))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENT_SECONDS * 1000))
    return sock


def _keys(secret: bytes, side: bytes) -> tuple[bytes, bytes]:
    """Derive the (public, private) keys of a side from the secret, as Z85 text."""
    private = z85.encode(hmac.digest(secret, b"paceline store, " + side, "sha256"))
    return zmq.curve_public(private), private


def _endpoint(address: tuple[str, int]) -> str:
    return f"tcp://{written(address)}"


def _send(router: zmq.asyncio.Socket, peer: bytes, data: bytes) -> None:
    router.send_multipart([peer, data])


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _report_refused(monitor: zmq.asyncio.Socket, unauthenticated: dict[int, str], refusals: Refusals) -> None:
    """Report connections that ended before they sent a message encrypted with the secret's keys."""
    while True:
        event = parse_monitor_message(await monitor.recv_multipart())
        descriptor = event["value"]
        if event["event"] == zmq.EVENT_ACCEPTED:
            unauthenticated[descriptor] = UNKNOWN_PLACE
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as accepted:
                unauthenticated[descriptor] = place_of(accepted)
        elif (address := unauthenticated.pop(descriptor, None)) is not None:
            refusals.add(f"{address}: it does not know the secret")
