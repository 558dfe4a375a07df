"""Match collective calls by name, like Horovod.

In Horovod, processes may make their calls in different orders: its background thread waits until all processes have
requested a name. torch.distributed matches calls only by their order: if two all-reduces of the same size swap places,
the results are silently wrong. So calls are first recorded (`post`). A process that waits for a call takes part in
rounds with all other waiting processes:

Phase 1: all processes exchange the names of their posted calls, and of the call that each waits for.
Phase 2: calls posted by all processes are executed, in rank 0's order. If one name has different shapes, dtypes or
  operations, all processes raise an error.
Phase 3: if no call was executed and no process can continue, all processes raise an error that names each rank's call.

There is no background thread, so an operation starts when all processes wait, not when it is posted. Gradients do not
use this module: gradient_reducer.py sends them while the backward runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.comm.mesh import world_group
from paceline.errors import UsageError


class Operation:
    """A posted call. Horovod calls it a handle.

    Attributes:
        key: its kind and name, such as "allreduce 'loss'".
        signature: descriptions that must be the same on all processes.
        done: whether it was executed.
        result: the call's result.
    """

    def __init__(self, key: str, signature: Sequence[str], act: Callable[[], Any], form: Any, remedy: str) -> None:
        self.key, self.signature, self.form, self.remedy = key, tuple(signature), form, remedy
        self.done, self.result = False, None
        self._act: Callable[[], Any] | None = act

    def __call__(self) -> Any:
        """Wait, and return the result. In Horovod, handles of sparse sums are called."""
        return wait(self)

    def then(self, change: Callable[[Any], Any]) -> Operation:
        """Apply `change` to the future result. Returns this handle."""
        act = self._act
        assert act is not None
        self._act = lambda: change(act())
        return self

    def carry_out(self) -> None:
        assert self._act is not None
        self.result, self.done, self._act = self._act(), True, None


class _Words(NamedTuple):
    """A process's message in a round."""

    posted: list[tuple[str, tuple[str, ...], Any]]  # key, signature and form of each operation, in order
    waiting: str | None  # the call that it waits for; None: it only polls
    joined: int  # rounds since the process called join(); 0: it has not called join()


_SAME_CALLS = "Use the same shape, dtype and operation on all processes, or give different calls different names."

_posted: dict[str, Operation] = {}
_unnamed: Counter[str] = Counter()  # calls without a name, by their kind


def post(
    kind: str,
    name: str | None,
    signature: Sequence[str],
    act: Callable[[], Any],
    form: Any = None,
    remedy: str = _SAME_CALLS,
) -> Operation:
    """Record a call.

    Args:
        kind: such as "allreduce".
        name: the script's name for the call; None: the call gets a number.
        signature: descriptions that must be the same on all processes. An error shows the first one that differs.
        act: communicates, and returns the call's result.
        form: information for a joined process to take part; None: a joined process cannot take part.
        remedy: the remedy in the error if signatures differ.

    Raises:
        UsageError: a call with that name is still pending.
    """
    if name is None:
        name = f"noname.{_unnamed[kind]}"
        _unnamed[kind] += 1
    key = f"{kind} {name!r}"
    if key in _posted:
        raise UsageError(
            f"hvd.{key} was called again while a call with that name is pending. Use different names, or call "
            "hvd.synchronize(handle) first."
        )
    operation = _posted[key] = Operation(key, signature, act, form, remedy)
    return operation


def wait(operation: Operation) -> Any:
    """Wait until the operation was executed on all processes, and return its result."""
    while not operation.done:
        _round(operation.key)
    return operation.result


def ask(operation: Operation) -> bool:
    """Return whether the operation was executed. Takes part in one round, which waits until all others wait or poll."""
    if not operation.done:
        _round(None)
    return operation.done


def call(kind: str, name: str | None, signature: Sequence[str], act: Callable[[], Any], *more: Any) -> Any:
    """Post a call and wait for its result."""
    return wait(post(kind, name, signature, act, *more))


def take_part(stand_in: Callable[[Any], None]) -> int:
    """Take part in the operations of the other processes, without contributing data, until all processes have joined.

    Args:
        stand_in: communicates like an operation with the given form, without contributing data.

    Returns:
        The last rank to join; the highest if several joined in the same round.
    """
    if _posted:
        raise UsageError(
            f"hvd.join() was called while {', '.join(_posted)} was pending. Call hvd.synchronize(handle) on each "
            "handle first."
        )
    rounds = 0
    while True:
        rounds += 1
        everyone = _exchange("join()", joined=rounds)
        since = [words.joined for words in everyone]
        if all(since):
            return max(rank for rank, count in enumerate(since) if count == min(since))
        _act_on(everyone, stand_in)


def _round(waiting: str | None) -> None:
    try:
        _act_on(_exchange(waiting), None)
    except Exception:
        _posted.clear()  # pending calls can no longer be matched
        raise


def _exchange(waiting: str | None, joined: int = 0) -> list[_Words]:
    own = _Words([(o.key, o.signature, o.form) for o in _posted.values()], waiting, joined)
    everyone: list[Any] = world_group().gather(tuple(own))
    return [_Words(*words) for words in everyone]


def _act_on(everyone: list[_Words], stand_in: Callable[[Any], None] | None) -> None:
    """Run phases 2 and 3. stand_in: set on a process that has joined."""
    active = {rank: words for rank, words in enumerate(everyone) if not words.joined}
    signatures = {rank: {key: signature for key, signature, _ in words.posted} for rank, words in active.items()}
    first = min(active)
    ready = [item for item in everyone[first].posted if all(item[0] in found for found in signatures.values())]
    for key, signature, form in ready:
        if any(found[key] != signature for found in signatures.values()):
            remedy = _posted[key].remedy if key in _posted else _SAME_CALLS
            parts = itertools.zip_longest(*(found[key] for found in signatures.values()), fillvalue="nothing")
            first_other = next(part for part in parts if len(set(part)) > 1)
            shown = "; ".join(f"rank {rank}: {part}" for rank, part in zip(signatures, first_other))
            raise UsageError(f"hvd.{key} is not the same call on all processes ({shown}). {remedy}")
        if len(active) < len(everyone) and form is None:
            gone = [rank for rank, words in enumerate(everyone) if words.joined]
            raise UsageError(
                f"hvd.{key} needs all processes, but rank {', '.join(map(str, gone))} has called hvd.join(), after "
                "which only sums, averages and barriers work. Make the call before join()."
            )
    if not ready and all(words.waiting is not None for words in active.values()):
        raise UsageError(_stuck(everyone))
    for key, _, form in ready:
        if stand_in is not None:
            stand_in(form)
        else:
            _posted.pop(key).carry_out()


def _stuck(everyone: list[_Words]) -> str:
    waits = "; ".join(f"rank {rank} waits for {words.waiting}" for rank, words in enumerate(everyone))
    return (
        f"no process can continue: {waits}. Every process must make the same calls, with the same names. Look for "
        "calls inside `if hvd.rank() == 0:`, loops of different lengths, and names that contain a rank."
    )
