"""A function in several processes, which the same agent starts as a script: for paceline.launch (launching.py)."""

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
    """paceline.launch, whose docstring is in launching.py."""
    from paceline.launcher.interrupts import Interrupts, Stopped
    from paceline.launcher.output import Output, say

    if not callable(fn):
        raise SettingError(f"launch({fn!r}): a function is needed, to call in each process: launch(train, nproc=2).")
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
                say(outcome.story)
                signal.raise_signal(signal.SIGTERM)
            failed = LaunchError(f"launch({_name(fn)}): {outcome.story}".rstrip("\n"))
            notebook.shorten(failed, f"LaunchError: {failed}")  # with the rank's traceback, and not the launcher's
            raise failed
        finally:
            output.close(failed=False)
    if stopped != signal.SIGINT:  # what this process does at such a signal, it does now that all others have ended
        signal.raise_signal(stopped)
    interrupted = KeyboardInterrupt()
    notebook.shorten(interrupted, "KeyboardInterrupt: paceline.launch was interrupted. All its processes have ended.")
    raise interrupted


def _name(fn: Callable[..., Any]) -> str:
    """The function with its module: many are called train or main."""
    name = getattr(fn, "__qualname__", None)
    return repr(fn) if name is None else f"{getattr(fn, '__module__', '?')}.{name}"


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The function with its arguments, as bytes. Raises LaunchError."""
    import cloudpickle  # type: ignore[import-untyped]  # plain pickle cannot send what is defined in a notebook or in a function

    try:
        return bytes(cloudpickle.dumps((fn, args)))
    except Exception as error:  # pickling raises what it likes
        raise LaunchError(
            f"launch({_name(fn)}): the function, or something that it uses, cannot be sent to other processes "
            f"({error}). Make files, locks, loaders and the like inside the function."
        ) from None


def _result(path: str, fn: Callable[..., Any], rank: int) -> Any:
    """What the function returned on a rank. Raises LaunchError."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise LaunchError(
            f"launch({_name(fn)}): rank {rank} ended with exit code 0 before the function returned (sys.exit?)."
        ) from None
    try:
        return pickle.loads(data)
    except Exception as error:  # unpickling raises what it likes
        raise LaunchError(
            f"launch({_name(fn)}): what it returned on rank {rank} cannot be read here ({type(error).__name__}: "
            f"{error}). Return numbers, strings, tensors on the CPU, or lists and dicts of them."
        ) from None
