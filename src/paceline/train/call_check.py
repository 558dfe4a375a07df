"""Do all processes make the same call? A call in which all take part, on some of them only, is named before it hangs.

Each such call (`run.mean`, `run.save`, the backward that sums gradients) begins with one small exchange: the name of
the call, and the script's line. Of the calls that scripts make in each step that is so for the first ones alone, where
such mistakes show; of the others always. What is not compared the launcher names when it has hung
(launcher/stalls.py).

Which calls are compared follows from the calls alone, which all processes make alike. It must not follow from where a
process is: one may look at a batch by itself, and keep the loader's iterator.
"""

from __future__ import annotations

from paceline.comm import collectives
from paceline.errors import UsageError, script_line
from paceline.strategies.base import Strategy

BACKWARD = "the backward of a batch"
IN_EACH_STEP = frozenset({BACKWARD, "run.mean", "run.sum", "run.ratio", "run.gather"})

COMPARED = 32
"""How many of the calls that scripts make in each step are compared."""


class CallCheck:
    """Compares the calls of all processes, as one of them sees it."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._left = COMPARED

    def same(self, call: str) -> None:
        """Raises UsageError, on all processes, where they make different calls. Collective.

        call: its name, as the script writes it.
        """
        in_each_step = call in IN_EACH_STEP
        if in_each_step and self._left == 0:
            return
        self._left -= in_each_step
        # Members of a channel may come and go between two calls: there it compares what they do.
        if collectives.size_of() == 1 or self._strategy.mesh.channel is not None:
            return
        everyone = collectives.gather_objects((call, script_line()))
        if any(other != call for other, _ in everyone):
            told = "; ".join(f"rank {rank}: {other}, at {line}" for rank, (other, line) in enumerate(everyone))
            raise UsageError(
                f"the processes make different calls ({told}). All of them take part in each of these calls, in one "
                "order: take the call out of `if run.main:`, or of a branch or a loop that only some of them enter."
            )
