"""Collective calls that are matched by their names, as Horovod does it.

A script's processes may make their calls in another order, since Horovod's background thread waits until all processes
have asked for a name. torch.distributed matches calls by their order alone: two all-reduces of one size that change
places give wrong numbers in silence. So calls are first written down (`post`). A process that waits for one takes part
in rounds, with all others that wait:

Phase 1: all processes tell each other what they have posted and what they wait for.
Phase 2: what all have posted is carried out, in rank 0's order. Where one name stands for different things (another
  shape, dtype or operation), all processes raise an error.
Phase 3: where nothing was carried out, and nobody can go on, all processes raise an error that says who waits for what.

There is no background thread, so that an operation begins when the first process waits for it, and not when it was
posted. Gradients do not go this way: gradient_reducer.py sends them while the backward runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.comm import collectives
from paceline.errors import UsageError


class Operation:
    """A call that was posted: what Horovod calls a handle.

    Attributes:
        key: its kind and name, such as "allreduce 'loss'".
        signature: what must be the same on all processes, in words: some parts.
        done: was it carried out?
        result: what the call returns.
    """

    def __init__(self, key: str, signature: Sequence[str], act: Callable[[], Any], form: Any, remedy: str) -> None:
        self.key, self.signature, self.form, self.remedy = key, tuple(signature), form, remedy
        self.done, self.result = False, None
        self._act: Callable[[], Any] | None = act

    def __call__(self) -> Any:
        """Horovod's handles of sparse sums are called."""
        return wait(self)

    def then(self, change: Callable[[Any], Any]) -> Operation:
        """The same handle, whose result is `change` of what it would have been."""
        act = self._act
        assert act is not None
        self._act = lambda: change(act())
        return self

    def carry_out(self) -> None:
        assert self._act is not None
        self.result, self.done, self._act = self._act(), True, None


class _Words(NamedTuple):
    """What a process says in a round."""

    posted: list[tuple[str, tuple[str, ...], Any]]  # key, signature and form of each operation, in order
    waiting: str | None  # for what it waits; None: it asks and goes on (poll)
    joined: int  # rounds since it called join(), and takes part in what the others do; 0: it has not


_SAME_CALLS = "Pass tensors of one shape and dtype, and the same operation, or give different things different names."

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
    """Write a call down.

    Args:
        kind: such as "allreduce".
        name: the script's; None: the number of this unnamed call.
        signature: what must be the same on all processes, in words. An error shows the first part that differs.
        act: communicates, and returns the call's result.
        form: what a process that has joined must know to take part; None: it cannot.
        remedy: the end of the error where the signatures differ.

    Raises:
        UsageError: a call of that name has not ended yet.
    """
    if name is None:
        name = f"noname.{_unnamed[kind]}"
        _unnamed[kind] += 1
    key = f"{kind} {name!r}"
    if key in _posted:
        raise UsageError(
            f"hvd.{key} was called again before the first call of that name was waited for. Give each its own name, or "
            "call hvd.synchronize(handle) first."
        )
    operation = _posted[key] = Operation(key, signature, act, form, remedy)
    return operation


def wait(operation: Operation) -> Any:
    """Its result, once it was carried out on all processes."""
    while not operation.done:
        _round(operation.key)
    return operation.result


def ask(operation: Operation) -> bool:
    """Was it carried out? Takes part in one round, which waits for the others to wait for something."""
    if not operation.done:
        _round(None)
    return operation.done


def call(kind: str, name: str | None, signature: Sequence[str], act: Callable[[], Any], *more: Any) -> Any:
    """`post` and `wait`."""
    return wait(post(kind, name, signature, act, *more))


def take_part(stand_in: Callable[[Any], None]) -> int:
    """Of a process that has nothing more to do: take part in the others' operations until all have come here.

    Args:
        stand_in: communicates as an operation of this form does, and adds nothing.

    Returns:
        the rank that came last; the highest of those that came at once.
    """
    if _posted:
        raise UsageError(
            f"hvd.join() was called while {', '.join(_posted)} had not been waited for. Call hvd.synchronize(handle) "
            "on each handle first."
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
        _posted.clear()  # what was posted cannot be matched any more
        raise


def _exchange(waiting: str | None, joined: int = 0) -> list[_Words]:
    own = _Words([(o.key, o.signature, o.form) for o in _posted.values()], waiting, joined)
    everyone: list[Any] = collectives.gather_objects(tuple(own))
    return [_Words(*words) for words in everyone]


def _act_on(everyone: list[_Words], stand_in: Callable[[Any], None] | None) -> None:
    """Phases 2 and 3. stand_in: of a process that has joined."""
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
                f"hvd.{key} needs all processes, and rank {', '.join(map(str, gone))} has called hvd.join(): those "
                "take part in sums, averages and barriers only. Make the call before join()."
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
        f"no process can go on: {waits}. Every process makes the same calls, under the same names: look for a call "
        "inside `if hvd.rank() == 0:`, for loops of different lengths, and for names that hold a rank."
    )
