"""Find the lines of a script that compute a loss, from the loss's autograd graph.

In anomaly mode, torch stores the Python stack with each node of a graph. That costs time, so it is on for the first
backward passes only, without the check for NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from paceline.observe.script_stack import ScriptStack

_FRAME = re.compile(r'File "(.*)", line (\d+), in ')
_STORED = "traceback_"  # the key of a node's stack in its metadata
_DEPTH, _MAX_NODES = 24, 200


class GraphLines:
    """The lines that make the nodes of a graph.

    Args:
        stack: finds out which files belong to the script.
        passes: stop after this number of backward passes and updates.
    """

    def __init__(self, stack: ScriptStack, passes: int = 6) -> None:
        self._stack, self._left = stack, passes
        self._mine = not torch.is_anomaly_enabled()  # otherwise the script, or its user, has turned it on
        if self._mine:
            torch.autograd.set_detect_anomaly(True, check_nan=False)

    @property
    def on(self) -> bool:
        """Whether nodes that are made now have lines."""
        return self._left > 0

    def line_of(self, node: Any) -> list[Any]:
        """[file, line]: the script's innermost line when the node was made; [] if it is unknown."""
        for frame in reversed(node.metadata.get(_STORED, ()) if node is not None else ()):
            found = _FRAME.search(frame)
            if found is not None and self._stack.owns(found[1]):
                return [found[1], int(found[2])]
        return []

    def after_pass(self) -> None:
        """Count a backward pass, or an update: a script may compute gradients by another function."""
        self._left -= 1
        if self._left == 0 and self._mine:
            torch.autograd.set_detect_anomaly(False)

    def nodes(self, root: Any) -> Iterator[Any]:
        """The nodes of a graph, nearest to the loss first. Each has a line in the script."""
        level, seen = [root], {root}
        for _ in range(_DEPTH):
            for node in level:
                if self.line_of(node):
                    yield node
            below = [child for node in level for child, _ in node.next_functions if child is not None]
            level = [child for child in dict.fromkeys(below) if child not in seen]
            seen.update(level)
            if not level or len(seen) > _MAX_NODES:
                return
