"""The spans of one rank, in a memory-mapped file.

To record a span, the process writes 28 bytes to memory. The kernel keeps this memory even if the process is killed, so
the file of a killed rank is complete. The file has a fixed size: when it is full, new spans overwrite the oldest.

Layout, little-endian: the magic number, the number of spans written, a byte that is 1 once the rank has closed its run,
the length of the description, the description as JSON, and at offset _FIRST a ring buffer of SPANS spans.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

SPANS = 2**15
"""The number of spans that a rank keeps: about 5,000 steps of six spans."""

_MAGIC = b"PLSPANS1"
_HEAD = struct.Struct("<8sQBH")
_COUNT = struct.Struct("<Q")
_COUNT_AT, _ENDED_AT, _LENGTH_AT = 8, 16, 17
_FIRST = 4096
_SPAN = struct.Struct("<BBHiiqq")


class Phase(IntEnum):
    """The phases of a rank. At each moment a rank is in one of them."""

    BETWEEN = 0  # outside all other phases, such as between a backward and run.step
    DATA = 1  # waits for the loader
    FORWARD = 2  # from the batch to the backward
    BACKWARD = 3
    FORWARD_AND_BACKWARD = 4  # both, if the strategy runs the closure and interleaves them
    COMMUNICATION = 5  # waits in an exchange with other ranks
    UPDATE = 6  # run.step
    CHECKPOINT = 7  # writes a checkpoint
    EVALUATION = 8  # a pass over an evaluation loader

    @property
    def label(self) -> str:
        """The phase's name in the trace and in the report."""
        return self.name.lower().replace("_", " ")


class Span(NamedTuple):
    """An interval that a rank spent in one phase. The spans of a rank do not overlap."""

    phase: Phase
    within: Phase  # for COMMUNICATION: the phase that it interrupts; otherwise `phase`
    micro_batch: int  # the number of the micro-batch in the step
    epoch: int  # the step's epoch; -1 before the first step
    step: int  # the step's number in its epoch
    start: int  # nanoseconds, by the monotonic clock of the rank's machine
    end: int  # nanoseconds, by the same clock


class RankSpans(NamedTuple):
    """The spans of one process."""

    about: dict[str, Any]  # the description of the process (see Tracer)
    ended: bool  # whether the process has closed its run
    spans: list[Span]  # in order of time


class SpanWriter:
    """Writes the spans of this process. Creates the folder if necessary. Raises OSError if the file cannot be made."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        path.parent.mkdir(exist_ok=True)
        with open(path, "w+b") as file:
            # Write the whole file now: a full disk is then an error here, not a SIGBUS in a step.
            file.write(bytes(_FIRST + SPANS * _SPAN.size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), 0)
        self._count = 0
        self._map[: len(_MAGIC)] = _MAGIC
        self.describe(about)

    def describe(self, about: Mapping[str, Any]) -> None:
        """Replace the description."""
        text = json.dumps(about).encode()
        assert _HEAD.size + len(text) <= _FIRST
        self._map[_HEAD.size : _HEAD.size + len(text)] = text
        struct.pack_into("<H", self._map, _LENGTH_AT, len(text))

    def write(self, phase: int, within: int, micro_batch: int, epoch: int, step: int, start: int, end: int) -> None:
        """Add a span with these fields (see Span)."""
        at = _FIRST + self._count % SPANS * _SPAN.size
        _SPAN.pack_into(self._map, at, phase, within, micro_batch & 0xFFFF, epoch, step, start, end)
        self._count += 1
        _COUNT.pack_into(self._map, _COUNT_AT, self._count)

    def close(self) -> None:
        self._map[_ENDED_AT] = 1
        self._map.flush()  # another machine may read the file over the network
        self._map.close()


def read(path: Path) -> RankSpans | None:
    """Read the spans of a process, even while it writes. None if the file is missing, invalid or not described yet."""
    try:
        memory = path.read_bytes()
    except OSError:
        return None
    if len(memory) != _FIRST + SPANS * _SPAN.size or not memory.startswith(_MAGIC):
        return None
    _, count, ended, length = _HEAD.unpack_from(memory)
    try:
        about = json.loads(memory[_HEAD.size : _HEAD.size + length])
    except ValueError:
        return None
    spans = []
    for number in range(max(0, count - SPANS), count):
        phase, within, *rest = _SPAN.unpack_from(memory, _FIRST + number % SPANS * _SPAN.size)
        spans.append(Span(Phase(phase), Phase(within), *rest))
    latest = 0
    whole = []
    for span in spans:  # leave out a span that the process is overwriting: its times are out of order
        if latest <= span.start <= span.end:
            whole.append(span)
            latest = span.end
    return RankSpans(about, bool(ended), whole)


def has_ended(path: Path) -> bool:
    """Whether the process that writes this file has closed its run. True if the file is missing or truncated."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD.size)
    except OSError:
        return True
    return len(head) < _HEAD.size or bool(head[_ENDED_AT])
