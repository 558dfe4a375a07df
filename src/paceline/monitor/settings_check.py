"""Check that all ranks have the same settings for the display and the trackers."""

from __future__ import annotations

from typing import Any

from paceline.comm.mesh import world_group
from paceline.errors import SettingError


def check_settings(problem: str | None, values: tuple[Any, ...]) -> None:
    """Raise SettingError on all ranks if one of them has a problem, or if their settings differ.

    Args:
        problem: the text of an error of this rank, or None.
        values: this rank's settings: (progress is not "off", log_dir is set, log_every, trace is set).
    """
    everyone = world_group().gather((problem, values))
    for text, _ in everyone:
        if text is not None:
            raise SettingError(text)
    for rank, (_, other) in enumerate(everyone):
        if other != everyone[0][1]:
            names = ("progress is not 'off'", "log_dir is set", "log_every", "trace is set")
            lines = [f"{name}: {a} on rank 0, {b} on rank {rank}" for name, a, b in zip(names, everyone[0][1], other)]
            raise SettingError(
                "progress, log_dir, log_every and trace must be the same on all ranks, because all ranks exchange the "
                "values that rank 0 shows and writes (" + "; ".join(lines) + "). Use the same settings on all ranks."
            )
