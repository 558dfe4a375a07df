"""A signal asks the run to save a checkpoint and end: the launchers' part. The ranks' part is state/preemption.py.

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
from paceline.world import DECIDE, END, LOOK

POLL_SECONDS = 0.5


class StopRequest:
    """Passes the request on, of one start of the workers.

    A disk that is full ends no run. Where the file cannot be made, this start of the workers cannot be asked to save.
    Where a phase cannot be written, it is tried again.

    Args:
        path: of the file, which is made here.
        peers: the launchers of the other machines.
        node, nodes: this machine's number, and how many there are.
    """

    def __init__(self, path: str, peers: Peers, node: int, nodes: int) -> None:
        self.path, self._peers, self._node, self._nodes = path, peers, node, nodes
        self._phase, self._polled = 0, 0.0
        self._told = False  # do the other launchers know that a signal has come?
        self._problem = write_stop_file(path, 0)
        if self._problem:
            say(
                f"paceline: {path} cannot be written ({self._problem}), so that a signal cannot ask this run to save a "
                "checkpoint. Make room, or set TMPDIR to another directory.\n"
            )

    @property
    def works(self) -> bool:
        """Can the ranks be asked?"""
        return not self._problem

    def end(self) -> None:
        """The ranks are to end now: the next SIGTERM is no request to save."""
        if self.works:
            self._write(END)

    def poll(self, asked: bool, machines_come: bool = False) -> None:
        """Do what is due.

        Args:
            asked: did a signal come to this launcher?
            machines_come: are the ranks to save since machines have come, with which they start again?
        """
        if not self.works:
            return
        now = time.monotonic()
        if asked and not self._told:
            self._told = True
            self._peers.count("asked", 1)
        why = "asked to stop" if asked or not machines_come else "machines have come"
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
