"""Every exception that Paceline raises on purpose, how it warns, and which of torch's tell of a process that has gone.

    PacelineError
    ├── SettingError      a setting, argument or option has a value that cannot work   (also a ValueError)
    ├── UsageError        a call in the wrong place or order                           (also a RuntimeError)
    ├── WorldError        the environment describes no consistent world of processes
    ├── LaunchError       workers could not be started
    ├── TorchVersionError      this version of torch lacks something that Paceline needs
    ├── ModelError        the model does something that this run cannot keep exact
    │   ├── UnusedParameterError   parameters that some rank's loss did not reach
    │   └── EmptyShardError        the model or the loss cannot take a zero-length batch
    ├── NonFiniteError    a loss or a gradient is inf or NaN
    ├── CheckpointError   a checkpoint is missing, damaged, or of another program
    └── ExportError       a model cannot be exported as it was asked for

A message names the setting or call, what was received, and the remedy; of a misspelt name the nearest known one.
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
"""Packages whose lines a warning does not name."""

# What gloo, NCCL and torch's store say when the process at the other end has gone.
_PEER_IS_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|socket closed|connection refused|connection was likely closed|"
    r"failed to recv, got 0 bytes|remote process exited|caused pair closure",
    re.IGNORECASE,
)
_FROM_TORCH = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError")
_WORKER_OR_SERVER_IS_GONE = re.compile(
    r"WorldError: the (parameter server|worker) of rank \d+ (has gone|does not answer)"
)

_STYLES = re.compile(r"\x1b\[[\d;:]*m")  # colours and the like
# Control characters but tab and newline; those that turn the direction of text, or end a line without being a newline;
# halves of surrogate pairs, which no terminal can encode.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_of_thread = threading.local()  # held: the list of warnings_held, within it


class PacelineError(Exception):
    """The root: catch this to catch whatever Paceline raises on purpose."""


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
    """The model does something that this run cannot keep exact."""


class UnusedParameterError(ModelError):
    """Parameters that some rank's loss did not reach."""


class EmptyShardError(ModelError):
    """The model or the loss cannot take a zero-length batch."""


class NonFiniteError(PacelineError, ArithmeticError):
    """A loss or a gradient is inf or NaN."""


class CheckpointError(PacelineError):
    """A checkpoint is missing, damaged, or of another program."""


class ExportError(PacelineError):
    """A model cannot be exported as it was asked for."""


def suggest(name: str, known: Iterable[str], elsewhere: Mapping[str, str] = {}) -> str:
    """The end of an error message about an unknown name: the known one that was meant, then all of them.

    elsewhere: what other libraries call the known ones.
    """
    names = sorted(known)
    near = [other for other in difflib.get_close_matches(name, names, n=3, cutoff=0.55) if _is_misspelt(name, other)]
    meant = elsewhere.get(name.lower(), near[0] if near else None)
    hint = f"Did you mean {meant!r}? " if meant is not None else ""
    return f"{hint}Known: {', '.join(names)}."


def check_whole(call: str, name: str, value: object, least: int = 1) -> None:
    """Raises SettingError where the argument `name` of `call` is no whole number, or a smaller one than `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{call}({name}={value!r}): a whole number, at least {least}, is needed.")


def _is_misspelt(name: str, known: str) -> bool:
    """Is a name that looks like a known one a slip of the hand? Not with another number in it (fp8 is no fp32), and not
    where one of its words is another word (model_parallel is no data_parallel)."""
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
    """A UserWarning at the innermost line outside Paceline and torch: the script's, or that of a library it calls."""
    held: list[str] | None = getattr(_of_thread, "held", None)
    if held is not None:
        held.append(message)
        return
    level, _ = _script_frame(sys._getframe())
    warnings.warn(message, stacklevel=level)


def script_line() -> str:
    """That line, as "train.py, line 31"; where there is none, the end of the script."""
    _, frame = _script_frame(sys._getframe())
    if frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        return "the end of the script"
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}, line {frame.f_lineno}"


def _script_frame(frame: FrameType) -> tuple[int, FrameType]:
    """The first frame outside Paceline and torch, and how many there are from the given one to it."""
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    return level, frame


@contextlib.contextmanager
def warnings_held() -> Iterator[list[str]]:
    """Within the block this thread's warnings go into the list. A thread of Paceline's has no line of the script's to
    name, and what it raises where warnings are errors reaches nobody: the main thread warns of them later."""
    _of_thread.held = held = list[str]()
    try:
        yield held
    finally:
        _of_thread.held = None


def printable(text: str) -> str:
    """Text from a script, a file or another host as a terminal may have it: an escape sequence could hide or forge
    lines, or set the terminal's title. Colours are left out, other control characters are spelt out (\\x1b)."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], _STYLES.sub("", text))


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The exception and what led to it, at most 20."""
    link: BaseException | None = error
    for _ in range(20):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


def in_words(error: BaseException) -> str:
    """ "Type: message"."""
    return f"{type(error).__name__}: {error}"


def only_tells_of_a_lost_peer(chain: Iterable[str]) -> bool:
    """Does an exception only say that another process has gone? chain: it and what led to it, in words."""
    return any(
        (link.startswith(_FROM_TORCH) and _PEER_IS_GONE.search(link)) or _WORKER_OR_SERVER_IS_GONE.match(link)
        for link in chain
    )
