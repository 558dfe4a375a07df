"""The lines and names by which a script or a library chooses the data of a call.

A library that gets several values under names (Lightning's self.log, a dict for Accelerate's reduce) sends them from
one line of the script and one line of the library. Only the names distinguish these calls.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, takewhile
from types import FrameType
from typing import Any

from paceline.observe.script_stack import Owner, ScriptStack
from paceline.observe.source import holds, names_in, statement_at

_MAX_LINES, _MAX_FRAMES = 8, 24  # lines of the script; frames of the calling library
_MAX_LENGTH, _MAX_NAMES = 60, 24  # characters of a name; names of one call


@dataclass(frozen=True)
class Choice:
    """How a statement chooses the data of its call."""

    sent: str = ""  # the text of the first argument of the call
    # The names in the statement. If the statement uses a variable of a surrounding loop (or a value computed from one),
    # also all variables of that loop.
    names: frozenset[str] = frozenset()
    indices: frozenset[str] = frozenset()  # the names in the statement's subscripts
    # Line of each `if` around the statement -> is the statement in the body (not in the else)?
    branches: Mapping[int, bool] = field(default_factory=dict)


@cache
def choice_at(file: str, line: int) -> Choice:
    """Return the Choice of the innermost statement at a line; an empty Choice if there is none."""
    statement = statement_at(file, line)
    if statement is None:
        return Choice()
    node = statement.node
    branches = {
        n.lineno: held
        for n in (*statement.around, node)
        if isinstance(n, ast.If)
        for held, part in ((True, n.body), (False, n.orelse))
        if any(holds(inner, line) for inner in part)
    }
    if hasattr(node, "body"):  # the head of a block
        return Choice(branches=branches)
    used = names_in(node)
    for loop in statement.around:
        if isinstance(loop, ast.For):
            bound = names_in(loop.target)
            used |= bound if bound & (used | _sources(loop, line, used)) else set()
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and n.args and holds(n, line)]
    subscripts = [names_in(n.slice) for n in ast.walk(node) if isinstance(n, ast.Subscript)]
    sent = ast.unparse(calls[0].args[0])[:_MAX_LENGTH] if calls else ""
    return Choice(sent, frozenset(used), frozenset().union(*subscripts), branches)


def _sources(loop: ast.For, line: int, used: set[str]) -> set[str]:
    """The names that the `used` names are computed from, by assignments in the loop before a line. If `value` is used,
    `value = metrics[name]` gives `name`."""
    found: set[str] = set()
    assigned = (n for n in ast.walk(loop) if isinstance(n, ast.Assign) and n.lineno < line)
    for statement in sorted(assigned, key=lambda n: n.lineno, reverse=True):
        if any(names_in(target) & (used | found) for target in statement.targets):
            found |= names_in(statement.value)
    return found


def values_in(choice: Choice, frame: FrameType) -> dict[str, Any]:
    """The values that a statement uses to choose its data: the text of the first argument, short strings, and integers
    in a subscript. (Other integers may be data.)"""
    found: dict[str, Any] = {"what is sent": choice.sent} if choice.sent else {}
    for name in choice.names | choice.indices:
        value = frame.f_locals.get(name)
        if (type(value) is str and len(value) <= 40) or (type(value) is int and name in choice.indices):
            found[name] = value
    return found


def call_context(stack: ScriptStack) -> tuple[list[Any], dict[str, Any], dict[str, bool]]:
    """Return the line of the current call, the way in which its data were chosen, and the branches around it.

    Returns:
        1. [file, line] of the script; [] if the script is not on the stack.
        2. A dict: "the line" (the script's lines on the stack), "what is sent" (the text of the first argument), and
           the values of names that the statement uses (`name` in `all_reduce(metrics[name])`) or the calling library.
        3. "file:line" of each `if` around the script's lines -> is the call in the body of the `if`?
    """
    own = list(islice(stack.frames(Owner.SCRIPT), _MAX_LINES))
    lines = [(frame.f_code.co_filename, frame.f_lineno) for frame in own]
    choices = [choice_at(*line) for line in lines]
    branches = {
        f"{os.path.basename(file)}:{where}": taken
        for (file, _), choice in zip(lines, choices)
        for where, taken in choice.branches.items()
    }
    way = {"the line": " < ".join(f"{os.path.basename(file)}:{line}" for file, line in lines)}
    way |= values_in(choices[0], own[0]) if own else {}
    every = stack.frames(Owner.SCRIPT, Owner.LIBRARY)
    library = takewhile(lambda frame: not stack.owns(frame.f_code.co_filename), every)  # the library that calls
    return list(lines[0]) if lines else [], way | library_names(islice(library, _MAX_FRAMES)), branches


def library_names(frames: Iterable[FrameType]) -> dict[str, str]:
    """Return the short strings in the frames of a library, such as the key of a metric, by "name in function" or "name
    of class".

    frames: the frames of the library, innermost first.
    """
    found: dict[str, str] = {}
    for where, value in islice((pair for frame in frames for pair in _strings(frame)), _MAX_NAMES):
        found.setdefault(where, value)
    return found


def _strings(frame: FrameType) -> Iterator[tuple[str, str]]:
    """The local strings of a frame, the string attributes of its `self`, and the string fields of its dataclasses."""
    function, values = frame.f_code.co_name, frame.f_locals
    yield from ((f"{name} in {function}", value) for name, value in values.items() if _is_name(value))
    owner = values.get("self")
    kind = type(owner).__name__
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if _is_name(value):
            yield f"{name} of {kind}", value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = ((field.name, getattr(value, field.name, "")) for field in dataclasses.fields(value))
            yield from ((f"{name}.{field} of {kind}", str(one)) for field, one in fields if _is_name(one))


def _is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= _MAX_LENGTH
