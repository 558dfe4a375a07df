"""Python values as messages: JSON of known types, and the bytes of tensors. Nothing is pickled.

gloo and NCCL do not authenticate connections. Anyone who reaches their ports can send wrong values or gradients, but
cannot make a process run code: reading a message never executes its content. plain_state.py defines the supported
types.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from paceline import plain_state
from paceline.comm import wire
from paceline.errors import UsageError, WorldError

_LENGTH = struct.Struct("<Q")  # the length of the JSON, which follows; then come the tensors' bytes


def to_bytes(value: Any, what: str) -> bytes:
    """Encode a value. what: the first words of errors. Raises UsageError for an unsupported type, with its position in
    the value and the remedy."""
    document, tensors = plain_state.encode(value, what, sent=True)
    head, *frames = wire.pack({"document": document}, tensors.items())
    return b"".join([_LENGTH.pack(len(head)), head, *frames])


def refusal(error: UsageError) -> bytes:
    """Encode the error of a value that cannot be sent. The receivers raise the same error instead of waiting for
    data."""
    head, *_ = wire.pack({"refused": str(error)})
    return _LENGTH.pack(len(head)) + bytes(head)


def from_bytes(message: memoryview, rank: int) -> Any:
    """Decode a message. Tensors are on the CPU, in new memory. rank: the sender. Raises WorldError for invalid bytes,
    and UsageError if the sender could not send its value."""
    try:
        (length,) = _LENGTH.unpack_from(message)
        frames, at = [message[_LENGTH.size : _LENGTH.size + length]], _LENGTH.size + length
        header = wire.header_of(frames)
        _raise_refusal(header, rank)
        for _, kind, shape in header.get("tensors", ()):
            nbytes = math.prod(shape) * getattr(torch, kind).itemsize
            if nbytes > 0:
                frames.append(message[at : at + nbytes])
            at += nbytes
        header, tensors = wire.unpack(frames)
        return plain_state.decode(header["document"], tensors)
    except UsageError:
        raise
    except Exception as error:  # unauthenticated bytes may make torch and json raise anything
        raise not_ours(rank, error) from error


def without_tensors(value: Any, what: str) -> tuple[bytes, list[Tensor]]:
    """Like `to_bytes`, but the message has only the tensors' names, dtypes and shapes. Returns (message, tensors)."""
    document, tensors = plain_state.encode(value, what, sent=True)
    forms = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    head, *_ = wire.pack({"document": document, "forms": forms})
    return _LENGTH.pack(len(head)) + bytes(head), [tensor.cpu().contiguous() for tensor in tensors.values()]


class Awaited:
    """A value that has arrived without the data of its tensors.

    tensors: on the CPU, to be filled in this order.
    """

    def __init__(self, message: memoryview, rank: int) -> None:
        self._rank = rank
        try:
            (length,) = _LENGTH.unpack_from(message)
            header = wire.header_of([message[_LENGTH.size : _LENGTH.size + length]])
            _raise_refusal(header, rank)
            self._document = header["document"]
            self._tensors = {
                str(name): torch.empty(shape, dtype=getattr(torch, kind)) for name, kind, shape in header["forms"]
            }
        except UsageError:
            raise
        except Exception as error:  # as in `from_bytes`
            raise not_ours(rank, error) from error
        self.tensors = list(self._tensors.values())

    def value(self) -> Any:
        """Return the value. Fill `tensors` first. Raises WorldError for invalid bytes."""
        try:
            return plain_state.decode(self._document, self._tensors)
        except plain_state.Unreadable as error:
            raise not_ours(self._rank, error) from error


def _raise_refusal(header: Any, rank: int) -> None:
    if "refused" in header:
        raise UsageError(f"{header['refused']} (The value is from rank {rank}.)")


def not_ours(rank: int, error: Exception) -> WorldError:
    """The error for invalid bytes from a rank."""
    return WorldError(
        f"the data from rank {rank} is not a Paceline message ({type(error).__name__}: {error}). Either the processes "
        "make different calls, or another program writes to their connections: see docs/security.md."
    )
