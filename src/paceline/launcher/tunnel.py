"""The stores of a run on several machines: one launcher keeps them, the others lead to them. No torch.

    open_keeper  on the address that was named: stores for launchers that know the secret
    open_relay   on loopback, for this user's processes: the way to one of these stores

Through a relay come torch's own clients, in the launcher and in the ranks. Each of their connections is a ZeroMQ
connection of its own between the machines, encrypted by CURVE (https://rfc.zeromq.org/spec/26). The keys of both sides
are derived from the run's secret. To speak to a CURVE server at all, one must know its public key: who does not know
the secret gets no answer.
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
from paceline.launcher.store import Refusals, Refused, Service, place_of, welcome_own_processes, written

SECONDS_TO_PROVE = 5.0
SILENT_SECONDS = 30.0  # without a heartbeat of the other launcher: its machine is gone
_READ = 1 << 16
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_GREETING_BYTES = 10  # with which every ZeroMQ socket begins: 0xFF, 8 bytes without a meaning, 0x7F


class NoKeeper(ConnectionError):
    """What answers does not speak as a launcher does, or not in time."""


def open_keeper(listener: socket.socket, secret: bytes) -> Service:
    """Stores, by the names of rooms, for launchers that know the secret."""

    async def keep(listener: socket.socket, refusals: Refusals) -> None:
        rooms: dict[bytes, Values] = {}
        sessions: dict[bytes, asyncio.StreamReader] = {}
        tasks: set[asyncio.Future[None]] = set()
        strangers: dict[int, str] = {}  # descriptor -> from where, of connections that have said nothing yet

        async def welcome(peer: bytes, room: bytes, reader: asyncio.StreamReader) -> None:
            send = functools.partial(_send, router, peer)
            with contextlib.suppress(BadRequest, EOFError):
                await serve(rooms.setdefault(room, Values()), reader, send)
            send(b"")  # the relay ends its connection

        with zmq.asyncio.Context() as context, _encrypted(context.socket(zmq.ROUTER), secret, keeps=True) as router:
            router.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
            with router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED) as monitor:
                router.bind(_endpoint(listener.getsockname()[:2]))
                tasks.add(asyncio.ensure_future(_tell_refused(monitor, strangers, refusals)))
                try:
                    while True:
                        peer, message = await router.recv_multipart(copy=False)
                        strangers.pop(message.get(zmq.SRCFD), None)
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


def open_relay(address: tuple[str, int], secret: bytes, room: str) -> Service:
    """A free port of this machine's loopback which leads to a store of the keeper's.

    Args:
        address: of the keeper.
        secret: alike on all machines.
        room: the store's name.
    """

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        context = zmq.asyncio.Context.instance()
        with _encrypted(context.socket(zmq.DEALER), secret) as there, there.get_monitor_socket(_LOST) as lost:
            there.connect(_endpoint(address))
            await there.send(room.encode())

            async def to_keeper() -> None:
                while data := await reader.read(_READ):
                    await there.send(data)
                await there.send(b"")  # the client has gone

            async def to_client() -> None:
                while data := await there.recv():
                    writer.write(data)
                    await writer.drain()

            ways = [asyncio.ensure_future(way) for way in (to_keeper(), to_client(), lost.recv_multipart())]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end(*ways)
                there.disable_monitor()

    return welcome_own_processes(listen(HOST, 0), welcome)


def knock(address: tuple[str, int], secret: bytes, seconds: float) -> None:
    """Is there a keeper that knows the secret? Raises NoKeeper or Refused where what answers is none; OSError where
    nothing does."""
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
            raise NoKeeper(str(error)) from None
    if greeting[:1] + greeting[-1:] != b"\xff\x7f":
        raise NoKeeper("it does not begin as a launcher does")
    raise Refused("it has another secret")


def _encrypted(sock: Any, secret: bytes, keeps: bool = False) -> Any:
    """The socket, which encrypts its connections with keys from the secret. keeps: is it the keeper's?"""
    keeper, relay = _keys(secret, b"keeper"), _keys(secret, b"relay")
    sock.curve_publickey, sock.curve_secretkey = keeper if keeps else relay
    if keeps:
        sock.curve_server = True
    else:
        sock.curve_serverkey = keeper[0]
        sock.setsockopt(zmq.RECONNECT_IVL, -1)  # a connection that broke counts as broken
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.LINGER, 1000)
    sock.setsockopt(zmq.SNDHWM, 0)  # no limit to what waits: what is beyond one would be lost
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(SECONDS_TO_PROVE * 1000))
    sock.setsockopt(zmq.HEARTBEAT_IVL, int(SILENT_SECONDS * 1000 / 6))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENT_SECONDS * 1000))
    return sock


def _keys(secret: bytes, side: bytes) -> tuple[bytes, bytes]:
    """The (public, private) key of a side, as Z85 text. Who knows the secret knows both, and nobody else either."""
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


async def _tell_refused(monitor: zmq.asyncio.Socket, strangers: dict[int, str], refusals: Refusals) -> None:
    """Tell of connections that have ended before anything came that was encrypted with the secret's keys."""
    while True:
        event = parse_monitor_message(await monitor.recv_multipart())
        descriptor = event["value"]
        if event["event"] == zmq.EVENT_ACCEPTED:
            strangers[descriptor] = "one that has gone"
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as accepted:
                strangers[descriptor] = place_of(accepted)
        elif (place := strangers.pop(descriptor, None)) is not None:
            refusals.add(f"{place}: it does not know the secret")
