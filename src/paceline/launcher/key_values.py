"""The key-value store of a run, and the requests of torch's TCPStore client on it. Pure: bytes in, bytes out.

torch's own server asks nobody who he is. This one stands behind doors that do (doors.py). It answers the client that
torch has (TCPStore with is_master=False), so that every script, and every program that a rank starts, finds its store
as under torchrun. tests/test_torch_private.py asks it everything that the client of the installed torch can ask.

Requests are a byte for the operation and then its arguments: numbers of 8 bytes, and byte strings with their length
before them, in the byte order of the machine. Nothing in them is ever interpreted but the numbers of `add`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator

MAX_BYTES = 64 << 20
"""Of one key or value."""
MAX_KEYS = 1 << 20
"""Of one request."""

_MAGIC = 0x3C85F7CE
(
    _VALIDATE, _SET, _COMPARE_SET, _GET, _ADD, _CHECK, _WAIT, _NUM_KEYS, _DELETE, _APPEND, _MULTI_GET, _MULTI_SET,
    _CANCEL_WAIT, _PING, _QUEUE_PUSH, _QUEUE_POP, _QUEUE_LEN, _LIST_KEYS, _BARRIER,
) = range(19)  # fmt: skip
_DONE, _NOT_YET, _CANCELED = b"\0", b"\1", b"\1"  # of wait and check; of check; of a wait that was called off

Reader = Generator[int, bytes, None]
"""Yields how many bytes it needs next, and is sent them."""


class BadRequest(ValueError):
    """No request of torch's client, or one beyond the limits."""


class Values:
    """The keys and values of one store, and who waits for which."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.queues: dict[bytes, list[bytes]] = {}
        self._waiting: dict[bytes, set[Session]] = {}  # key -> who waits for it
        self._barriers: dict[bytes, list[Session]] = {}  # key -> who has come

    def has(self, key: bytes) -> bool:
        return key in self.data or bool(self.queues.get(key))

    def put(self, key: bytes, value: bytes) -> None:
        self.data[key] = value
        self.arrived(key)

    def arrived(self, key: bytes) -> None:
        """A key is there: whoever waits for it and for no other goes on."""
        for session in self._waiting.pop(key, set()):
            session.missing.discard(key)
            if not session.missing:
                session.send(_DONE)

    def wait(self, session: Session, keys: list[bytes]) -> None:
        session.missing = {key for key in keys if not self.has(key)}
        for key in session.missing:
            self._waiting.setdefault(key, set()).add(session)
        if not session.missing:
            session.send(_DONE)

    def meet(self, session: Session, key: bytes, size: int) -> None:
        here = self._barriers.setdefault(key, [])
        here.append(session)
        if len(here) >= size:
            del self._barriers[key]
            for one in here:
                one.send(_DONE)

    def forget(self, session: Session) -> None:
        """It waits for nothing any more."""
        for key in session.missing:
            waiting = self._waiting.get(key, set())
            waiting.discard(session)
            if not waiting:
                self._waiting.pop(key, None)
        session.missing = set()
        for key, here in list(self._barriers.items()):
            if session in here:
                here.remove(session)
            if not here:
                del self._barriers[key]

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


class Session:
    """One client. `feed` it what has come; it answers through `send`.

    Raises BadRequest where what came is no request: the connection is to be closed.
    """

    def __init__(self, values: Values, send: Callable[[bytes], None]) -> None:
        self.values, self.send = values, send
        self.missing: set[bytes] = set()  # keys that it waits for
        self._buffer = bytearray()
        self._reader = self._requests()
        self._need = next(self._reader)

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= self._need:
            part = bytes(self._buffer[: self._need])
            del self._buffer[: self._need]
            self._need = self._reader.send(part)

    def close(self) -> None:
        self.values.forget(self)

    def _requests(self) -> Reader:
        operation = (yield 1)[0]
        (magic,) = struct.unpack("=I", (yield 4))
        if operation != _VALIDATE or magic != _MAGIC:
            raise BadRequest("it does not begin as torch's client does")
        while True:
            operation = (yield 1)[0]
            if operation >= len(_OPERATIONS):
                raise BadRequest(f"operation {operation} is unknown")
            yield from _OPERATIONS[operation](self)

    # ------------------------------------------------------------ what arguments are made of

    def _number(self) -> Generator[int, bytes, int]:
        return int(struct.unpack("=q", (yield 8))[0])

    def _string(self) -> Generator[int, bytes, bytes]:
        length = yield from self._number()
        if not 0 <= length <= MAX_BYTES:
            raise BadRequest(f"a key or value of {length} bytes; {MAX_BYTES} is the limit")
        return (yield length)

    def _count(self) -> Generator[int, bytes, int]:
        count = yield from self._number()
        if not 0 <= count <= MAX_KEYS:
            raise BadRequest(f"{count} keys in a request; {MAX_KEYS} is the limit")
        return count

    def _keys(self) -> Generator[int, bytes, list[bytes]]:
        keys = []
        for _ in range((yield from self._count())):
            keys.append((yield from self._string()))  # no comprehension can yield
        return keys

    def _send_string(self, value: bytes) -> None:
        self.send(struct.pack("=q", len(value)) + value)

    def _send_number(self, value: int) -> None:
        self.send(struct.pack("=q", value))

    # ------------------------------------------------------------ the operations

    def _set(self) -> Reader:
        key = yield from self._string()
        self.values.put(key, (yield from self._string()))

    def _compare_set(self) -> Reader:
        key = yield from self._string()
        expected = yield from self._string()
        self._send_string(self.values.compare_set(key, expected, (yield from self._string())))

    def _get(self) -> Reader:
        self._send_string(self.values.data.get((yield from self._string()), b""))  # the client has waited for it

    def _add(self) -> Reader:
        key = yield from self._string()
        self._send_number(self.values.add(key, (yield from self._number())))

    def _check(self) -> Reader:
        keys = yield from self._keys()
        self.send(_DONE if all(map(self.values.has, keys)) else _NOT_YET)

    def _wait(self) -> Reader:
        self.values.wait(self, (yield from self._keys()))

    def _num_keys(self) -> Reader:
        self._send_number(len(self.values.data))
        yield 0

    def _delete(self) -> Reader:
        self._send_number(int(self.values.data.pop((yield from self._string()), None) is not None))

    def _append(self) -> Reader:
        key = yield from self._string()
        value = self.values.data.get(key, b"") + (yield from self._string())
        if len(value) > MAX_BYTES:
            raise BadRequest(f"append() to a value of more than {MAX_BYTES} bytes")
        self.values.put(key, value)

    def _multi_get(self) -> Reader:
        for key in (yield from self._keys()):
            self._send_string(self.values.data.get(key, b""))

    def _multi_set(self) -> Reader:
        for _ in range((yield from self._count())):
            yield from self._set()

    def _cancel_wait(self) -> Reader:
        self.values.forget(self)
        self.send(_CANCELED)
        yield 0

    def _ping(self) -> Reader:
        self.send((yield 4))

    def _queue_push(self) -> Reader:
        key = yield from self._string()
        self.values.queues.setdefault(key, []).append((yield from self._string()))
        self.values.arrived(key)

    def _queue_pop(self) -> Reader:
        key = yield from self._string()
        queue = self.values.queues.get(key)
        self._send_number(int(bool(queue)))
        if queue:
            self._send_string(queue.pop(0))

    def _queue_len(self) -> Reader:
        self._send_number(len(self.values.queues.get((yield from self._string()), [])))

    def _list_keys(self) -> Reader:
        self._send_number(len(self.values.data))
        for key in self.values.data:
            self._send_string(key)
        yield 0

    def _barrier(self) -> Reader:
        key = yield from self._string()
        self.values.meet(self, key, (yield from self._number()))


def _refuse(session: Session) -> Reader:
    yield 0
    raise BadRequest("the greeting came twice")


_OPERATIONS: tuple[Callable[[Session], Reader], ...] = (
    _refuse, Session._set, Session._compare_set, Session._get, Session._add, Session._check, Session._wait,
    Session._num_keys, Session._delete, Session._append, Session._multi_get, Session._multi_set, Session._cancel_wait,
    Session._ping, Session._queue_push, Session._queue_pop, Session._queue_len, Session._list_keys, Session._barrier,
)  # fmt: skip
