"""The spans of one rank, in a file that its process has mapped.

A span is one write of 28 bytes into memory. The kernel keeps what was written, whatever ends the process, so that the
spans of a rank that was killed are there too. The file has one size: the newest spans overwrite the oldest.

Layout, little-endian: the magic number, how many spans were written, 1 if the rank has ended its run, the length of the
description, the description as JSON, and from _FIRST on a ring of SPANS spans.
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
"""Of a rank that are kept, the newest: some 5,000 steps of six spans."""

_MAGIC = b"PLSPANS1"
_HEAD = struct.Struct("<8sQBH")
_COUNT = struct.Struct("<Q")
_COUNT_AT, _ENDED_AT, _LENGTH_AT = 8, 16, 17
_FIRST = 4096
_SPAN = struct.Struct("<BBHiiqq")


class Phase(IntEnum):
    """What a rank does at a moment."""

    BETWEEN = 0  # none of the others: lines of the script that stand neither before a backward nor in a step
    DATA = 1  # waits for the loader
    FORWARD = 2  # from the batch to the backward
    BACKWARD = 3
    FORWARD_AND_BACKWARD = 4  # where the strategy runs the closure, and mixes the two
    COMMUNICATION = 5  # waits in an exchange with other ranks
    UPDATE = 6  # run.step
    CHECKPOINT = 7  # writes one
    EVALUATION = 8  # a pass over an evaluation loader

    @property
    def label(self) -> str:
        """As it stands in the trace and in the report."""
        return self.name.lower().replace("_", " ")


class Span(NamedTuple):
    """A time in which a rank was in one phase. Spans of a rank do not overlap."""

    phase: Phase
    within: Phase  # the phase that a communication has interrupted; else `phase`
    micro_batch: int  # of the step
    epoch: int  # of the step; -1 before the first
    step: int  # of its epoch
    start: int  # nanoseconds, by the monotonic clock of the rank's machine
    end: int  # likewise


class RankSpans(NamedTuple):
    """What one process has left."""

    about: dict[str, Any]  # see Tracer
    ended: bool  # whether the process has ended its run, and not died
    spans: list[Span]  # in the order of time


class SpanWriter:
    """The file of this process, in a folder that is made if need be. Raises OSError where it cannot be made."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        path.parent.mkdir(exist_ok=True)
        with open(path, "w+b") as file:
            # All of it is written now: where the disk is full that is an error here, and not SIGBUS in a step.
            file.write(bytes(_FIRST + SPANS * _SPAN.size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), 0)
        self._count = 0
        self._map[: len(_MAGIC)] = _MAGIC
        self.describe(about)

    def describe(self, about: Mapping[str, Any]) -> None:
        """Replaces the description."""
        text = json.dumps(about).encode()
        assert _HEAD.size + len(text) <= _FIRST
        self._map[_HEAD.size : _HEAD.size + len(text)] = text
        struct.pack_into("<H", self._map, _LENGTH_AT, len(text))

    def write(self, phase: int, within: int, micro_batch: int, epoch: int, step: int, start: int, end: int) -> None:
        """Adds a span. See Span."""
        at = _FIRST + self._count % SPANS * _SPAN.size
        _SPAN.pack_into(self._map, at, phase, within, micro_batch & 0xFFFF, epoch, step, start, end)
        self._count += 1
        _COUNT.pack_into(self._map, _COUNT_AT, self._count)

    def close(self) -> None:
        self._map[_ENDED_AT] = 1
        self._map.flush()  # for a machine that looks at it over the network
        self._map.close()


def read(path: Path) -> RankSpans | None:
    """What stands in such a file, also while its process writes; None if it is none, or not described yet."""
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
    for span in spans:  # one that the process was about to overwrite does not fit in between
        if latest <= span.start <= span.end:
            whole.append(span)
            latest = span.end
    return RankSpans(about, bool(ended), whole)


def has_ended(path: Path) -> bool:
    """Whether the process of such a file has ended its run. A file that is gone, or cut short, counts as ended."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD.size)
    except OSError:
        return True
    return len(head) < _HEAD.size or bool(head[_ENDED_AT])
