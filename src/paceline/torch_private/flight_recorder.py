"""The collective calls of this process that torch's flight recorder holds: which are under way, and which came last.

On a GPU a call is queued, and the host goes on: where the host stands does not tell which call the GPU waits in. torch
keeps the last 2,000 calls (TORCH_FR_BUFFER_SIZE) in two recorders, one of NCCL's calls and one of gloo's
(torch/csrc/distributed/c10d/FlightRecorder.hpp). Imports no torch: where the script has loaded none, there is no call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_DUMPS = "_dump_nccl_trace_json", "_dump_fr_trace_json"  # the first is there where torch was built with NCCL
_ENDED = 8  # of a group, the newest calls that have ended: for a look at the one that others are in
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
# Calls to which all ranks give tensors of the same sizes. To others they need not: a root's list, uneven splits.
_SAME_SIZES = ("all_reduce", "broadcast", "reduce")
_OF_ALL = "default_pg"  # the description that torch gives it
_TOLD = 3  # of the tensors of one call


class Call(NamedTuple):
    """A collective call, or a message from rank to rank, of one process group.

    Attributes:
        number: which call of the group it is, from 1 on. Messages between two ranks have numbers of their own.
        name: such as "all_reduce", or "send 0->1".
        tensors: what the rank gives, such as "float32 [1024]"; "" for a barrier.
        message: is it one between two ranks?
    """

    number: int
    name: str
    tensors: str
    message: bool

    def __str__(self) -> str:
        of = f" of {self.tensors}" if self.tensors else ""
        return f"{self.name}{of}"

    @property
    def numbered(self) -> str:
        return f"{'message' if self.message else 'call'} {self.number}, {self}"

    def matches(self, other: Call) -> bool:
        """May both be the same call, on two ranks?"""
        if self.message or other.message or self.number != other.number:
            return True
        return self.name == other.name and (self.name not in _SAME_SIZES or self.tensors == other.tensors)


@dataclass(frozen=True)
class GroupCalls:
    """Of one backend of one process group, which numbers its calls.

    Attributes:
        group: the name that torch gave the group, the same on all its ranks, and the backend's.
        title: the same for people, with the description that the script gave.
        under_way: the oldest call that has not ended; None: all have.
        queued: how many have not ended.
        ended: the newest that have, oldest first.
    """

    group: str
    title: str
    under_way: Call | None
    queued: int
    ended: tuple[Call, ...]

    @property
    def of_all_ranks(self) -> bool:
        """Is it the group of all ranks of the run?"""
        return self.title.startswith(f"{_OF_ALL} (")

    @property
    def made(self) -> tuple[Call, ...]:
        return self.ended if self.under_way is None else (*self.ended, self.under_way)


def read() -> list[GroupCalls]:
    """What the recorders of this process hold, by group. Takes some 0.1 s."""
    module = sys.modules.get("torch._C._distributed_c10d")
    found = []
    for name in _DUMPS:
        dump = getattr(module, name, None)
        if dump is not None:
            found.append(json.loads(dump(True, False)))
    return _calls_of(found)


def _calls_of(dumps: Iterable[Mapping[str, Any]]) -> list[GroupCalls]:
    """The groups in what the recorders tell of themselves, as JSON (version 2.10)."""
    titles: dict[str, str] = {}
    calls: dict[str, dict[tuple[str, int, int], tuple[Call, bool]]] = {}
    for entry in (entry for dump in dumps for entry in dump.get("entries", ())):
        backend, _, name = str(entry["profiling_name"]).rpartition(":")
        group, title = (str(part) for part in entry["process_group"])
        key = f"{group} {backend}"
        titles[key] = f"{title if title not in ('', 'undefined') else group} ({backend})"
        message = bool(entry["is_p2p"])
        number = int(entry["p2p_seq_id" if message else "collective_seq_id"])
        # Later versions of torch tell the calls of both recorders under both names.
        once = name, number, int(entry["record_id"])
        calls.setdefault(key, {})[once] = Call(number, name, _tensors(entry), message), bool(entry["retired"])
    groups = []
    for key, found in calls.items():
        queued = [call for call, retired in found.values() if not retired]
        ended = [call for call, retired in found.values() if retired][-_ENDED:]
        groups.append(GroupCalls(key, titles[key], queued[0] if queued else None, len(queued), tuple(ended)))
    return groups


def _tensors(entry: Mapping[str, Any]) -> str:
    given = list(zip(entry["input_dtypes"], entry["input_sizes"]))
    told = [f"{_DTYPES.get(dtype, dtype)} {list(size)}" for dtype, size in given[:_TOLD]]
    return ", ".join(told) + (f" and {len(given) - _TOLD} more" if len(given) > _TOLD else "")


def packed(groups: Iterable[GroupCalls]) -> list[Any]:
    """As JSON can hold it."""
    return [[one.group, one.title, one.under_way, one.queued, one.ended] for one in groups]


def unpacked(groups: Iterable[Sequence[Any]]) -> list[GroupCalls]:
    """What `packed` has made, after a way as JSON."""
    return [
        GroupCalls(str(group), str(title), _call(under_way), int(queued), tuple(filter(None, map(_call, ended))))
        for group, title, under_way, queued, ended in groups
    ]


def _call(values: Sequence[Any] | None) -> Call | None:
    if values is None:
        return None
    number, name, tensors, message = values
    return Call(int(number), str(name), str(tensors), bool(message))
