"""What the launchers of several machines tell each other, through the store of their rendezvous.

torch's agents meet, and then each is alone. An agent whose workers fail ends, and the others learn only that a
connection broke, or, where a machine is gone, nothing. Here each launcher tells the others why it ends, which of its
ranks have ended well, and every few seconds that it lives. On one machine nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # re-exported from C++

from paceline.errors import LaunchError

POLL_SECONDS = 0.5
BEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0  # without a beat: the machine or its launcher is gone
MEET_SECONDS = 300.0  # between the first and the last launcher to begin a round
LINGER_SECONDS = 3.0  # for the others to read the last message: the store may end with this launcher
_WAIT_SECONDS = 0.05


class RendezvousLost(LaunchError):
    """The store of the rendezvous does not answer any more."""


@dataclass(frozen=True)
class Failure:
    """What another machine reported."""

    text: str  # in words
    consequence: bool  # do its ranks only complain that others have gone?


class Peers:
    """The launchers of one round: from a rendezvous to the next.

    Args:
        store: the same on all nodes, with nothing of an earlier round in it.
        node, nodes: this machine's number, and how many there are.
        endpoint: where the rendezvous is kept, for messages.
        check: called while waiting; may raise.
    """

    def __init__(self, store: Store, node: int, nodes: int, endpoint: str, check: Callable[[], None]) -> None:
        self._store = PrefixStore("paceline", store)
        self._node, self._nodes, self._endpoint, self._check = node, nodes, endpoint, check
        self._others = [other for other in range(nodes) if other != node]
        self._hosts: dict[int, str] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}  # node -> (its last beat, when it came)
        self._polled = self._beaten = 0.0
        self._failure: Failure | None = None
        self.exited: list[int] = []  # ranks of other nodes that have ended well

    def agree(self, starts: int, used: int) -> tuple[int, int]:
        """The most earlier starts, and the most restarts used up, over all nodes. Waits for all.

        A node that joins later knows of none. Workers that do not agree on the number of starts would look for each
        other under different names.
        """
        if self._nodes == 1:
            return starts, used
        self._call("set", f"beat/{self._node}", "0")
        self._call("set", f"left/{self._node}", "[]")
        self._call("set", f"start/{self._node}", json.dumps([starts, used, socket.gethostname()]))
        self._wait(lambda: self._call("check", [f"start/{other}" for other in self._others]), MEET_SECONDS)
        for other in self._others:
            their_starts, their_used, self._hosts[other] = json.loads(self._call("get", f"start/{other}"))
            starts, used = max(starts, their_starts), max(used, their_used)
        return starts, used

    def share_port(self, port: int | None) -> int:
        """The port that the first node gives. The other nodes give None and wait."""
        if port is not None:
            self._call("set", "port", str(port))
        else:
            self._wait(lambda: self._call("check", ["port"]), MEET_SECONDS)
        return int(self._call("get", "port"))

    def poll(self) -> Failure | None:
        """Why another node has failed, if one has. Now and then it reads the store and shows that this node lives."""
        now = time.monotonic()
        known = self._failure is not None and not self._failure.consequence
        if self._nodes == 1 or known or now - self._polled < POLL_SECONDS:
            return self._failure
        self._polled = now
        if int(self._call("add", "failures", 0)):
            self._failure = self._read_failure()
        elif now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            self._call("set", f"beat/{self._node}", str(now))
            self._failure = self._find_silent(now)
            self.exited = [rank for other in self._others for rank in json.loads(self._call("get", f"left/{other}"))]
        return self._failure

    def _read_failure(self) -> Failure | None:
        """Of the reported failures one that is no mere consequence, if there is one."""
        told = []
        for other in self._others:
            if self._call("check", [f"failed/{other}"]):
                text, consequence = json.loads(self._call("get", f"failed/{other}"))
                told.append(Failure(f"{self._name(other)}: {text}", consequence))
        if told:
            self._call("set", f"seen/{self._node}", "")
        return min(told, key=lambda failure: failure.consequence, default=None)

    def _find_silent(self, now: float) -> Failure | None:
        """A failure where a node has sent no beat for too long."""
        for other in self._others:
            beat = self._call("get", f"beat/{other}")
            if other not in self._beats or self._beats[other][0] != beat:
                self._beats[other] = beat, now
            elif now - self._beats[other][1] > SILENT_SECONDS and not self._call("check", [f"done/{other}"]):
                why = f"nothing was heard of it for {SILENT_SECONDS:.0f} s"
                gone = "its launcher or the machine has gone, or is stopped"
                return Failure(f"{self._name(other)}: {why}: {gone}", False)
        return None

    def publish_failure(self, text: str, consequence: bool) -> None:
        """Tell the other nodes why this one ends. consequence: its ranks only complain that others have gone."""
        if self._nodes > 1:
            self._call("set", f"failed/{self._node}", json.dumps([text, consequence]))
            self._call("add", "failures", 1)

    def count(self, what: str, more: int = 0) -> int:
        """How many launchers have counted themselves in so far, this one now with more=1.

        what: "stops": their ranks know that the run is asked to stop; "asked": a signal has asked for it there.
        """
        return int(self._call("add", what, more))

    def publish_exits(self, ranks: list[int]) -> None:
        """Tell the other nodes which ranks of this one have ended well."""
        if self._nodes > 1:
            self._call("set", f"left/{self._node}", json.dumps(ranks))

    def finish(self) -> Failure | None:
        """Wait until all nodes have ended well, or one has failed. Returns that failure."""
        if self._nodes == 1:
            return None
        self._call("set", f"done/{self._node}", "")
        names = [f"done/{other}" for other in self._others]
        self._wait(lambda: self._call("check", names) or self.poll() is not None, None)
        if self._failure is None:
            with contextlib.suppress(RendezvousLost):  # the one that keeps the store has gone first
                self._linger("bye")
        return self._failure

    def any_finished(self) -> bool:
        """Has another node ended well? It would not come to a new round."""
        return any(self._call("check", [f"done/{other}"]) for other in self._others)

    def linger(self) -> None:
        """After a failure was published: wait until the others have read it."""
        if self._nodes > 1:
            self._linger("seen")

    def _linger(self, word: str) -> None:
        self._call("set", f"{word}/{self._node}", "")
        names = [f"{word}/{other}" for other in self._others]
        self._wait(lambda: self._call("check", names), LINGER_SECONDS, must=False)

    def _name(self, node: int) -> str:
        return f"node {node} ({self._hosts.get(node, '?')})"

    def _wait(self, condition: Callable[[], bool], seconds: float | None, must: bool = True) -> None:
        start = time.monotonic()
        while not condition():
            if seconds is not None and time.monotonic() - start > seconds:
                if must:
                    raise LaunchError(f"The machines did not begin together within {seconds:.0f} s. Start them again.")
                return
            self._check()
            time.sleep(_WAIT_SECONDS)

    def _call(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, operation)(*arguments)
        except (RuntimeError, ValueError, OSError) as error:
            raise RendezvousLost(
                f"The connection to the rendezvous at {self._endpoint} is lost ({str(error).splitlines()[0]}). The "
                "launcher there has ended, or its machine cannot be reached: its output says why."
            ) from None
