"""What the options of parameter_server are checked for before anything starts."""

from __future__ import annotations

from paceline.errors import SettingError


def check(size: int | None, *, mode: str, servers: int, staleness: int) -> None:
    """Raises SettingError for what cannot work, on this number of processes (None: not known)."""
    if mode not in ("sync", "async"):
        raise SettingError(f"strategy parameter_server: mode={mode!r}: sync or async is needed.")
    if servers < 1:
        raise SettingError(f"strategy parameter_server: servers={servers}: 1 or more are needed.")
    if size is not None and size < 2:
        raise SettingError(
            "strategy parameter_server needs at least 2 processes, a server and a worker, but this run has 1. Start "
            "more (paceline run --nproc 3), or use strategy='single'."
        )
    if size is not None and servers >= size:
        raise SettingError(
            f"strategy parameter_server: servers={servers} of {size} processes leaves no worker. Set servers to "
            f"{size - 1} at most, or start more processes."
        )
    if staleness < -1:
        raise SettingError(f"strategy parameter_server: staleness={staleness}: 0 or more updates, or -1 for any.")
    if staleness >= 0 and mode == "sync":
        raise SettingError("strategy parameter_server: staleness is for mode=async; in sync no gradient is old.")
