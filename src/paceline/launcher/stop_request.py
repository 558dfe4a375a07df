"""A signal asks the run to save a checkpoint and end: the launchers' part. The ranks' part is train/preemption.py.

1. The launcher that the signal reached writes LOOK into the file that the ranks of its machine have mapped, and counts
   itself in the store of the rendezvous. Every other launcher sees the count, and does the same.
2. When all are counted, that of node 0 writes DECIDE.
3. The ranks save, each says so in a file beside its error file, and end with exit code 0.
"""

from __future__ import annotations

import time

from paceline.launcher.early_start import write_stop_file
from paceline.launcher.output import say
from paceline.launcher.peers import Peers
from paceline.world import DECIDE, LOOK

RESUMABLE = 75
"""The launcher's exit code where a checkpoint was saved and the run is not done: EX_TEMPFAIL of sysexits.h, by which a
user is asked to try again."""
POLL_SECONDS = 0.5


class StopRequest:
    """Passes the request on, of one start of the workers.

    Args:
        path: of the file, which is made here.
        peers: the launchers of the other machines.
        node, nodes: this machine's number, and how many there are.
    """

    def __init__(self, path: str, peers: Peers, node: int, nodes: int) -> None:
        self.path, self._peers, self._node, self._nodes = path, peers, node, nodes
        self._phase, self._polled = 0, 0.0
        self._told = False  # do the other launchers know that a signal has come?
        self._write(0)

    def poll(self, asked: bool, machines_come: bool = False) -> None:
        """Do what is due.

        Args:
            asked: did a signal come to this launcher?
            machines_come: are the ranks to save since machines have come, with which they start again?
        """
        now = time.monotonic()
        if asked and not self._told:
            self._told = True
            self._peers.add_asked()
        why = "asked to stop" if asked or not machines_come else "machines have come"
        asked = asked or machines_come
        if self._phase == DECIDE or (not asked and (self._nodes == 1 or now - self._polled < POLL_SECONDS)):
            return
        self._polled = now
        counted = self._peers.count_stops() if self._nodes > 1 else int(self._phase == LOOK)
        if self._phase == 0 and (asked or counted):
            self._write(LOOK)
            counted = self._peers.add_stop() if self._nodes > 1 else 1
            if self._node == 0:
                say(f"paceline: {why}: a checkpoint is saved after one of the next steps.\n")
        if self._node == 0 and counted == self._nodes:
            self._write(DECIDE)

    def _write(self, phase: int) -> None:
        self._phase = phase
        write_stop_file(self.path, phase)
