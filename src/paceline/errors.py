"""Paceline's exceptions and warnings, and the recognition of torch's errors about lost processes.

    PacelineError         the base of all exceptions that Paceline raises on purpose
    ├── SettingError      a setting, argument or option has a value that cannot work   (also a ValueError)
    ├── UsageError        a call in the wrong place or order                           (also a RuntimeError)
    ├── WorldError        the environment describes no consistent world of processes
    ├── LaunchError       workers could not be started
    ├── TorchVersionError      this version of torch lacks something that Paceline needs
    ├── ModelError        the model does something that this run cannot compute exactly
    │   ├── UnusedParameterError   parameters that some rank's loss did not reach
    │   └── EmptyShardError        the model or the loss cannot take a zero-length batch
    ├── NonFiniteError    a loss or a gradient is inf or NaN
    ├── CheckpointError   a checkpoint is missing, damaged, or from another program
    └── ExportError       a model cannot be exported as requested

A message names the setting or call, the value received, and the remedy. For a misspelt name it suggests the nearest
known name.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType

_NOT_THE_USERS = (__name__.partition(".")[0], "torch", "contextlib")
"""Packages that warnings skip when they look for the user's line."""

# Messages of gloo, NCCL and torch's store when the process at the other end has ended.
_PEER_IS_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|socket closed|connection refused|connection was likely closed|"
    r"failed to recv, got 0 bytes|remote process exited|caused pair closure",
    re.IGNORECASE,
)
_FROM_TORCH = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError")
_WORKER_OR_SERVER_IS_GONE = re.compile(
    r"WorldError: the (parameter server|worker) of rank \d+ (is lost|does not answer)"
)

_STYLES = re.compile(r"\x1b\[[\d;:]*m")  # colours and other text styles
# Control characters except tab and newline; characters that reverse the text direction; line separators other than
# newline; halves of surrogate pairs, which no terminal can encode.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_of_thread = threading.local()  # held: the thread's list of warnings, inside `warnings_held`


class PacelineError(Exception):
    """The base class: catch it to catch every exception that Paceline raises on purpose."""


class SettingError(PacelineError, ValueError):
    """A setting, argument or option has a value that cannot work."""


class UsageError(PacelineError, RuntimeError):
    """A call in the wrong place or order."""


class WorldError(PacelineError):
    """The environment describes no consistent world of processes."""


class LaunchError(PacelineError):
    """Workers could not be started."""


class TorchVersionError(PacelineError, RuntimeError):
    """This version of torch lacks something that Paceline needs."""


class ModelError(PacelineError, RuntimeError):
    """The model does something that this run cannot compute exactly."""


class UnusedParameterError(ModelError):
    """Parameters that some rank's loss did not reach."""


class EmptyShardError(ModelError):
    """The model or the loss cannot take a zero-length batch."""


class NonFiniteError(PacelineError, ArithmeticError):
    """A loss or a gradient is inf or NaN."""


class CheckpointError(PacelineError):
    """A checkpoint is missing, damaged, or from another program."""


class ExportError(PacelineError):
    """A model cannot be exported as requested."""


def suggest(name: str, known: Iterable[str], elsewhere: Mapping[str, str] = {}) -> str:
    """Finish an error message about an unknown name: suggest a known name, then list all.

    Args:
        elsewhere: name in another library -> Paceline's name.
    """
    names = sorted(known)
    near = [other for other in difflib.get_close_matches(name, names, n=3, cutoff=0.55) if _is_misspelt(name, other)]
    meant = elsewhere.get(name.lower(), near[0] if near else None)
    hint = f"Did you mean {meant!r}? " if meant is not None else ""
    return f"{hint}Known: {', '.join(names)}."


def check_whole(call: str, name: str, value: object, least: int = 1) -> None:
    """Raise SettingError if argument `name` of `call` is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{call}({name}={value!r}): must be a whole number, at least {least}.")


def _is_misspelt(name: str, known: str) -> bool:
    """Return whether a name is a misspelling of a similar known name.

    A name with different numbers (fp8, fp32) or a different word (model_parallel, data_parallel) is no misspelling.
    """
    numbers = [sorted(filter(str.isdigit, text)) for text in (name, known)]
    if all(numbers) and numbers[0] != numbers[1]:
        return False
    words = [re.split(r"[^a-z0-9]+", text.lower()) for text in (name, known)]
    if len(words[0]) != len(words[1]) or len(words[0]) == 1:
        return True
    return all(
        one.startswith(other) or other.startswith(one) or difflib.SequenceMatcher(None, one, other).ratio() >= 0.6
        for one, other in zip(*words)
    )


def warn(message: str) -> None:
    """Issue a UserWarning that names the innermost line outside Paceline and torch, in the script or a library."""
    held: list[str] | None = getattr(_of_thread, "held", None)
    if held is not None:
        held.append(message)
        return
    level, _ = _script_frame(sys._getframe())
    warnings.warn(message, stacklevel=level)


def script_line() -> str:
    """Name the innermost line outside Paceline and torch, as "train.py, line 31", or "the end of the script"."""
    _, frame = _script_frame(sys._getframe())
    if frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        return "the end of the script"
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}, line {frame.f_lineno}"


def _script_frame(frame: FrameType) -> tuple[int, FrameType]:
    """Return (number of frames up to it, counted from 1; the first frame outside Paceline and torch)."""
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    return level, frame


@contextlib.contextmanager
def warnings_held() -> Iterator[list[str]]:
    """Collect this thread's warnings in a list. The main thread issues them later.

    For threads that Paceline starts: they have no line of the script to name, and if warnings are errors, an exception
    in such a thread would be lost.
    """
    _of_thread.held = held = list[str]()
    try:
        yield held
    finally:
        _of_thread.held = None


def printable(text: str) -> str:
    """Make text from a script, a file or another host safe to print on a terminal.

    Escape sequences could hide or forge lines, or set the terminal's title. Colours are removed, and other control
    characters are escaped (\\x1b).
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], _STYLES.sub("", text))


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and the exceptions that caused it, at most 20."""
    link: BaseException | None = error
    for _ in range(20):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


def describe_error(error: BaseException) -> str:
    """Format an exception as "Type: message"."""
    return f"{type(error).__name__}: {error}"


def only_reports_lost_peer(chain: Iterable[str]) -> bool:
    """Return whether an exception only reports that another process has ended.

    Args:
        chain: the exception and its causes (`chain_of`), each formatted by `describe_error`.
    """
    return any(
        (link.startswith(_FROM_TORCH) and _PEER_IS_GONE.search(link)) or _WORKER_OR_SERVER_IS_GONE.match(link)
        for link in chain
    )
