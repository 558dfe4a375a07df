"""Which rank is the cause of a failure, and how to say it. Pure but for reading the workers' error files.

When one rank fails, the others soon fail too, since the connections to it close. The rank that is seen to fail first is
therefore often a victim. The cause is the earliest ending that is not a mere consequence; a consequence only where
there is nothing else.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import only_tells_of_a_lost_peer, printable
from paceline.world import told

# What gloo says, before it aborts, when two ranks have come to different operations.
_UNLIKE_CALLS = re.compile(r"gloo::EnforceNotMet|op\.preamble\.length|preamble\.nbytes")
_CALL_ALIKE = (
    "Ranks were in different collective operations. Is a call that all must make made on some ranks only, as under `if "
    "run.main` (run.save, run.export, evaluation, and with fsdp or tensor model(x), p.norm() or p.full_tensor())?"
)
_GIVE_ALIKE = "Do all ranks give that call tensors of the same sizes and dtypes?"
_LIKELY = {
    signal.SIGKILL: " (perhaps out of memory)",
    signal.SIGBUS: " (perhaps /dev/shm is full)",
    signal.SIGSEGV: " (a crash in native code)",
    signal.SIGABRT: " (native code gave up; it said why above)",
}
UNWRITTEN = 120
"""Python's exit code where all went well, but the last of the output could not be written."""


@dataclass(frozen=True)
class Error:
    """An exception that ended a worker's script, as the worker recorded it.

    Attributes:
        time: when, in seconds since the epoch.
        summary: type and message.
        traceback: the whole text, ending in a newline.
        chain: "Type: message" of the exception and of those that led to it.
        shown: has the script's own sys.excepthook shown it already?
    """

    time: float
    summary: str
    traceback: str
    chain: tuple[str, ...]
    shown: bool

    @property
    def consequence(self) -> bool:
        """Does it only say that another process has gone?"""
        return only_tells_of_a_lost_peer(self.chain)

    @property
    def names_the_call(self) -> bool:
        """Does it say in which call of Paceline's the other process was missed (step/call_check.py)?"""
        return self.consequence and self.chain[0].startswith("UsageError: ")


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        rank: which.
        code: its exit code; -n for signal n; None while it still runs although its script has failed.
        time: when it was seen, in seconds since the epoch.
        error: the exception that ended its script, if one did.
        role: what it was for the others, such as "a parameter server"; "" where all ranks are alike.
        place: the script's line, and the call in it, at which it ended or failed; for exit code 0 in words, such as "by
            sys.exit() at train.py, line 5"; "" where that is not known.
        in_collective: was that call one of all ranks?
        unwritable: of the output: "" or why no more of it could be written.
        lost_peer: with an exit code and no exception: had its script caught one that only told of another rank's end?
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
        """Did it fail by itself, and not since others had gone?"""
        return self.failed and not self.consequence

    @property
    def refusal(self) -> bool:
        """Did the script refuse its arguments? Command-line parsers then exit with code 2, on every rank."""
        return self.error is None and self.code == 2

    @property
    def began(self) -> float:
        """When the failure began: when the exception was raised, or else when the end was seen."""
        return self.error.time if self.error else self.time


def read_error(path: str) -> Error | None:
    """The error that a worker recorded; None where there is none, or the file is no record of ours."""
    try:
        record = json.loads(told(path, "") or "")
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
    """The ending that led to the others. At least one of them must be a failure."""
    failed = [ending for ending in endings if ending.failed]
    first = min(failed, key=lambda ending: (ending.consequence, ending.began))
    if first.refusal:  # of ranks that say the same, the lowest, whose output was shown
        return min((ending for ending in failed if ending.refusal), key=lambda ending: ending.rank)
    return first


def exit_code(ending: Ending) -> int:
    """The launcher's exit code for this cause: as in shells, 128 + n for signal n."""
    if ending.error or ending.code is None:
        return 1
    return 128 - ending.code if ending.code < 0 else ending.code


def describe(endings: Sequence[Ending], last_lines: Sequence[str] = (), elsewhere: Mapping[int, str] = {}) -> str:
    """What to print, ending in a newline: the cause, then a line for each other thing that happened on its own.

    Args:
        last_lines: what the cause printed last, for one that died without an exception.
        elsewhere: of ranks that still run, where they are.
    """
    first = cause(endings)
    early = [ending for ending in endings if not ending.failed]
    lines = [headline(first)]
    if first.consequence and early:  # the victim's words come second
        named = first.error is not None and first.error.names_the_call
        lines = [
            f"{exits_in_words([e.rank for e in early], {e.rank: e.place for e in early})}, while others still needed "
            f"{'it' if len(early) == 1 else 'them'}{'.' if named else ': do all ranks take the same number of steps?'}",
            *lines,
        ]
    if first.error and not first.error.shown:
        lines.append(first.error.traceback.rstrip("\n"))
    elif last_lines and (first.error is None or first.error.shown):
        lines.append("The last it printed:\n  " + "\n  ".join(last_lines))
    if first.unwritable:
        lines.append(first.unwritable)
    if first.code == -signal.SIGABRT and (first.in_collective or any(map(_UNLIKE_CALLS.search, last_lines))):
        places = {e.rank: e.place for e in endings if e.failed and e.place} | dict(elsewhere)
        at_one_place = len(places) > 1 and len(set(places.values())) == 1
        lines.append(_GIVE_ALIKE if at_one_place else _CALL_ALIKE)
        lines += [f"  rank {rank} was at {place}" for rank, place in sorted(places.items())]
    if first.role and not first.error:
        lines.append(
            "The run cannot go on without it. Started again (--max-restarts does so), a script that calls run.restore "
            "goes on from its last checkpoint."
        )
    rest = [ending for ending in endings if ending.failed and ending is not first and not ending.consequence]
    alike = [e for e in rest if _failure_key(e) == _failure_key(first)]
    if alike:
        lines.append(f"{name_ranks(e.rank for e in alike)} failed in the same way.")
    if len(alike) < len(rest):
        lines.append(f"{name_ranks(e.rank for e in rest if e not in alike)} failed too.")
    return "\n".join(lines) + "\n"


def exits_in_words(ranks: Sequence[int], places: Mapping[int, str], how: str = "early") -> str:
    """Which ranks ended with exit code 0, and where: "rank 1 ended early, with exit code 0, by sys.exit() at ..."."""
    found = {places.get(rank, "") for rank in ranks}
    if len(found) > 1:
        return "; ".join(exits_in_words([rank], places, how) for rank in sorted(ranks))
    (place,) = found
    return f"{name_ranks(ranks)} ended {how}, with exit code 0{place and f', {place}'}"


def _failure_key(ending: Ending) -> tuple[int | None, str]:
    """Equal where ranks fail for one reason."""
    return (None, ending.error.summary) if ending.error else (ending.code, "")


def headline(ending: Ending) -> str:
    """Which rank, and what became of it, in one line."""
    who = f"rank {ending.rank}, {ending.role}," if ending.role else f"rank {ending.rank}"
    if ending.error:
        summary = ending.error.summary.split("\n")[0]
        return f"{who} failed: {summary}{' (shown above)' if ending.error.shown else ''}"
    assert ending.code is not None
    if ending.code < 0:
        at = f", at {ending.place}" if ending.place else ""
        return f"{who} was killed by {_signal_name(-ending.code)}{_LIKELY.get(-ending.code, '')}{at}"  # type: ignore[call-overload]
    if ending.code == UNWRITTEN:
        return f"{who} ended with exit code {UNWRITTEN}: what it printed last could not be written"
    return f"{who} ended with exit code {ending.code}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", or "ranks 0, 2"."""
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
