"""Check that all processes make the same collective call, and report a mismatch before it hangs.

Each collective call (`run.mean`, `run.save`, the backward that sums gradients) begins with one small exchange: the name
of the call, and its line in the script. Calls that scripts make in every step are compared only the first COMPARED
times, since mistakes in them show early. All other calls are always compared. If a call that is not compared hangs, the
launcher reports it (launcher/stalls.py).

If another process has exited before such a call, torch only reports a closed connection. `call` then raises an error
that names the call, its line and the remedy. Its __cause__ is torch's error, so the launcher can see that the new error
is secondary.

The number of calls so far decides whether a call is compared, since that number is the same on all processes. The
position in the data must not decide: one process alone may fetch a batch to look at it, and keep the loader's iterator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from paceline.comm.mesh import world_group
from paceline.errors import UsageError, describe_error, only_reports_lost_peer, script_line
from paceline.strategies.base import Strategy

F = TypeVar("F", bound=Callable[..., Any])

BACKWARD = "the backward of a batch"
IN_EACH_STEP = frozenset({BACKWARD, "run.mean", "run.sum", "run.ratio", "run.gather"})

COMPARED = 32
"""Calls that scripts make in each step are compared this number of times in total."""


class CallCheck:
    """Compares this process's collective calls with those of the other processes."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._left = COMPARED

    @property
    def over(self) -> bool:
        """Whether calls that scripts make in each step are no longer compared."""
        return self._left == 0

    def call(self, name: str) -> Call:
        """Returns a context manager for a collective call.

        The context manager compares the call over the processes (`same`). If another process has exited, this process
        raises an error that names the call. name: the call as the script writes it.
        """
        return Call(self, name)

    def same(self, call: str) -> None:
        """Raises UsageError on all processes if they make different calls. Collective.

        call: the call as the script writes it.
        """
        in_each_step = call in IN_EACH_STEP
        if in_each_step and self._left == 0:
            return
        self._left -= in_each_step
        if world_group().size == 1:
            return
        everyone = world_group().gather((call, script_line()))
        if any(other != call for other, _ in everyone):
            calls = "; ".join(f"rank {rank}: {other}, at {line}" for rank, (other, line) in enumerate(everyone))
            raise UsageError(
                f"the processes make different calls ({calls}). Every process must make each of these calls, in the "
                "same order. Move the call out of `if run.main:`, or out of a branch or loop that only some processes "
                "enter."
            )


class Call:
    """The context manager of CallCheck.call. A class, since a generator would add frames to the script's traceback."""

    def __init__(self, check: CallCheck, name: str) -> None:
        self._check, self._name = check, name

    def __enter__(self) -> None:
        self._check.strategy.check_call(self._name)
        try:
            self._check.same(self._name)
        except Exception as error:
            self._explain(error)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._explain(error)

    def _explain(self, error: BaseException) -> None:
        if only_reports_lost_peer([describe_error(error)]):
            raise UsageError(_alone(self._name)) from error


def by_all(method: F) -> F:
    """Decorate a method of Run that is a collective call."""
    name = f"run.{method.__name__}"

    def called(run: Any, *args: Any, **kwargs: Any) -> Any:
        with run.calls.call(name):
            return method(run, *args, **kwargs)

    # A stall report takes the name of the called function from its code object.
    called.__code__ = called.__code__.replace(co_name=method.__name__)
    return cast(F, wraps(method)(called))


def _alone(call: str) -> str:
    return (
        f"rank {world_group().rank} is in {call}, at {script_line()}, but another process has exited without this "
        f"call. Every process must call {call}: move it out of `if run.main:` (only rank 0 writes files anyway). If "
        "the other process failed, its error is the cause."
    )
