"""The order of a rank's updates and of the collectives of all ranks: a line of JSON for each, [kind, file, line].

The lines are written one by one, since a rank may hang or abort later.
"""

from __future__ import annotations

import json
import os
from typing import Any

COLLECTIVE, UPDATE = "collective", "update"
JOIN = "join"  # torch's Join: a rank without data lets the others continue


def order_path(folder: str, rank: int) -> str:
    """The file of a rank."""
    return os.path.join(folder, f"order-{rank}")


class UpdateOrder:
    """Writes the file of this rank."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = open(order_path(folder, rank), "w", buffering=1)  # noqa: SIM115  # until the process ends

    def add(self, kind: str, at: list[Any]) -> None:
        """at: the script's line [file, line], or []."""
        self._file.write(json.dumps([kind, *at]) + "\n")


def read_order(folder: str, rank: int) -> list[list[Any]]:
    """The lines of a rank; [] if it has written none. The last line may be incomplete."""
    path = order_path(folder, rank)
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
