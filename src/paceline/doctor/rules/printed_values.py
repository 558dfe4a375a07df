"""Does a printed value come from one pass over a loader? Found by following names through the script's source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from paceline.observe.source import (
    FUNCTIONS,
    Scope,
    called,
    calls_in,
    functions,
    holds,
    nodes_of,
    scope_at,
    statements_in,
    tree_of,
)

_MAX_CALLERS = 3  # levels of callers to follow from the function with the loop


def comes_from(said: Any, loop: Any) -> bool | None:
    """Is the value that line `said` prints computed from the batches of the loop at line `loop`?

    Follows the names in the printing statement back through the assignments above it in the same function, to the loop
    or to a call of the function that contains the loop. None: the source does not show it.
    """
    if not said or not loop or tree_of(said[0]) is None or tree_of(loop[0]) is None:
        return None
    scope, source = scope_at(*said), scope_at(*loop)
    own = [s.node for s in statements_in(said[0], scope) if not any(_hides(n) for n in (*s.inside, s.node))]
    statements = sorted(own, key=lambda n: n.lineno)
    printing = max((n for n in statements if holds(n, said[1])), key=lambda n: n.lineno, default=None)
    if printing is None or hasattr(printing, "body"):
        return None
    modules = _imported(said[0])
    made: dict[str, bool] = {}  # name -> does its value come from the loop?
    makers: set[str] = set()
    looping: ast.stmt | None = None
    if scope is source:
        around = [n for n in ast.walk(scope) if isinstance(n, (ast.For, ast.While)) and holds(n, loop[1])]
        looping = next((n for n in around if isinstance(n, ast.For) and holds(n.iter, loop[1])), None)
        looping = looping or max((n for n in statements if holds(n, loop[1])), key=lambda n: n.lineno, default=None)
    else:
        makers = _callers(loop[0], source)
        made |= dict.fromkeys(_changed_outside(source), True)
    for statement in statements:
        if statement.lineno >= said[1] and statement is not looping:
            continue
        if looping is not None and (statement is looping or holds(looping, statement.lineno)):
            made |= dict.fromkeys(_made_in(statement) - modules, True)
            continue
        evaluations = [n for n in calls_in(_heads(statement)) if called(n) in makers]
        tainted = bool(evaluations) or any(made.get(name) for name in _used(statement) - modules)
        for name in _made_in(statement, body=False) - modules:
            kept = isinstance(statement, (ast.AugAssign, ast.Expr)) and made.get(name, False)
            made[name] = tainted or kept
        made |= {_key(a): True for n in evaluations for a in n.args if _key(a)}  # the call may fill its arguments
    printer = (
        _key(printing.value.func) if isinstance(printing, ast.Expr) and isinstance(printing.value, ast.Call) else ""
    )
    used = _used(printing) - modules - {printer}
    if any(called(n) in makers for n in calls_in(_heads(printing))) or any(made.get(name) for name in used):
        return True
    values = used - _functions_of(printing)
    return False if values and all(name in made for name in values) else None


def _hides(node: ast.stmt) -> bool:
    """Is a node a function or class? Its statements do not run with the code around it."""
    return isinstance(node, (*FUNCTIONS, ast.ClassDef))


def _heads(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements in its body."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from ast.walk(child)


def _key(node: ast.AST) -> str:
    """`x` for x, x[0] and x.y; `self.x` for self.x and self.x.y; "" for anything else."""
    parts: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return f"self.{parts[-1]}" if node.id == "self" and parts else node.id


def _used(statement: ast.stmt) -> set[str]:
    loads = (
        n for n in _heads(statement) if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load)
    )  # fmt: skip
    return {_key(n) for n in loads} - {"", "self"}


def _functions_of(statement: ast.stmt) -> set[str]:
    """The names of the functions that a statement calls, and of the objects in its method calls."""
    return {_key(n.func) for n in calls_in(_heads(statement))}


def _made_in(node: ast.AST, body: bool = True) -> set[str]:
    """The names that a statement assigns, and the objects that its method calls may change.

    body: include the statements in its body.
    """
    found: set[str] = set()
    parts = ast.walk(node) if body or not isinstance(node, ast.stmt) else _heads(node)
    for n in parts:
        if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(n.ctx, ast.Store):
            found.add(_key(n))
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and (n.args or n.keywords):
            found.add(_key(n.func.value))
    return found - {"", "self"}


def _changed_outside(function: Scope) -> set[str]:
    """The names outside a function that it may change: attributes of `self`, globals, its arguments."""
    names = _made_in(function)
    stores = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    declared = {name for n in ast.walk(function) if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
    return (names - stores) | declared


def _imported(file: str) -> set[str]:
    """The names that a file binds by imports."""
    aliases = (a for n in nodes_of(file) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names)
    return {(a.asname or a.name).partition(".")[0] for a in aliases}


def _callers(file: str, function: Scope) -> set[str]:
    """The names of a function and of its direct and indirect callers."""
    names = {getattr(function, "name", "")} - {""}
    for _ in range(_MAX_CALLERS):
        names |= {f.name for f in functions(file) if names and any(calls_in(ast.walk(f), *names))}
    return names
