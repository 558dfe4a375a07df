"""Python values as messages: JSON of known types, and the bytes of tensors. Nothing is pickled.

gloo and NCCL ask nobody who connects. Whoever reaches their ports can send wrong values, as well as wrong gradients,
but no code: to read a message runs nothing that stands in it. plain_state.py says which types are known.
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

_LENGTH = struct.Struct("<Q")  # of the JSON that follows it; the tensors' bytes follow that


def to_bytes(value: Any, what: str) -> bytes:
    """The message of a value. what: the first words of errors. Raises UsageError for a value of another type, with its
    place in the value and the remedy."""
    document, tensors = plain_state.encode(value, what, sent=True)
    head, *frames = wire.pack({"document": document}, tensors.items())
    return b"".join([_LENGTH.pack(len(head)), head, *frames])


def refusal(error: UsageError) -> bytes:
    """The message in place of a value that cannot be sent: whoever reads it raises this error too, and waits for
    nothing."""
    head, *_ = wire.pack({"refused": str(error)})
    return _LENGTH.pack(len(head)) + bytes(head)


def from_bytes(message: memoryview, rank: int) -> Any:
    """The value of a message, with tensors on the CPU, in memory of their own. rank: whose message it is. Raises
    WorldError for bytes that are no message, and the UsageError of a value that its rank could not send."""
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
    except Exception as error:  # whatever numbers and names that nobody vouches for bring torch and json to raise
        raise not_ours(rank, error) from error


def without_tensors(value: Any, what: str) -> tuple[bytes, list[Tensor]]:
    """As `to_bytes`, but the message has only the forms of the tensors, which travel by themselves."""
    document, tensors = plain_state.encode(value, what, sent=True)
    forms = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    head, *_ = wire.pack({"document": document, "forms": forms})
    return _LENGTH.pack(len(head)) + bytes(head), [tensor.cpu().contiguous() for tensor in tensors.values()]


class Awaited:
    """A value of which the message without its tensors has come.

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
        """The value, when its tensors are filled. Raises WorldError as `from_bytes` does."""
        try:
            return plain_state.decode(self._document, self._tensors)
        except plain_state.Unreadable as error:
            raise not_ours(self._rank, error) from error


def _raise_refusal(header: Any, rank: int) -> None:
    if "refused" in header:
        raise UsageError(f"{header['refused']} (The value is rank {rank}'s.)")


def not_ours(rank: int, error: Exception) -> WorldError:
    """The error for bytes of a rank that are no message."""
    return WorldError(
        f"what came from rank {rank} is no message of Paceline ({type(error).__name__}: {error}). Either the processes "
        "do not make the same calls, or something else writes to their connections: see docs/security.md."
    )
