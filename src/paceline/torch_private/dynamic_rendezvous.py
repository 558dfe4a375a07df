"""The state of torch's dynamic rendezvous, as JSON with known fields.

torch's agents share this state as a pickle. To unpickle data from other machines is unsafe. So machines exchange JSON:
`to_json` reads a pickle that torch has just made in this process, and `from_json` makes a new pickle for torch. torch
only unpickles data of this process.
"""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from typing import Any

from paceline.torch_private.support import needed_for, require

with needed_for("the rendezvous of several machines"):
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

_FIELDS = (
    "round", "complete", "deadline", "closed", "participants", "wait_list", "redundancy_list", "last_heartbeats",
)  # fmt: skip
"""All fields of a state."""

require("the rendezvous of several machines", _RendezvousState, *_FIELDS)

_MAX_NODES = 1 << 16


def to_json(pickled: bytes) -> str:
    """The state as JSON. pickled: the pickle that torch has made in this process."""
    state = pickle.loads(pickled)
    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "deadline": None if state.deadline is None else state.deadline.isoformat(),
            "closed": state.closed,
            "participants": [[*_words(node), rank] for node, rank in state.participants.items()],
            "wait_list": sorted(_words(node) for node in state.wait_list),
            "redundancy_list": sorted(_words(node) for node in state.redundancy_list),
            "last_heartbeats": [[*_words(node), time.isoformat()] for node, time in state.last_heartbeats.items()],
        }
    )


def from_json(text: str) -> bytes:
    """A pickle of the state, for torch. Raises ValueError if the text is not a valid state."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or set(found) != set(_FIELDS):
            raise ValueError("its fields differ")
        state = _RendezvousState()
        state.round = _checked(found["round"], int)
        state.complete, state.closed = _checked(found["complete"], bool), _checked(found["closed"], bool)
        state.deadline = None if found["deadline"] is None else _time(found["deadline"])
        state.participants = {_node(*node): _checked(rank, int) for *node, rank in _listed(found["participants"])}
        state.wait_list = {_node(*node) for node in _listed(found["wait_list"])}
        state.redundancy_list = {_node(*node) for node in _listed(found["redundancy_list"])}
        state.last_heartbeats = {_node(*node): _time(time) for *node, time in _listed(found["last_heartbeats"])}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"invalid rendezvous state: {error}") from None
    return pickle.dumps(state)


def _words(node: Any) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(*words: Any) -> Any:
    addr, pid, local_id = words
    return _NodeDesc(_checked(addr, str), _checked(pid, int), _checked(local_id, int))


def _time(text: Any) -> datetime:
    found = datetime.fromisoformat(_checked(text, str))
    if found.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return found


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MAX_NODES:
        raise ValueError("a field is not a list of nodes")
    return value


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:40]!r} is not of type {kind.__name__}")
    return value
