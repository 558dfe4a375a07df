"""A worker that joins while the others are under way, in the place of one that was killed.

Phases:

1. At its start each worker leaves a ticket for the launcher: where the servers are, their public keys, and its own pair
   of keys. A process that is started in its place finds it (world.TICKET), makes no process group, and runs the script
   up to `run.epochs`.
2. There it asks the first server to admit it, and waits. The live workers admit it where all of them meet: in sync once
   each global batch, in async where a pass begins.
3. From then on it is a member. One of the earlier members hands over where the run is: counters, the position in the
   data, schedules, tracked objects, buffers. The weights come from the servers.
4. It opens the loaders that the others have open. In sync the global batch at hand begins anew, cut over all members.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm import objects, process_group, wire
from paceline.comm.sockets import Keys, Line
from paceline.errors import WorldError
from paceline.strategies.servers.worker_links import JOIN_SECONDS, Chunks, Links, Meetings
from paceline.world import TICKET, TICKET_FILE, Served, tell_launcher

Place = tuple[str, bytes]
"""A server's address and public key."""

RunState = dict[str, Any]
"""Where the run is: see `run_state`."""


def leave_ticket(places: Sequence[Place], keys: Keys) -> None:
    """Leaves the launcher a ticket, but in the first run of this process alone: a process in its place would begin with
    the first run, which is over later."""
    if process_group.runs > 1:
        return
    ticket = {"servers": [[where, key.decode()] for where, key in places], "keys": [key.decode() for key in keys]}
    tell_launcher(os.environ, TICKET_FILE, json.dumps(ticket))


def find_ticket(environ: Mapping[str, str]) -> tuple[list[Place], Keys] | None:
    """The servers and the keys of a process that is to join; None in all others."""
    path = environ.get(TICKET)
    if not path:
        return None
    with open(path) as file:
        found = json.load(file)
    return [(where, key.encode()) for where, key in found["servers"]], Keys(*(key.encode() for key in found["keys"]))


def make_lines(places: Sequence[Place], first: int, keys: Keys, rank: int) -> Links:
    """The servers' ranks begin with `first`."""
    named = [f"the parameter server of rank {first + number}" for number in range(len(places))]
    return Links([Line(*place, keys, rank, name) for place, name in zip(places, named, strict=True)])


def wait_for_admission(links: Links, places: Sequence[Place], meetings: Meetings) -> None:
    """Returns when this worker is a member. Raises Served where the run has ended meanwhile."""
    for where, _ in places:
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError:
            raise Served from None
    try:
        header = wire.header_of(links.wait_first({"op": "join", "admitted": False}, seconds=JOIN_SECONDS))
    except WorldError:  # it has ended after the line above
        raise Served from None
    if header.get("over"):
        raise Served
    meetings.number, meetings.members = header["number"], tuple(header["members"])
    meetings.joined = tuple(header["joined"])
    others = range(1, len(places))
    links.ask({server: ({"op": "join", "admitted": True}, ()) for server in others})


def hand_over(meetings: Meetings, rank: int, capture: Callable[[], RunState] | None) -> RunState:
    """The run state of one of the earlier members, on all members. Raises WorldError where none of them is left."""
    newcomers = set(meetings.joined)
    while givers := sorted(set(meetings.members) - newcomers):
        own = []
        if capture is not None and rank == givers[0]:
            own.append(objects.to_bytes(capture(), "the state of the run"))
        found = meetings.meet(own)
        if givers[0] in meetings.members:
            whole: RunState = objects.from_bytes(found[meetings.members.index(givers[0])], givers[0])
            return whole
    raise WorldError("all workers that knew where the run was have died. Restore the last checkpoint.")


def run_state(
    counts: tuple[int, int],
    meetings: Meetings,
    optimizers: Sequence[torch.optim.Optimizer],
    chunks: Chunks | None,
    buffers: Sequence[Tensor],
    run: Any,
) -> RunState:
    """counts: reductions and updates so far. run: where the run is, as it says itself."""
    return {
        "counts": counts,
        "open_loaders": list(meetings.open_loaders),
        "groups": [[_options(group) for group in own.param_groups] for own in optimizers],
        "counted": [] if chunks is None else [chunks.counted.get(optimizer, 0) for optimizer in optimizers],
        "buffers": [buffer.cpu() for buffer in buffers],
        "run": run,
    }


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


@torch.no_grad()
def load_run_state(
    found: RunState,
    meetings: Meetings,
    optimizers: Sequence[torch.optim.Optimizer],
    chunks: Chunks | None,
    buffers: Sequence[Tensor],
) -> tuple[int, int]:
    """This worker goes on from this run state. Returns its counts."""
    assert meetings.handover is not None
    meetings.to_open = list(found["open_loaders"])
    for optimizer, groups in zip(optimizers, found["groups"], strict=True):
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)
    for buffer, value in zip(buffers, found["buffers"], strict=True):
        buffer.copy_(value)
    meetings.handover.restore(found["run"])
    if chunks is not None:
        chunks.counted = dict(zip(optimizers, found["counted"], strict=True))
    counts: tuple[int, int] = found["counts"]
    return counts


def news(lost: Collection[int], joined: Collection[int]) -> str:
    """Which workers have died or joined, in words."""
    told = []
    for ranks, what in ((lost, "died or is stopped" if len(lost) == 1 else "died or are stopped"), (joined, "joined")):
        if ranks:
            one = len(ranks) == 1
            who = f"the worker{'' if one else 's'} of rank{'' if one else 's'} {', '.join(map(str, sorted(ranks)))}"
            told.append(f"{who} {'has' if one else 'have'} {what}")
    return " and ".join(told)
