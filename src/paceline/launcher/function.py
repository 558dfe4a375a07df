"""The implementation of paceline.launch: run a function in several processes, with the same agent as a script."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from paceline import notebook
from paceline.errors import LaunchError, SettingError
from paceline.launcher.plan import StrategyCheck, make_plan
from paceline.world import CELL_FILE, NOTICE_SECONDS


def call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    nproc: int | str,
    settings: Mapping[str, object],
    *,
    timeout: float | None,
    tee: str,
    check_strategy: StrategyCheck,
) -> list[Any]:
    """Implement paceline.launch. See the docstring in launching.py."""
    from paceline.launcher.interrupts import Interrupts, Stopped
    from paceline.launcher.output import Output, say

    if not callable(fn):
        raise SettingError(f"launch({fn!r}): not a function. Pass the function to call: launch(train, nproc=2).")
    plan = make_plan("", (), nproc, settings, check_strategy, kind="function", tee=tee, timeout_seconds=timeout)
    payload = _pickled(fn, args)
    output = Output(None, plan.tee, console=False)
    with Interrupts(grace=NOTICE_SECONDS, if_able=True) as interrupts:
        try:
            from dataclasses import replace

            from paceline.launcher.supervise import supervise

            path = os.path.join(output.private, "function")
            with open(path, "wb") as file:
                pickle.dump((sys.path, payload), file)
            variables = dict(plan.variables)
            if notebook.in_kernel():
                output.relay = notebook.Relay(os.path.join(output.private, "cell"), notebook.Cell())
                variables[CELL_FILE] = output.relay.path
            outcome = supervise(replace(plan, script=path, variables=variables), interrupts, output)
            if outcome.exit_code == 0:
                return [_result(f"{path}.{rank}", fn, rank) for rank in range(plan.nproc)]
        except Stopped as error:
            stopped = error.signum
        else:
            if outcome.saved:
                say(outcome.report)
                signal.raise_signal(signal.SIGTERM)
            failed = LaunchError(f"launch({_name(fn)}): {outcome.report}".rstrip("\n"))
            notebook.shorten(failed, f"LaunchError: {failed}")  # with the rank's traceback, not the launcher's
            raise failed
        finally:
            output.close(failed=False)
    if stopped != signal.SIGINT:  # now that the workers have ended, let this process handle the signal as usual
        signal.raise_signal(stopped)
    interrupted = KeyboardInterrupt()
    notebook.shorten(interrupted, "KeyboardInterrupt: paceline.launch was interrupted. All its processes have ended.")
    raise interrupted


def _name(fn: Callable[..., Any]) -> str:
    """Return the function's name with its module, because many functions are called train or main."""
    name = getattr(fn, "__qualname__", None)
    return repr(fn) if name is None else f"{getattr(fn, '__module__', '?')}.{name}"


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle the function and its arguments. Raises LaunchError."""
    import cloudpickle  # type: ignore[import-untyped]  # pickle cannot send functions defined in a notebook or function

    try:
        return bytes(cloudpickle.dumps((fn, args)))
    except Exception as error:  # pickling may raise anything
        raise LaunchError(
            f"launch({_name(fn)}): the function, or something that it uses, cannot be sent to other processes "
            f"({error}). Create files, locks, loaders and similar objects inside the function."
        ) from None


def _result(path: str, fn: Callable[..., Any], rank: int) -> Any:
    """Return the function's result on a rank, read from the file at `path`. Raises LaunchError."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise LaunchError(
            f"launch({_name(fn)}): rank {rank} ended with exit code 0 before the function returned (sys.exit?)."
        ) from None
    try:
        return pickle.loads(data)
    except Exception as error:  # unpickling may raise anything
        raise LaunchError(
            f"launch({_name(fn)}): the result of rank {rank} cannot be read here ({type(error).__name__}: {error}). "
            "Return numbers, strings, tensors on the CPU, or lists and dicts of them."
        ) from None
