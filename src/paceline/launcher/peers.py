"""Messages between the launchers of several machines, through the store of their rendezvous.

After the rendezvous, torch's agents do not communicate. If the workers of one agent fail, that agent ends. The other
agents see only a broken connection, or nothing if the machine is down. So each launcher reports why it ends and which
of its ranks have finished, and sends a heartbeat every few seconds. On one machine, nothing is sent.
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
SILENT_SECONDS = 30.0  # without a heartbeat: the machine or its launcher is down
JOIN_SECONDS = 300.0  # limit between the first and the last launcher to start a round
LINGER_SECONDS = 3.0  # time for others to read the last message: the store may end with this launcher
_WAIT_SECONDS = 0.05


class RendezvousLost(LaunchError):
    """The store of the rendezvous no longer answers."""


@dataclass(frozen=True)
class Failure:
    """A failure reported by another machine."""

    text: str  # the report
    consequence: bool  # its ranks only report the loss of other ranks


class Peers:
    """Exchanges messages with the other launchers of one round, which lasts from one rendezvous to the next.

    Args:
        store: a store that all nodes of the round share, without data of an earlier round.
        node: this machine's number.
        nodes: the number of machines.
        endpoint: the address of the rendezvous, for messages.
        check: called while waiting; may raise.
    """

    def __init__(self, store: Store, node: int, nodes: int, endpoint: str, check: Callable[[], None]) -> None:
        self._store = PrefixStore("paceline", store)
        self._node, self._nodes, self._endpoint, self._check = node, nodes, endpoint, check
        self._others = [other for other in range(nodes) if other != node]
        self._hosts: dict[int, str] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}  # node -> (its last heartbeat, time of arrival)
        self._polled = self._beaten = 0.0
        self._failure: Failure | None = None
        self.exited: list[int] = []  # ranks of other nodes that have finished without an error

    def agree(self, starts: int, used: int) -> tuple[int, int]:
        """Return the maxima over all nodes of (earlier starts, used restarts). Waits for all nodes.

        A node that joins later has counted neither. All workers must use the same number of starts, because it is part
        of names that they share.
        """
        if self._nodes == 1:
            return starts, used
        self._call("set", f"beat/{self._node}", "0")
        self._call("set", f"left/{self._node}", "[]")
        self._call("set", f"start/{self._node}", json.dumps([starts, used, socket.gethostname()]))
        self._wait(lambda: self._call("check", [f"start/{other}" for other in self._others]), JOIN_SECONDS)
        for other in self._others:
            their_starts, their_used, self._hosts[other] = json.loads(self._call("get", f"start/{other}"))
            starts, used = max(starts, their_starts), max(used, their_used)
        return starts, used

    def share_port(self, port: int | None) -> int:
        """Return the port that the first node passes. The other nodes pass None and wait for it."""
        if port is not None:
            self._call("set", "port", str(port))
        else:
            self._wait(lambda: self._call("check", ["port"]), JOIN_SECONDS)
        return int(self._call("get", "port"))

    def poll(self) -> Failure | None:
        """Return the failure of another node, or None. Reads the store and sends a heartbeat when due."""
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
        """Return a reported failure, preferably a root cause, or None."""
        reported = []
        for other in self._others:
            if self._call("check", [f"failed/{other}"]):
                text, consequence = json.loads(self._call("get", f"failed/{other}"))
                reported.append(Failure(f"{self._name(other)}: {text}", consequence))
        if reported:
            self._call("set", f"seen/{self._node}", "")
        return min(reported, key=lambda failure: failure.consequence, default=None)

    def _find_silent(self, now: float) -> Failure | None:
        """Return a failure if a node has sent no heartbeat for too long, else None."""
        for other in self._others:
            beat = self._call("get", f"beat/{other}")
            if other not in self._beats or self._beats[other][0] != beat:
                self._beats[other] = beat, now
            elif now - self._beats[other][1] > SILENT_SECONDS and not self._call("check", [f"done/{other}"]):
                why = f"no heartbeat for {SILENT_SECONDS:.0f} s"
                gone = "its launcher or the machine is down or stopped"
                return Failure(f"{self._name(other)}: {why}: {gone}", False)
        return None

    def publish_failure(self, text: str, consequence: bool) -> None:
        """Report to the other nodes why this node ends.

        Args:
            consequence: whether this node's ranks report nothing but the loss of other ranks.
        """
        if self._nodes > 1:
            self._call("set", f"failed/{self._node}", json.dumps([text, consequence]))
            self._call("add", "failures", 1)

    def count(self, what: str, more: int = 0) -> int:
        """Add `more` to a counter that all launchers share, and return its value.

        Args:
            what: the counter. "asked" counts the launchers that have received a signal to stop. "stops" counts the
                launchers that have passed the request to their ranks.
        """
        return int(self._call("add", what, more))

    def publish_exits(self, ranks: list[int]) -> None:
        """Report to the other nodes which ranks of this node have finished without an error."""
        if self._nodes > 1:
            self._call("set", f"left/{self._node}", json.dumps(ranks))

    def finish(self) -> Failure | None:
        """Wait until all nodes have finished, or a node has failed. Return the failure, or None."""
        if self._nodes == 1:
            return None
        self._call("set", f"done/{self._node}", "")
        names = [f"done/{other}" for other in self._others]
        self._wait(lambda: self._call("check", names) or self.poll() is not None, None)
        if self._failure is None:
            with contextlib.suppress(RendezvousLost):  # the rendezvous host has ended first
                self._linger("bye")
        return self._failure

    def any_finished(self) -> bool:
        """Return whether another node has finished. A finished node does not join a new round."""
        return any(self._call("check", [f"done/{other}"]) for other in self._others)

    def linger(self) -> None:
        """After publishing a failure, wait up to LINGER_SECONDS until the other nodes have read it."""
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
                    raise LaunchError(f"Not all machines started within {seconds:.0f} s. Start the run again on all.")
                return
            self._check()
            time.sleep(_WAIT_SECONDS)

    def _call(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, operation)(*arguments)
        except (RuntimeError, ValueError, OSError) as error:
            raise RendezvousLost(
                f"Lost the connection to the rendezvous at {self._endpoint} ({str(error).splitlines()[0]}). The "
                "launcher there has ended, or its machine cannot be reached. See the output of that launcher."
            ) from None
