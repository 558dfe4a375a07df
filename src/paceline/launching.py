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
    """Call `fn(*args)` in `nproc` new processes on this machine, and return the results by rank.

    For notebooks and tests. The function may be defined anywhere, even in a notebook cell or another function. The
    function and its arguments are pickled, so each process has copies. In the function, `paceline.start()` works as in
    a script. The output of rank 0 is shown.

    The result is None for a parameter server, which ends in `run.prepare`, and for a worker that died without ending
    the run.

    Args:
        nproc: the number of processes, as for `paceline run`.
        timeout: seconds. A longer run is stopped, and the error shows each rank's stack.
        tee: ranks to show besides rank 0, such as "1" or "all".
        settings: settings as on the command line. They override the settings of `start()`.

    Raises:
        LaunchError: a rank failed (with its traceback), or the function, an argument or a result cannot be pickled.
        SettingError: a setting has an invalid value. Raised before any process starts.
        KeyboardInterrupt: Ctrl-C, after all processes have ended. (After SIGTERM, this process ends too.)
    """
    return call(fn, args, nproc, settings, timeout=timeout, tee=tee, check_strategy=check)
