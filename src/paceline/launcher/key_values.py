"""The key-value store of a run: serves the requests of torch's TCPStore client. No sockets, no torch.

torch's server does not authenticate its clients. For this server, store.py does. It serves torch's client (TCPStore
with is_master=False), so scripts, and programs that a rank starts, find a store as under torchrun.
tests/test_torch_private.py sends it every request of the installed torch's client.

A request is one byte for the operation, then the arguments. An argument is an 8-byte number, or a byte string after its
length. Numbers are in the machine's byte order. Answers have the same form. The server interprets no values, except the
numbers of `add`.
"""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

MAX_BYTES = 64 << 20
"""The size limit of a key or value."""
MAX_KEYS = 1 << 20
"""The limit for the number of keys in a request."""

_GREETING = struct.pack("=BI", 0, 0x3C85F7CE)
PING, PONG = _GREETING + struct.pack("=BI", 13, 1), struct.pack("=I", 1)
"""A client's first request, which changes nothing, and the server's answer."""


class BadRequest(ValueError):
    """The request is not from torch's client, or exceeds a limit."""


class Flag(bytes):
    """An answer that is sent without its length."""


_DONE, _NOT_YET, _CANCELED = Flag(b"\0"), Flag(b"\1"), Flag(b"\1")
Answer = bytes | int | Sequence[bytes | int] | None


class Values:
    """The keys and values of one store, and the clients that wait for keys. Used by one event loop."""

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = {}
        self._queues: defaultdict[bytes, list[bytes]] = defaultdict(list)
        self._arrivals: defaultdict[bytes, asyncio.Event] = defaultdict(asyncio.Event)  # awaited keys
        self._barriers: defaultdict[bytes, list[asyncio.Event]] = defaultdict(list)  # key -> one per waiting client

    def _has(self, key: bytes) -> bool:
        return key in self._data or bool(self._queues.get(key))

    def _arrived(self, key: bytes) -> None:
        if key in self._arrivals:
            self._arrivals.pop(key).set()

    def set(self, key: bytes, value: bytes) -> None:
        self._data[key] = value
        self._arrived(key)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set the key to `desired` if its value equals `expected`, and return the resulting value.

        As in torch, an empty `expected` creates a missing key. For another `expected`, the key stays missing, and
        `expected` is returned.
        """
        found = self._data.get(key)
        if found is None and expected:
            return expected
        if found is None or found == expected:
            self.set(key, desired)
        return self._data[key]

    def get(self, key: bytes) -> bytes:
        return self._data.get(key, b"")  # the client has waited for the key

    def add(self, key: bytes, amount: int) -> int:
        try:
            total = int(self._data.get(key, b"0")) + amount
        except ValueError:
            raise BadRequest("add() to a value that is not a number") from None
        self.set(key, b"%d" % total)
        return total

    def check(self, keys: list[bytes]) -> Flag:
        return _DONE if all(map(self._has, keys)) else _NOT_YET

    async def wait(self, keys: list[bytes]) -> None:
        for key in keys:
            if not self._has(key):
                await self._arrivals[key].wait()

    def num_keys(self) -> int:
        return len(self._data)

    def delete(self, key: bytes) -> int:
        return int(self._data.pop(key, None) is not None)

    def append(self, key: bytes, more: bytes) -> None:
        value = self.get(key) + more
        if len(value) > MAX_BYTES:
            raise BadRequest(f"append() to a value of more than {MAX_BYTES} bytes")
        self.set(key, value)

    def multi_get(self, keys: list[bytes]) -> list[bytes]:
        return list(map(self.get, keys))

    def multi_set(self, pairs: list[tuple[bytes, bytes]]) -> None:
        for key, value in pairs:
            self.set(key, value)

    def cancel_wait(self) -> Flag:
        return _CANCELED

    def ping(self, nonce: bytes) -> Flag:
        return Flag(nonce)

    def queue_push(self, key: bytes, value: bytes) -> None:
        self._queues[key].append(value)
        self._arrived(key)

    def queue_pop(self, key: bytes) -> list[bytes | int]:
        queue = self._queues[key]
        return [1, queue.pop(0)] if queue else [0]

    def queue_len(self, key: bytes) -> int:
        return len(self._queues[key])

    def list_keys(self) -> list[bytes | int]:
        return [len(self._data), *self._data]

    async def barrier(self, key: bytes, size: int) -> None:
        here, all_here = self._barriers[key], asyncio.Event()
        here.append(all_here)
        if len(here) >= size:
            for one in self._barriers.pop(key):
                one.set()
        try:
            await all_here.wait()
        finally:
            here.remove(all_here)


# Operations 1, 2, ... with the types of their arguments: s is a string, n a number, k keys, p (key, value) pairs, and 4
# the 4 bytes of a ping. Operation 0 is the greeting.
_OPERATIONS: tuple[tuple[Callable[..., Answer | Awaitable[None]], str], ...] = (
    (Values.set, "ss"), (Values.compare_set, "sss"), (Values.get, "s"), (Values.add, "sn"), (Values.check, "k"),
    (Values.wait, "k"), (Values.num_keys, ""), (Values.delete, "s"), (Values.append, "ss"), (Values.multi_get, "k"),
    (Values.multi_set, "p"), (Values.cancel_wait, ""), (Values.ping, "4"), (Values.queue_push, "ss"),
    (Values.queue_pop, "s"), (Values.queue_len, "s"), (Values.list_keys, ""), (Values.barrier, "sn"),
)  # fmt: skip


async def serve(values: Values, reader: asyncio.StreamReader, send: Callable[[bytes], object]) -> None:
    """Serve one client until it disconnects. Raises BadRequest, or EOFError when the client disconnects."""
    if await reader.readexactly(len(_GREETING)) != _GREETING:
        raise BadRequest("it does not speak the protocol of torch's client")
    following: asyncio.Future[bytes] | None = None  # the next operation, read while the client waits
    while True:
        number = (await (following or reader.readexactly(1)))[0] - 1
        following = None
        if not 0 <= number < len(_OPERATIONS):
            raise BadRequest(f"operation {number + 1} is unknown")
        operation, kinds = _OPERATIONS[number]
        answer = operation(values, *[await _argument(reader, kind) for kind in kinds])
        if inspect.isawaitable(answer):  # wait until it is done, or the client's next request cancels it
            coming = asyncio.ensure_future(answer)
            following = asyncio.ensure_future(reader.readexactly(1))
            try:
                await asyncio.wait({coming, following}, return_when=asyncio.FIRST_COMPLETED)
                answer = _DONE if coming.done() else None
            finally:
                coming.cancel()
        if answer is not None:
            send(_encoded(answer))


async def _argument(reader: asyncio.StreamReader, kind: str) -> Any:
    if kind == "4":
        return await reader.readexactly(4)
    number = int(struct.unpack("=q", await reader.readexactly(8))[0])
    if kind == "n":
        return number
    most, what = (MAX_BYTES, "bytes in a key or value") if kind == "s" else (MAX_KEYS, "keys in a request")
    if not 0 <= number <= most:
        raise BadRequest(f"{number} {what}; the limit is {most}")
    if kind == "s":
        return await reader.readexactly(number)
    if kind == "k":
        return [await _argument(reader, "s") for _ in range(number)]
    return [(await _argument(reader, "s"), await _argument(reader, "s")) for _ in range(number)]


def _encoded(answer: Any) -> bytes:
    if isinstance(answer, list):
        return b"".join(map(_encoded, answer))
    if isinstance(answer, int):
        return struct.pack("=q", answer)
    return answer if isinstance(answer, Flag) else struct.pack("=q", len(answer)) + bytes(answer)
