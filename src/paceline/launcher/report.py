"""Find the rank that caused a failure, and write the report. Pure, except that it reads the workers' error files.

When one rank fails, the others soon fail too, because their connections to it close. So the first failure that the
launcher sees is often secondary. The cause is the earliest failure that is not a consequence of another failure. If all
are consequences, it is the earliest of them.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import only_reports_lost_peer, printable
from paceline.world import read_message

# gloo's messages before it aborts because two ranks are in different operations.
_UNLIKE_CALLS = re.compile(r"gloo::EnforceNotMet|op\.preamble\.length|preamble\.nbytes")
_CALL_ALIKE = (
    "Ranks were in different collective operations. Do only some ranks make a call that all must make, such as under "
    "`if run.main` (run.save, run.export, evaluation; with fsdp or tensor also model(x), p.norm(), p.full_tensor())?"
)
_GIVE_ALIKE = "Do all ranks pass tensors of the same sizes and dtypes to that call?"
_LIKELY = {
    signal.SIGKILL: " (perhaps out of memory)",
    signal.SIGBUS: " (perhaps /dev/shm is full)",
    signal.SIGSEGV: " (a crash in native code)",
    signal.SIGABRT: " (native code aborted; see its message above)",
}
UNWRITTEN = 120
"""Python's exit code for a program that succeeded, but could not write its last output."""


@dataclass(frozen=True)
class Error:
    """An exception that ended a worker's script, as the worker recorded it.

    Attributes:
        time: when it was recorded, in seconds since the epoch.
        summary: type and message.
        traceback: the whole text, ending in a newline.
        chain: "Type: message" of the exception and of each of its causes.
        shown: whether the script's sys.excepthook has printed it already.
    """

    time: float
    summary: str
    traceback: str
    chain: tuple[str, ...]
    shown: bool

    @property
    def consequence(self) -> bool:
        """Whether the exception only reports that another process has ended."""
        return only_reports_lost_peer(self.chain)

    @property
    def names_the_call(self) -> bool:
        """Whether the message names the Paceline call that the other process did not make (step/call_check.py)."""
        return self.consequence and self.chain[0].startswith("UsageError: ")


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        rank: the rank.
        code: its exit code; -n for signal n; None while the process still runs although its script has failed.
        time: when the launcher noticed, in seconds since the epoch.
        error: the exception that ended its script, or None.
        role: its role, such as "a parameter server"; "" if all ranks have the same role.
        place: the line of the script where the rank ended or failed, and the call in that line. For exit code 0, a
            phrase such as "by sys.exit() at train.py, line 5". "" if unknown.
        in_collective: whether that call was a collective.
        unwritable: why the rank's output could not be written, or "".
        lost_peer: whether its script caught an exception that only reported the loss of another rank, and then exited
            with a nonzero code.
    """

    rank: int
    code: int | None
    time: float
    error: Error | None = None
    role: str = ""
    place: str = ""
    in_collective: bool = False
    unwritable: str = ""
    lost_peer: bool = False

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def consequence(self) -> bool:
        return self.lost_peer or (self.error is not None and self.error.consequence)

    @property
    def is_cause(self) -> bool:
        """Whether the rank failed, and not because other ranks had ended."""
        return self.failed and not self.consequence

    @property
    def refusal(self) -> bool:
        """Whether the script refused its arguments. Command-line parsers then exit with code 2 on every rank."""
        return self.error is None and self.code == 2

    @property
    def began(self) -> float:
        """The time of the exception, or without an exception the time when the launcher noticed the end."""
        return self.error.time if self.error else self.time


def read_error(path: str) -> Error | None:
    """Return the exception that a worker recorded, or None if the file is missing or invalid."""
    try:
        record = json.loads(read_message(path, "") or "")
        return Error(
            float(record["time"]),
            printable(str(record["summary"])),
            printable(str(record["traceback"])),
            tuple(map(str, record["chain"])),
            bool(record["shown"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def cause(endings: Sequence[Ending]) -> Ending:
    """Return the ending that caused the other endings. At least one ending must be a failure."""
    failed = [ending for ending in endings if ending.failed]
    first = min(failed, key=lambda ending: (ending.consequence, ending.began))
    if first.refusal:  # all ranks refuse: take the lowest rank, because its output was shown
        return min((ending for ending in failed if ending.refusal), key=lambda ending: ending.rank)
    return first


def exit_code(ending: Ending) -> int:
    """Return the launcher's exit code for this cause. As in shells, it is 128 + n for signal n."""
    if ending.error or ending.code is None:
        return 1
    return 128 - ending.code if ending.code < 0 else ending.code


def describe(endings: Sequence[Ending], last_lines: Sequence[str] = (), elsewhere: Mapping[int, str] = {}) -> str:
    """Return the report, ending in a newline: the cause, then a line for the other independent failures.

    Args:
        last_lines: the last output of the rank that is the cause, if it died without an exception.
        elsewhere: rank -> current line of its script, for ranks that still run.
    """
    first = cause(endings)
    early = [ending for ending in endings if not ending.failed]
    lines = [headline(first)]
    if first.consequence and early:  # print the secondary failure second
        named = first.error is not None and first.error.names_the_call
        lines = [
            f"{exits_in_words([e.rank for e in early], {e.rank: e.place for e in early})}, while others still needed "
            f"{'it' if len(early) == 1 else 'them'}{'.' if named else ': do all ranks take the same number of steps?'}",
            *lines,
        ]
    if first.error and not first.error.shown:
        lines.append(first.error.traceback.rstrip("\n"))
    elif last_lines and (first.error is None or first.error.shown):
        lines.append("Its last output:\n  " + "\n  ".join(last_lines))
    if first.unwritable:
        lines.append(first.unwritable)
    if first.code == -signal.SIGABRT and (first.in_collective or any(map(_UNLIKE_CALLS.search, last_lines))):
        places = {e.rank: e.place for e in endings if e.failed and e.place} | dict(elsewhere)
        at_one_place = len(places) > 1 and len(set(places.values())) == 1
        lines.append(_GIVE_ALIKE if at_one_place else _CALL_ALIKE)
        lines += [f"  rank {rank} was at {place}" for rank, place in sorted(places.items())]
    if first.role and not first.error:
        lines.append(
            "The run cannot continue without it. After a restart (--max-restarts), a script that calls run.restore "
            "resumes from its last checkpoint."
        )
    rest = [ending for ending in endings if ending.failed and ending is not first and not ending.consequence]
    alike = [e for e in rest if _failure_key(e) == _failure_key(first)]
    if alike:
        lines.append(f"{name_ranks(e.rank for e in alike)} failed in the same way.")
    if len(alike) < len(rest):
        lines.append(f"{name_ranks(e.rank for e in rest if e not in alike)} failed too.")
    return "\n".join(lines) + "\n"


def exits_in_words(ranks: Sequence[int], places: Mapping[int, str], how: str = "early") -> str:
    """Describe ranks that ended with exit code 0: "rank 1 ended early, with exit code 0, by sys.exit() at ..."."""
    found = {places.get(rank, "") for rank in ranks}
    if len(found) > 1:
        return "; ".join(exits_in_words([rank], places, how) for rank in sorted(ranks))
    (place,) = found
    return f"{name_ranks(ranks)} ended {how}, with exit code 0{place and f', {place}'}"


def _failure_key(ending: Ending) -> tuple[int | None, str]:
    """Return a key that is equal for ranks with the same failure."""
    return (None, ending.error.summary) if ending.error else (ending.code, "")


def headline(ending: Ending) -> str:
    """Describe in one line how a rank failed."""
    who = f"rank {ending.rank}, {ending.role}," if ending.role else f"rank {ending.rank}"
    if ending.error:
        summary = ending.error.summary.split("\n")[0]
        return f"{who} failed: {summary}{' (shown above)' if ending.error.shown else ''}"
    assert ending.code is not None
    if ending.code < 0:
        at = f", at {ending.place}" if ending.place else ""
        return f"{who} was killed by {_signal_name(-ending.code)}{_LIKELY.get(-ending.code, '')}{at}"  # type: ignore[call-overload]
    if ending.code == UNWRITTEN:
        return f"{who} ended with exit code {UNWRITTEN}: its last output could not be written"
    return f"{who} ended with exit code {ending.code}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as "rank 1" or "ranks 0, 2"."""
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
