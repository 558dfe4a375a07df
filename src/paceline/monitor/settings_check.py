"""Were all ranks told to show and write the same?"""

from __future__ import annotations

from typing import Any

from paceline.comm import collectives
from paceline.errors import SettingError


def check_settings(problem: str | None, own: tuple[Any, ...]) -> None:
    """Raise SettingError on all ranks: where one has a problem, or where a rank's settings ask for other exchanges.

    Args:
        problem: this rank's, as the text of an error.
        own: this rank's (is progress shown?, is log_dir given?, log_every, is trace given?).
    """
    everyone = collectives.gather_objects((problem, own))
    for told, _ in everyone:
        if told is not None:
            raise SettingError(told)
    for rank, (_, other) in enumerate(everyone):
        if other != everyone[0][1]:
            names = ("progress other than 'off'", "log_dir given", "log_every", "trace given")
            lines = [f"{name}: {a} on rank 0, {b} on rank {rank}" for name, a, b in zip(names, everyone[0][1], other)]
            raise SettingError(
                "progress, log_dir, log_every and trace must be alike on all ranks, since all of them take part in "
                "what rank 0 shows and writes (" + "; ".join(lines) + "). Give all ranks the same."
            )
