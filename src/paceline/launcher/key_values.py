"""The key-value store of a run, and the requests of torch's TCPStore client on it. No sockets, no torch.

torch's own server asks nobody who he is. This one sits behind store.py, which does. It answers the client that torch
has (TCPStore with is_master=False), so that every script, and every program that a rank starts, finds its store as
under torchrun. tests/test_torch_private.py asks it everything that the client of the installed torch can ask.

A request is a byte for the operation and then its arguments: numbers of 8 bytes, and byte strings with their length
before them, in the byte order of the machine. Nothing in them is ever interpreted but the numbers of `add`.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable

MAX_BYTES = 64 << 20
"""Of one key or value."""
MAX_KEYS = 1 << 20
"""Of one request."""

_GREETING = struct.pack("=BI", 0, 0x3C85F7CE)
PING, PONG = _GREETING + struct.pack("=BI", 13, 1), struct.pack("=I", 1)
"""A first request of a client, which changes nothing, and the answer to it."""

_DONE, _NOT_YET, _CANCELED = b"\0", b"\1", b"\1"  # of wait and check; of check; of a wait that was called off


class BadRequest(ValueError):
    """No request of torch's client, or one beyond the limits."""


class Values:
    """The keys and values of one store, and who waits for which. Of one event loop."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.queues: defaultdict[bytes, list[bytes]] = defaultdict(list)
        self._arrivals: defaultdict[bytes, asyncio.Event] = defaultdict(asyncio.Event)  # of keys that are waited for
        self._barriers: defaultdict[bytes, list[asyncio.Event]] = defaultdict(list)  # key -> of each who has come

    def has(self, key: bytes) -> bool:
        return key in self.data or bool(self.queues.get(key))

    def put(self, key: bytes, value: bytes) -> None:
        self.data[key] = value
        self.arrived(key)

    def arrived(self, key: bytes) -> None:
        if key in self._arrivals:
            self._arrivals.pop(key).set()

    async def wait(self, keys: list[bytes]) -> None:
        for key in keys:
            if not self.has(key):
                await self._arrivals[key].wait()

    async def meet(self, key: bytes, size: int) -> None:
        here, all_here = self._barriers[key], asyncio.Event()
        here.append(all_here)
        if len(here) >= size:
            for one in self._barriers.pop(key):
                one.set()
        try:
            await all_here.wait()
        finally:
            here.remove(all_here)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """As torch has it: of a key that is missing, what was expected comes back, unless that is nothing."""
        found = self.data.get(key)
        if found is None and expected:
            return expected
        if found is None or found == expected:
            self.put(key, desired)
        return self.data[key]

    def add(self, key: bytes, amount: int) -> int:
        try:
            total = int(self.data.get(key, b"0")) + amount
        except ValueError:
            raise BadRequest("add() to a value that is no number") from None
        self.put(key, b"%d" % total)
        return total


async def serve(values: Values, reader: asyncio.StreamReader, send: Callable[[bytes], object]) -> None:
    """Answer one client until it goes. Raises BadRequest, and EOFError when it has gone."""
    await _Session(values, reader, send).serve()


class _Session:
    """One client."""

    def __init__(self, values: Values, reader: asyncio.StreamReader, send: Callable[[bytes], object]) -> None:
        self._values, self._read, self._send = values, reader.readexactly, send
        self._next: asyncio.Future[bytes] | None = None  # the operation that is read while the client waits

    async def serve(self) -> None:
        if await self._read(len(_GREETING)) != _GREETING:
            raise BadRequest("it does not begin as torch's client does")
        while True:
            following, self._next = self._next or self._read(1), None
            operation = (await following)[0] - 1
            if not 0 <= operation < len(_OPERATIONS):
                raise BadRequest(f"operation {operation + 1} is unknown")
            await _OPERATIONS[operation](self)

    async def _until(self, event: Awaitable[None]) -> None:
        """Answer when it has come, unless the client goes on before, to call its wait off."""
        coming = asyncio.ensure_future(event)
        self._next = asyncio.ensure_future(self._read(1))
        try:
            await asyncio.wait({coming, self._next}, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                self._send(_DONE)
        finally:
            coming.cancel()

    # ------------------------------------------------------------ what arguments are made of

    async def _number(self) -> int:
        return int(struct.unpack("=q", await self._read(8))[0])

    async def _string(self) -> bytes:
        length = await self._number()
        if not 0 <= length <= MAX_BYTES:
            raise BadRequest(f"a key or value of {length} bytes; {MAX_BYTES} is the limit")
        return await self._read(length)

    async def _count(self) -> int:
        count = await self._number()
        if not 0 <= count <= MAX_KEYS:
            raise BadRequest(f"{count} keys in a request; {MAX_KEYS} is the limit")
        return count

    async def _keys(self) -> list[bytes]:
        return [await self._string() for _ in range(await self._count())]

    def _send_string(self, value: bytes) -> None:
        self._send(struct.pack("=q", len(value)) + value)

    def _send_number(self, value: int) -> None:
        self._send(struct.pack("=q", value))

    # ------------------------------------------------------------ the operations

    async def _set(self) -> None:
        self._values.put(await self._string(), await self._string())

    async def _compare_set(self) -> None:
        self._send_string(self._values.compare_set(await self._string(), await self._string(), await self._string()))

    async def _get(self) -> None:
        self._send_string(self._values.data.get(await self._string(), b""))  # the client has waited for it

    async def _add(self) -> None:
        self._send_number(self._values.add(await self._string(), await self._number()))

    async def _check(self) -> None:
        self._send(_DONE if all(map(self._values.has, await self._keys())) else _NOT_YET)

    async def _wait(self) -> None:
        await self._until(self._values.wait(await self._keys()))

    async def _num_keys(self) -> None:
        self._send_number(len(self._values.data))

    async def _delete(self) -> None:
        self._send_number(int(self._values.data.pop(await self._string(), None) is not None))

    async def _append(self) -> None:
        key, more = await self._string(), await self._string()
        value = self._values.data.get(key, b"") + more
        if len(value) > MAX_BYTES:
            raise BadRequest(f"append() to a value of more than {MAX_BYTES} bytes")
        self._values.put(key, value)

    async def _multi_get(self) -> None:
        for key in await self._keys():
            self._send_string(self._values.data.get(key, b""))

    async def _multi_set(self) -> None:
        for _ in range(await self._count()):
            await self._set()

    async def _cancel_wait(self) -> None:
        self._send(_CANCELED)

    async def _ping(self) -> None:
        self._send(await self._read(4))

    async def _queue_push(self) -> None:
        key = await self._string()
        self._values.queues[key].append(await self._string())
        self._values.arrived(key)

    async def _queue_pop(self) -> None:
        queue = self._values.queues[await self._string()]
        self._send_number(int(bool(queue)))
        if queue:
            self._send_string(queue.pop(0))

    async def _queue_len(self) -> None:
        self._send_number(len(self._values.queues[await self._string()]))

    async def _list_keys(self) -> None:
        self._send_number(len(self._values.data))
        for key in self._values.data:
            self._send_string(key)

    async def _barrier(self) -> None:
        await self._until(self._values.meet(await self._string(), await self._number()))


_OPERATIONS: tuple[Callable[[_Session], Awaitable[None]], ...] = (  # from 1 on: 0 is the greeting's
    _Session._set, _Session._compare_set, _Session._get, _Session._add, _Session._check, _Session._wait,
    _Session._num_keys, _Session._delete, _Session._append, _Session._multi_get, _Session._multi_set,
    _Session._cancel_wait, _Session._ping, _Session._queue_push, _Session._queue_pop, _Session._queue_len,
    _Session._list_keys, _Session._barrier,
)  # fmt: skip
