"""Trace the numbers in an expression of the script to their sources, through the assignments to its names.

A rule can then ask whether the expression depends on the number of processes, which has many names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.observe.source import (
    assigned,
    called,
    calls_in,
    calls_of,
    functions,
    holds,
    keyword,
    names_in,
    nodes_of,
    scope_at,
    statement_at,
    tree_of,
)

WORLD = re.compile(
    r"world_?size|get_world_size|num_replicas|n_?gpus?\b|num_gpus|num_processes|WORLD_SIZE|ngpus|nproc", re.IGNORECASE
)
RATE = re.compile(r"\blr\b|learning_?rate|_lr\b|\blr_|base_lr|\['lr'\]", re.IGNORECASE)
BATCH = re.compile(r"batch", re.IGNORECASE)
_IS_WORLD = re.compile(r"get_world_size\(|WORLD_SIZE")
_READS = ("get_world_size", "int", "get", "getenv", "max")  # calls that return the number of processes
_MICRO_BATCHES = re.compile(r"accum|micro|chunk", re.IGNORECASE)
_NEAR = 8  # search for the division of a reduced value within this many lines
_MAX_DEPTH, _MAX_PIECES = 5, 40
_MAX_TEXT_DEPTH = 3  # call_arguments follows this many levels of assignments
# Functions that compute a number from their arguments.
_ARITHMETIC = ("len", "int", "float", "max", "min", "round", "ceil", "floor", "abs", "sum")


@dataclass(frozen=True)
class Piece:
    """An expression in the script."""

    file: str
    node: ast.expr

    @property
    def line(self) -> list[Any]:
        return [self.file, self.node.lineno]

    @property
    def text(self) -> str:
        """The text of the expression, with `world_size` in place of any name for the number of processes."""
        return world_pattern(self.file).sub("world_size", ast.unparse(self.node))

    def operands(self, *operators: type[ast.operator]) -> Iterator[tuple[str, str]]:
        """(left operand, right operand) of each operation of these kinds in the expression, as text."""
        world = world_pattern(self.file)
        for n in ast.walk(self.node):
            if isinstance(n, ast.BinOp) and isinstance(n.op, operators):
                yield world.sub("world_size", ast.unparse(n.left)), world.sub("world_size", ast.unparse(n.right))


@cache
def world_pattern(file: str) -> re.Pattern[str]:
    """A pattern for the number of processes: its usual names, and names that the file assigns from it."""
    names = {
        target.id
        for node in nodes_of(file)
        if isinstance(node, ast.Assign)
        for target, value in assigned(node)
        if isinstance(target, ast.Name) and not isinstance(value, (ast.Tuple, ast.IfExp))
        if not any(isinstance(part, ast.BinOp) for part in ast.walk(value))
        if not isinstance(value, ast.Call) or called(value) in _READS
        if _IS_WORLD.search(ast.unparse(value)) and not RATE.search(target.id) and not BATCH.search(target.id)
    }
    more = "".join(rf"|\b{re.escape(name)}\b" for name in sorted(names))
    return re.compile(WORLD.pattern + more, re.IGNORECASE)


@cache
def accumulates(file: str, line: int) -> bool:
    """Is a line in a loop over micro-batches? The words in the head of the innermost `for` loop decide."""
    loops = [n for n in nodes_of(file) if isinstance(n, ast.For) and holds(n, line)]
    innermost = max(loops, key=lambda n: n.lineno, default=None)
    return innermost is not None and bool(
        _MICRO_BATCHES.search(f"{ast.unparse(innermost.target)} {ast.unparse(innermost.iter)}")
    )


def divisions(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr, int]]:
    """(dividend, divisor, line) of each division by `/` and `/=` among these nodes."""
    yield from _operations(nodes, ast.Div)


def products(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr, int]]:
    """(factor, factor, line) of each product by `*` and `*=` among these nodes."""
    yield from _operations(nodes, ast.Mult)


def _operations(nodes: Iterable[ast.AST], kind: type[ast.operator]) -> Iterator[tuple[ast.expr, ast.expr, int]]:
    """(left, right, line) of each operation of this kind."""
    for n in nodes:
        if isinstance(n, ast.AugAssign) and isinstance(n.op, kind):
            yield n.target, n.value, n.lineno
        elif isinstance(n, ast.BinOp) and isinstance(n.op, kind):
            yield n.left, n.right, n.lineno


def divided_by_world(file: str, line: int) -> bool:
    """Is the value that a call at this line sends divided by the number of processes within the next few lines?"""
    if tree_of(file) is None:
        return False
    nodes, world = list(ast.walk(scope_at(file, line))), world_pattern(file)
    given = (n.args[0] for n in calls_in(nodes) if holds(n, line) and n.args)
    sent = {one.id for one in given if isinstance(one, ast.Name)}
    near = [(part, by) for part, by, at in divisions(nodes) if line <= at <= line + _NEAR]
    return any(names_in(part) & sent and world.search(ast.unparse(by)) for part, by in near)


def call_line(kind: str, *lines: list[Any]) -> list[Any] | None:
    """[file, line] of the first call of this class or function, in the files of `lines`."""
    return next(([file, call.lineno] for file, call in _calls(kind, lines)), None)


def call_arguments(kind: str, *lines: list[Any]) -> str:
    """The text of the arguments of the first call of this class or function, except its first positional argument.

    Includes the text of assignments to the names in the arguments. `world_size` replaces any name for the number of
    processes. "" if there is no such call.
    """
    file, node = next(_calls(kind, lines), ("", None))
    if node is None:
        return ""
    text = ", ".join(ast.unparse(a) for a in (*node.args[1:], *(k.value for k in node.keywords)))
    for _ in range(_MAX_TEXT_DEPTH):
        names = set(re.findall(r"[A-Za-z_]\w*", text))
        made = (n for n in nodes_of(file) if isinstance(n, ast.Assign))
        more = [ast.unparse(n.value) for n in made for t in n.targets if isinstance(t, ast.Name) and t.id in names]
        text += "; " + "; ".join(m for m in more if "(" not in m or "len(" in m)
    return world_pattern(file).sub("world_size", text)


def _calls(kind: str, lines: Sequence[list[Any]]) -> Iterator[tuple[str, ast.Call]]:
    return ((file, call) for file in sorted({line[0] for line in lines}) for call in calls_of(file, kind))


def call_at(line: list[Any] | None) -> ast.Call | None:
    """The outermost call in the innermost statement at a line; None if there is none."""
    statement = statement_at(*line) if line else None
    calls = calls_in(ast.walk(statement.node)) if line and statement is not None else ()
    return next((n for n in calls if line and holds(n, line[1])), None)


def pieces(files: Sequence[str], file: str, expressions: Sequence[ast.expr]) -> list[Piece]:
    """These expressions, and the expressions that define the names, attributes, parameters and functions in them.

    files: the script's files, searched for assignments to attributes.
    """
    found: list[Piece] = []
    known: set[tuple[str, int, int]] = set()
    pending = [(Piece(file, e), 0) for e in expressions]
    while pending and len(found) < _MAX_PIECES:
        piece, depth = pending.pop(0)
        key = (piece.file, piece.node.lineno, piece.node.col_offset)
        if key in known:
            continue
        known.add(key)
        found.append(piece)
        if depth < _MAX_DEPTH:
            pending += [(source, depth + 1) for source in _sources(files, piece)]
    return found


def _sources(files: Sequence[str], piece: Piece) -> Iterator[Piece]:
    """The expressions that define the names, attributes, parameters and functions in an expression."""
    inside = {id(part) for n in ast.walk(piece.node) if isinstance(n, ast.Attribute) for part in ast.walk(n.value)}
    for n in ast.walk(piece.node):
        if isinstance(n, ast.Attribute):
            for file in files:
                yield from _set_to(file, nodes_of(file), n.attr, attribute=True)
                yield from (Piece(file, value) for value in _returned(file, n.attr))
                yield from (Piece(file, value) for value in _option_default(file, n.attr))
        elif isinstance(n, ast.Name) and id(n) not in inside:
            scope = scope_at(piece.file, n.lineno)
            yield from _set_to(piece.file, ast.walk(scope), n.id)
            if not isinstance(scope, ast.Module):
                yield from _set_to(piece.file, tree.body if (tree := tree_of(piece.file)) else (), n.id)
                yield from _arguments(files, scope, n.id)
        if isinstance(n, ast.Call) and called(n) not in _ARITHMETIC:
            yield from (Piece(file, value) for file in files for value in _returned(file, called(n)))


def _set_to(file: str, nodes: Iterable[ast.AST], name: str, attribute: bool = False) -> Iterator[Piece]:
    """The expressions, if they may be numbers, that are assigned to a name or to an attribute of any object."""
    for n in nodes:
        for target, value in assigned(n):
            mine = isinstance(target, ast.Attribute) and target.attr == name
            if (mine if attribute else isinstance(target, ast.Name) and target.id == name) and _is_number(file, value):
                yield Piece(file, value)


def _is_number(file: str, value: ast.expr) -> bool:
    """May an expression be a number, rather than a container or an object made by a constructor?"""
    if not isinstance(value, ast.Call):
        return not isinstance(value, (ast.Dict, ast.List, ast.Set, ast.Lambda))
    return called(value) in _ARITHMETIC or any(f.name == called(value) for f in functions(file))


def _returned(file: str, name: str) -> Iterator[ast.expr]:
    """The return values of a function or property of the script."""
    returns = (n for f in functions(file) if f.name == name for n in ast.walk(f) if isinstance(n, ast.Return))
    return (n.value for n in returns if n.value is not None)


def _option_default(file: str, name: str) -> Iterator[ast.expr]:
    """The default of an argparse or click option with this name."""
    for n in calls_of(file, "add_argument", "option"):
        flags = [a.value for a in n.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        default = keyword(n, "default")
        if default is not None and name in [flag.lstrip("-").replace("-", "_") for flag in flags]:
            yield default


def _arguments(files: Sequence[str], scope: Any, name: str) -> Iterator[Piece]:
    """The arguments that calls pass for a parameter of this function. For an `__init__`: calls of its class."""
    names = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
    if name not in names and name not in [a.arg for a in scope.args.kwonlyargs]:
        return
    method = names[:1] in (["self"], ["cls"])
    classes = (c for file in files for c in nodes_of(file) if isinstance(c, ast.ClassDef) and scope in c.body)
    called_as = next((c.name for c in classes if scope.name == "__init__"), scope.name)
    place = names.index(name) - method if name in names else None
    for file, n in ((one, n) for one in files for n in calls_of(one, called_as)):
        placed = n.args[place] if place is not None and place < len(n.args) else None
        given = keyword(n, name) or placed
        if given is not None and not isinstance(given, ast.Starred):
            yield Piece(file, given)


def text_of(found: Sequence[Piece]) -> str:
    return "; ".join(piece.text for piece in found)


def divided_by(piece: Piece, pattern: re.Pattern[str], unless: re.Pattern[str] | None = None) -> bool:
    """Does an expression divide by something that matches `pattern`? unless: a pattern of dividends to ignore."""
    parts = piece.operands(ast.Div, ast.FloorDiv)
    return any(pattern.search(right) and not (unless and unless.search(left)) for left, right in parts)
