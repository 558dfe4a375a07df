"""paceline.launch: call a function in several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.launcher.function import call
from paceline.strategies import check


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nproc: int | str = 2,
    timeout: float | None = None,
    tee: str = "",
    **settings: Any,
) -> list[Any]:
    """Call `fn(*args)` in `nproc` fresh processes of this machine, and return what it returned in each, by rank.

    For notebooks and tests. The function may be defined anywhere, also in a notebook's cell or in another function; it
    and its arguments are pickled, so that each process has copies. In it `paceline.start()` finds its world, as in a
    script. What rank 0 prints is shown. Of a parameter server, which ends in `run.prepare`, and of a worker that was
    killed and not missed, None is returned.

    Args:
        nproc: as for `paceline run`.
        timeout: seconds; a run that takes longer is ended, and the error says where each rank stood.
        tee: other ranks whose output is shown, such as "1" or "all".
        settings: as on the command line; they override those of `start()`.

    Raises:
        LaunchError: with the traceback of the rank that failed; or the function, an argument or a result cannot be
            pickled.
        SettingError: a setting that cannot work, before anything starts.
        KeyboardInterrupt: Ctrl-C, once all processes have ended. (At SIGTERM this process then ends of it too.)
    """
    return call(fn, args, nproc, settings, timeout=timeout, tee=tee, check_strategy=check)
