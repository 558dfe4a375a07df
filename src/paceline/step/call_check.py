"""Do all processes make the same call? A call in which all take part, on some of them only, is named before it hangs.

Each such call (`run.mean`, `run.save`, the backward that sums gradients) begins with one small exchange: the name of
the call, and the script's line. Of the calls that scripts make in each step that is so for the first ones alone, where
such mistakes show; of the others always. What is not compared the launcher names when it has hung
(launcher/stalls.py).

Where another process has ended before such a call, torch's error tells of a closed connection. One that names the call,
its line and the remedy is put in its place (`call`). Torch's error stays its cause, by which the launcher knows that it
is a consequence.

Which calls are compared follows from the calls alone, which all processes make alike. It must not follow from where a
process is: one may look at a batch by itself, and keep the loader's iterator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from paceline.comm import collectives
from paceline.errors import UsageError, in_words, only_tells_of_a_lost_peer, script_line
from paceline.strategies.base import Strategy

F = TypeVar("F", bound=Callable[..., Any])

BACKWARD = "the backward of a batch"
IN_EACH_STEP = frozenset({BACKWARD, "run.mean", "run.sum", "run.ratio", "run.gather"})

COMPARED = 32
"""How many of the calls that scripts make in each step are compared."""


class CallCheck:
    """Compares the calls of all processes, as one of them sees it."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._left = COMPARED

    @property
    def over(self) -> bool:
        """Whether calls that scripts make in each step are compared no more."""
        return self._left == 0

    def call(self, name: str) -> Call:
        """A context around a call in which all processes take part: compares it (`same`), and names it where another
        process has ended. name: as the script writes it."""
        return Call(self, name)

    def same(self, call: str) -> None:
        """Raises UsageError, on all processes, where they make different calls. Collective.

        call: its name, as the script writes it.
        """
        in_each_step = call in IN_EACH_STEP
        if in_each_step and self._left == 0:
            return
        self._left -= in_each_step
        if collectives.size_of() == 1:
            return
        everyone = collectives.gather_objects((call, script_line()))
        if any(other != call for other, _ in everyone):
            told = "; ".join(f"rank {rank}: {other}, at {line}" for rank, (other, line) in enumerate(everyone))
            raise UsageError(
                f"the processes make different calls ({told}). All of them take part in each of these calls, in one "
                "order: take the call out of `if run.main:`, or of a branch or a loop that only some of them enter."
            )


class Call:
    """What CallCheck.call returns. (No generator: its frames would stand in the script's traceback.)"""

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
        if only_tells_of_a_lost_peer([in_words(error)]):
            raise UsageError(_alone(self._name)) from error


def by_all(method: F) -> F:
    """A method of a Run in which all processes take part."""
    name = f"run.{method.__name__}"

    def called(run: Any, *args: Any, **kwargs: Any) -> Any:
        with run.calls.call(name):
            return method(run, *args, **kwargs)

    # A stall's message names the function that stands in the script's line: by its code.
    called.__code__ = called.__code__.replace(co_name=method.__name__)
    return cast(F, wraps(method)(called))


def _alone(call: str) -> str:
    return (
        f"rank {collectives.rank_of()} is in {call}, at {script_line()}, and another process has ended without it. All "
        f"processes take part in {call}: call it on every rank, outside of `if run.main:` (rank 0 alone writes the "
        "files). If the other process failed, its own error is the cause."
    )
