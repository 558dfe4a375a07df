"""paceline.launch: a function in several processes, started by the same agent as a script."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from paceline.errors import LaunchError, SettingError


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
    script. What rank 0 prints is shown.

    Args:
        nproc: as for `paceline run`.
        timeout: seconds; a run that takes longer is ended, and the error says where each rank stood.
        tee: other ranks whose output is shown, such as "1" or "all".
        settings: as on the command line; they override those of `start()`.

    Raises:
        LaunchError: with the traceback of the rank that failed; or the function, an argument or a result cannot be
            pickled. KeyboardInterrupt: Ctrl-C, once all processes have ended.
    """
    from paceline.launcher.interrupts import Interrupts, Stopped
    from paceline.launcher.output import Output
    from paceline.launcher.plan import make_plan

    if not callable(fn):
        raise SettingError(f"launch({fn!r}): a function is needed, to call in each process: launch(train, nproc=2).")
    plan = make_plan("", (), nproc, settings, kind="function", tee=tee, timeout_seconds=timeout)
    payload = _pickled(fn, args)
    output = Output(None, plan.tee, console=False)
    with Interrupts() as interrupts:
        try:
            from dataclasses import replace

            from paceline.launcher.supervise import supervise

            path = os.path.join(output.private, "function")
            with open(path, "wb") as file:
                pickle.dump((sys.path, payload), file)
            outcome = supervise(replace(plan, script=path), interrupts, output)
            if outcome.exit_code == 0:
                return [_result(f"{path}.{rank}", rank) for rank in range(plan.nproc)]
        except Stopped:
            raise KeyboardInterrupt from None
        finally:
            output.close(failed=False)
    raise LaunchError(outcome.story.rstrip("\n"))


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]  # plain pickle cannot send what is defined in a notebook or in a function

    try:
        return bytes(cloudpickle.dumps((fn, args)))
    except Exception as error:  # pickling raises what it likes
        name = getattr(fn, "__name__", repr(fn))
        raise LaunchError(
            f"launch({name}): the function, or something that it uses, cannot be sent to other processes ({error}). "
            "Make files, locks, loaders and the like inside the function."
        ) from None


def _result(path: str, rank: int) -> Any:
    try:
        with open(path, "rb") as file:
            return pickle.load(file)
    except FileNotFoundError:
        raise LaunchError(f"rank {rank} ended with exit code 0 before the function returned (sys.exit?).") from None
