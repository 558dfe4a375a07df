"""The statement of the script that makes a call, and the names by which it chooses what it sends."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from paceline.doctor.script_ast import holds


@dataclass(frozen=True)
class Statement:
    """The innermost statement at a line."""

    sent: str = ""  # text of the first argument of its call
    # The names in the statement, and those that a loop around it binds, if the statement uses one of them or a value
    # that is made from one.
    names: frozenset[str] = frozenset()
    indices: frozenset[str] = frozenset()  # the names in its subscripts
    # Line of each `if` around it -> does the statement stand in the body, and not in the else?
    branches: Mapping[int, bool] = field(default_factory=dict)


def statement_at(tree: ast.AST | None, line: int) -> Statement:
    """The innermost statement at a line; an empty Statement where there is none."""
    around = [] if tree is None else [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and holds(n, line)]
    statement = max(around, key=lambda n: n.lineno, default=None)
    if statement is None:
        return Statement()
    branches = {
        n.lineno: held
        for n in around
        if isinstance(n, ast.If)
        for held, part in ((True, n.body), (False, n.orelse))
        if any(holds(inner, line) for inner in part)
    }
    if hasattr(statement, "body"):  # the head of a block
        return Statement(branches=branches)
    used = _names_in(statement)
    for loop in around:
        if isinstance(loop, ast.For):
            bound = _names_in(loop.target)
            used |= bound if bound & (used | _sources(loop, line, used)) else set()
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and n.args and holds(n, line)]
    subscripts = [_names_in(n.slice) for n in ast.walk(statement) if isinstance(n, ast.Subscript)]
    indices = frozenset(name for names in subscripts for name in names)
    return Statement(ast.unparse(calls[0].args[0])[:60] if calls else "", frozenset(used), indices, branches)


def _sources(loop: ast.For, line: int, used: set[str]) -> set[str]:
    """The names from which a loop assigns the `used` ones before a line: `name` in `value = metrics[name]`."""
    found: set[str] = set()
    assigned = (n for n in ast.walk(loop) if isinstance(n, ast.Assign) and n.lineno < line)
    for statement in sorted(assigned, key=lambda n: n.lineno, reverse=True):
        if any(_names_in(target) & (used | found) for target in statement.targets):
            found |= _names_in(statement.value)
    return found


def values_in(statement: Statement, frame: FrameType) -> dict[str, Any]:
    """What a statement chooses by: the text that it sends, and the values of short strings; of integers only where they
    are an index, since elsewhere they may be data."""
    found: dict[str, Any] = {"what is sent": statement.sent} if statement.sent else {}
    for name in statement.names | statement.indices:
        value = frame.f_locals.get(name)
        if (type(value) is str and len(value) <= 40) or (type(value) is int and name in statement.indices):
            found[name] = value
    return found


def _names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
