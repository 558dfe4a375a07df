"""The source of a script as syntax trees: its statements, functions, calls, assignments. Pure; cached by file."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile

from paceline.observe.script_stack import Place

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BLOCKS = ("body", "orelse", "finalbody")
_NOT_IN_HEAD = (*_BLOCKS, "handlers", "cases", "decorator_list", "targets")


@dataclass(frozen=True)
class Statement:
    """One statement of a file."""

    file: str
    line: int
    node: ast.stmt  # of a compound statement (if, for), only the head counts: its body has separate Statements
    scope: Scope  # the function that the statement is in, or the module
    # The compound statements around this statement, including functions and classes, outermost first.
    around: tuple[ast.stmt, ...] = ()

    @property
    def place(self) -> Place:
        return self.file, self.line

    @property
    def inside(self) -> tuple[ast.stmt, ...]:
        """The compound statements around this statement, within its function."""
        inner = takewhile(lambda node: node is not self.scope, reversed(self.around))
        return tuple(inner)[::-1]

    @property
    def end(self) -> int:
        """The last line of the statement, or of the head of a compound statement."""
        body = getattr(self.node, "body", None)
        if isinstance(body, list) and body:
            return max(self.line, body[0].lineno - 1)
        return self.node.end_lineno or self.line

    def expressions(self) -> Iterator[ast.expr]:
        """The expressions that the statement evaluates, except the targets of an assignment."""
        for name, value in ast.iter_fields(self.node):
            if name in _NOT_IN_HEAD:
                continue
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, ast.withitem):
                    yield one.context_expr
                elif isinstance(one, ast.expr) and not (name == "target" and not isinstance(self.node, ast.AugAssign)):
                    yield one


@cache
def tree_of(file: str) -> ast.Module | None:
    """The tree of a file; None if it cannot be read or parsed."""
    try:
        with open(file, encoding="utf-8") as text:
            return ast.parse(text.read())
    except (OSError, SyntaxError, ValueError):
        return None


@cache
def nodes_of(file: str) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree, outer nodes first; () if it cannot be read."""
    tree = tree_of(file)
    return () if tree is None else tuple(ast.walk(tree))


@cache
def statements(file: str) -> tuple[Statement, ...]:
    """The statements of a file, in order; () if it cannot be read."""
    found: list[Statement] = []

    def visit(body: list[ast.stmt], scope: Scope, around: tuple[ast.stmt, ...]) -> None:
        for node in body:
            found.append(Statement(file, node.lineno, node, scope, around))
            inner = node if isinstance(node, FUNCTIONS) else scope
            holders = [node, *getattr(node, "handlers", []), *getattr(node, "cases", [])]
            for block in (getattr(holder, name, []) for holder in holders for name in _BLOCKS):
                visit(block, inner, (*around, node))

    tree = tree_of(file)
    if tree is not None:
        visit(tree.body, tree, ())
    return tuple(found)


def statement_at(file: str, line: int) -> Statement | None:
    """The innermost statement that contains this line."""
    found = [s for s in statements(file) if s.line <= line <= s.end]
    return max(found, key=lambda s: s.line, default=None)


def statements_in(file: str, scope: ast.AST) -> list[Statement]:
    """The statements of a function or module, except those of functions inside it."""
    return [s for s in statements(file) if s.scope is scope]


def line_text(place: Place) -> str:
    """The text of a line, without surrounding white space."""
    try:
        with open(place[0], encoding="utf-8") as source:
            lines = source.read().splitlines()
        return lines[place[1] - 1].strip() if 0 < place[1] <= len(lines) else ""
    except OSError:
        return ""


def holds(node: ast.AST, line: int) -> bool:
    """Does a node span a line?"""
    return bool(node.lineno <= line <= (node.end_lineno or 0))  # type: ignore[attr-defined]


@cache
def functions(file: str) -> tuple[Function, ...]:
    return tuple(n for n in nodes_of(file) if isinstance(n, FUNCTIONS))


def scope_at(file: str, line: int) -> Scope:
    """The innermost function that contains a line, or the module."""
    tree = tree_of(file)
    assert tree is not None
    return max((n for n in functions(file) if holds(n, line)), key=lambda n: n.lineno, default=tree)


def called(call: ast.Call) -> str:
    """The last part of the called name: `f` in `a.b.f(x)`."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def calls_in(nodes: Iterable[ast.AST], *names: str) -> Iterator[ast.Call]:
    """The nodes that call a function or method with one of these names; without names, all calls."""
    return (n for n in nodes if isinstance(n, ast.Call) and (not names or called(n) in names))


def calls_of(file: str, *names: str) -> Iterator[ast.Call]:
    """The calls in a file of a function or method with one of these names; without names, all calls."""
    return calls_in(nodes_of(file), *names)


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The keyword argument of this name in a call; None if there is none."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def targets(node: ast.AST) -> list[ast.expr]:
    """The targets of an assignment with `=` or `+=`."""
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []


def assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of each assignment in a statement; the value of `a *= b` is `a * b`."""
    if isinstance(node, ast.AugAssign):
        return [(node.target, ast.copy_location(ast.BinOp(node.target, node.op, node.value), node))]
    if isinstance(node, ast.AnnAssign):
        return [] if node.value is None else [(node.target, node.value)]
    found: list[tuple[ast.expr, ast.expr]] = []
    for target in targets(node):
        value: ast.expr = node.value  # type: ignore[attr-defined]
        pairs = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        found += zip(target.elts, value.elts) if pairs else [(target, value)]  # type: ignore[attr-defined]
    return found


def names_in(node: ast.AST) -> set[str]:
    """The plain names in a node."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def attributes_in(node: ast.AST) -> set[str]:
    """The names of the attributes in a node."""
    return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
