"""Read this process's collective calls from torch's flight recorder: the pending and the last finished calls.

On a GPU a call is queued and the host continues, so the host's current line does not show which call the GPU waits in.
torch keeps the last 2,000 calls (TORCH_FR_BUFFER_SIZE) in two recorders, one for NCCL and one for gloo
(torch/csrc/distributed/c10d/FlightRecorder.hpp). Does not import torch: if the script has not loaded it, there are no
calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_DUMPS = "_dump_nccl_trace_json", "_dump_fr_trace_json"  # the first exists if torch was built with NCCL
_ENDED = 8  # the number of finished calls to keep per group, to compare with the pending calls of other ranks
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
# Calls that need tensors of the same sizes on all ranks. In other calls sizes may differ: only the root passes a list,
# or splits are uneven.
_SAME_SIZES = ("all_reduce", "broadcast", "reduce")
_OF_ALL = "default_pg"  # torch's description of the group of all ranks
_MAX_SHOWN = 3  # tensors per call


class Call(NamedTuple):
    """A collective call of a process group, or a message from one rank to another.

    Attributes:
        number: the number of the call in its group, from 1. Messages between two ranks are numbered separately.
        name: such as "all_reduce", or "send 0->1".
        tensors: the rank's input, such as "float32 [1024]"; "" for a barrier.
        message: whether it is a message between two ranks.
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
        """Whether this call and another rank's call may be the same collective."""
        if self.message or other.message or self.number != other.number:
            return True
        return self.name == other.name and (self.name not in _SAME_SIZES or self.tensors == other.tensors)


@dataclass(frozen=True)
class GroupCalls:
    """The calls of one backend of one process group.

    Attributes:
        group: torch's name of the group, the same on all its ranks, and the backend.
        title: the group's name in messages: the script's description of the group, and the backend.
        under_way: the oldest pending call; None: there is none.
        queued: the number of pending calls.
        ended: the newest finished calls, oldest first.
    """

    group: str
    title: str
    under_way: Call | None
    queued: int
    ended: tuple[Call, ...]

    @property
    def of_all_ranks(self) -> bool:
        """Whether this is the group of all ranks of the run."""
        return self.title.startswith(f"{_OF_ALL} (")

    @property
    def made(self) -> tuple[Call, ...]:
        return self.ended if self.under_way is None else (*self.ended, self.under_way)


def read() -> list[GroupCalls]:
    """Read the recorders of this process. Returns their calls by group. Takes about 0.1 s."""
    module = sys.modules.get("torch._C._distributed_c10d")
    found = []
    for name in _DUMPS:
        dump = getattr(module, name, None)
        if dump is not None:
            found.append(json.loads(dump(True, False)))
    return _calls_of(found)


def _calls_of(dumps: Iterable[Mapping[str, Any]]) -> list[GroupCalls]:
    """Read the calls of each group from the recorders' JSON (format version 2.10)."""
    titles: dict[str, str] = {}
    calls: dict[str, dict[tuple[str, int, int], tuple[Call, bool]]] = {}
    for entry in (entry for dump in dumps for entry in dump.get("entries", ())):
        backend, _, name = str(entry["profiling_name"]).rpartition(":")
        group, title = (str(part) for part in entry["process_group"])
        key = f"{group} {backend}"
        titles[key] = f"{title if title not in ('', 'undefined') else group} ({backend})"
        message = bool(entry["is_p2p"])
        number = int(entry["p2p_seq_id" if message else "collective_seq_id"])
        # In later versions of torch each of the two functions returns the calls of both recorders.
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
    shown = [f"{_DTYPES.get(dtype, dtype)} {list(size)}" for dtype, size in given[:_MAX_SHOWN]]
    return ", ".join(shown) + (f" and {len(given) - _MAX_SHOWN} more" if len(given) > _MAX_SHOWN else "")


def packed(groups: Iterable[GroupCalls]) -> list[Any]:
    """Convert the groups to lists, for JSON."""
    return [[one.group, one.title, one.under_way, one.queued, one.ended] for one in groups]


def unpacked(groups: Iterable[Sequence[Any]]) -> list[GroupCalls]:
    """Restore the groups from the lists of `packed`."""
    return [
        GroupCalls(str(group), str(title), _call(under_way), int(queued), tuple(filter(None, map(_call, ended))))
        for group, title, under_way, queued, ended in groups
    ]


def _call(values: Sequence[Any] | None) -> Call | None:
    if values is None:
        return None
    number, name, tensors, message = values
    return Call(int(number), str(name), str(tensors), bool(message))
