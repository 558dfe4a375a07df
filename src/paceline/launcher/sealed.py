"""A connection between two launchers that share a secret: who is there, and that nothing was changed on the way. Pure.

    client -> server   GREETING, a nonce of 32 bytes
    server -> client   a nonce of 32 bytes
    client -> server   the room's name, and HMAC(secret, "client", both nonces, room)
    server -> client   HMAC(secret, "server", both nonces, room)

Then frames both ways, each a length, the bytes, and an HMAC-SHA256 over its number, its length and the bytes, under a
key of that direction, which is derived from the secret, both nonces and the room.

- A replayed session fails: the other side's nonce is a new one. A replayed, dropped or moved frame fails by its number.
- A reflected proof or frame fails: the two directions have different words and keys.
- The client proves first: who connects to a server without the secret learns a random number.
- Nothing is hidden: who can read the network reads the frames. The secret itself never travels.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Generator

GREETING = b"paceline rendezvous 1\n"
MAX_FRAME = 1 << 16
_NONCE = _MAC = 32


class Refused(ConnectionError):
    """The other side does not know the secret, or what came was changed, repeated or never sent by it."""


class Sealed:
    """Frames, after both sides have proved that they know the secret."""

    def __init__(self, room: str, sending: bytes, receiving: bytes) -> None:
        self.room = room
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0  # frames
        self._buffer = bytearray()

    def seal(self, data: bytes) -> bytes:
        """The frames that carry `data`."""
        found = []
        for start in range(0, len(data), MAX_FRAME):
            part = data[start : start + MAX_FRAME]
            head = struct.pack("!I", len(part))
            found += [head, part, hmac.digest(self._sending, struct.pack("!Q", self._sent) + head + part, "sha256")]
            self._sent += 1
        return b"".join(found)

    def open(self, data: bytes) -> bytes:
        """What the frames carry that are whole by now. Raises Refused."""
        self._buffer += data
        found = []
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from("!I", self._buffer)
            if length > MAX_FRAME:
                raise Refused("a frame is longer than any that a launcher sends")
            end = 4 + length
            if len(self._buffer) < end + _MAC:
                break
            signed = struct.pack("!Q", self._received) + self._buffer[:end]
            if not hmac.compare_digest(hmac.digest(self._receiving, signed, "sha256"), self._buffer[end : end + _MAC]):
                raise Refused("a frame was changed, repeated or left out on the way")
            found.append(bytes(self._buffer[4:end]))
            del self._buffer[: end + _MAC]
            self._received += 1
        return b"".join(found)


Handshake = Generator["tuple[bytes, int]", bytes, Sealed]
"""Yields (what to send, how many bytes it needs then), is sent those, and returns the sealed connection; or raises
Refused. What it yields last needs 0 bytes."""


def call(secret: bytes, room: str) -> Handshake:
    """The client's side."""
    own = secrets.token_bytes(_NONCE)
    other = yield GREETING + own, _NONCE
    name = room.encode()
    nonces = own + other
    proof = yield bytes([len(name)]) + name + _digest(secret, b"client", nonces, name), _MAC
    if not hmac.compare_digest(proof, _digest(secret, b"server", nonces, name)):
        raise Refused("what answers does not know the secret")
    return Sealed(room, *_keys(secret, nonces, name))


def answer(secret: bytes) -> Handshake:
    """The server's side."""
    hello = yield b"", len(GREETING) + _NONCE
    if not hello.startswith(GREETING):
        raise Refused("it does not begin as a launcher does")
    own = secrets.token_bytes(_NONCE)
    length = (yield own, 1)[0]
    rest = yield b"", length + _MAC
    name, proof = rest[:length], rest[length:]
    nonces = hello[len(GREETING) :] + own
    if not hmac.compare_digest(proof, _digest(secret, b"client", nonces, name)):
        raise Refused("it does not know the secret")
    yield _digest(secret, b"server", nonces, name), 0
    return Sealed(name.decode(errors="replace"), *reversed(_keys(secret, nonces, name)))


def _keys(secret: bytes, nonces: bytes, name: bytes) -> tuple[bytes, bytes]:
    """(of frames from the client, of frames from the server)."""
    return _digest(secret, b"from client", nonces, name), _digest(secret, b"from server", nonces, name)


def _digest(secret: bytes, word: bytes, nonces: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join((word, nonces, name)), "sha256")
