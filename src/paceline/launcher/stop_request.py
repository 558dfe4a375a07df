"""Signals that ask the run to save a checkpoint and end: the launchers' part. The ranks' part is state/preemption.py.

1. The launcher that receives the signal writes LOOK into the file that the ranks of its machine have mapped, and
   increments a counter in the store of the rendezvous. Every other launcher sees the counter, and does the same.
2. When the counter equals the number of launchers, the launcher of node 0 writes DECIDE.
3. Each rank saves, records this in a file beside its error file, and ends with exit code 0.
"""

from __future__ import annotations

import time

from paceline.launcher.early_start import write_stop_file
from paceline.launcher.output import say
from paceline.launcher.peers import Peers
from paceline.world import DECIDE, END, LOOK

POLL_SECONDS = 0.5


class StopRequest:
    """Passes the request to the workers of one start.

    A full disk does not end a run. If the file cannot be created, the launcher cannot ask these workers to save. If a
    phase cannot be written, the write is retried.

    Args:
        path: the file that the ranks map. It is created here.
        peers: the launchers of the other machines.
        node: this machine's number.
        nodes: the number of machines.
    """

    def __init__(self, path: str, peers: Peers, node: int, nodes: int) -> None:
        self.path, self._peers, self._node, self._nodes = path, peers, node, nodes
        self._phase, self._polled = 0, 0.0
        self._counted = False  # whether the other launchers know about the signal
        self._problem = write_stop_file(path, 0)
        if self._problem:
            say(
                f"paceline: cannot write {path} ({self._problem}), so a signal cannot ask this run to save a "
                "checkpoint. Free space, or set TMPDIR to another directory.\n"
            )

    @property
    def works(self) -> bool:
        """Whether the launcher can ask the ranks to save."""
        return not self._problem

    def end(self) -> None:
        """Announce to the ranks that the next SIGTERM ends them, without asking them to save."""
        if self.works:
            self._write(END)

    def poll(self, asked: bool, machines_come: bool = False) -> None:
        """Advance the request if due.

        Args:
            asked: whether this launcher has received a signal.
            machines_come: whether the ranks should save because machines have joined and all ranks will restart.
        """
        if not self.works:
            return
        now = time.monotonic()
        if asked and not self._counted:
            self._counted = True
            self._peers.count("asked", 1)
        why = "asked to stop" if asked or not machines_come else "machines have joined"
        asked = asked or machines_come
        if self._phase in (DECIDE, END) or (not asked and (self._nodes == 1 or now - self._polled < POLL_SECONDS)):
            return
        self._polled = now
        counted = self._peers.count("stops")
        if self._phase == 0 and (asked or counted) and self._write(LOOK):
            counted = self._peers.count("stops", 1)
            if self._node == 0:
                say(f"paceline: {why}: a checkpoint is saved after one of the next steps.\n")
        if self._node == 0 and counted == self._nodes:
            self._write(DECIDE)

    def _write(self, phase: int) -> bool:
        done = not write_stop_file(self.path, phase)
        if done:
            self._phase = phase
        return done
