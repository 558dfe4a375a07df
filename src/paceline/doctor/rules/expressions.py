"""Where the numbers in an expression of the script come from: its text, and that of what its names were set to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.doctor.script_ast import called, functions, holds, nodes_of, scope_at, tree_of, world_pattern

_MAX_DEPTH, _MAX_PIECES = 5, 40
# Functions whose result is a number made of their arguments.
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
        """Its text, with `world_size` for what stands for the number of processes."""
        return world_pattern(self.file).sub("world_size", ast.unparse(self.node))

    def operands(self, *operators: type[ast.operator]) -> Iterator[tuple[str, str]]:
        """(left, right) of the operations of these kinds in it."""
        world = world_pattern(self.file)
        for n in ast.walk(self.node):
            if isinstance(n, ast.BinOp) and isinstance(n.op, operators):
                yield world.sub("world_size", ast.unparse(n.left)), world.sub("world_size", ast.unparse(n.right))


def call_at(line: list[Any] | None) -> ast.Call | None:
    """The outermost call in the innermost statement at a line; None where there is none."""
    if not line or tree_of(line[0]) is None:
        return None
    statements = [n for n in ast.walk(scope_at(*line)) if isinstance(n, ast.stmt) and holds(n, line[1])]
    around = max(statements, key=lambda n: n.lineno, default=None)
    calls = (n for n in ast.walk(around) if isinstance(n, ast.Call) and holds(n, line[1])) if around else iter(())
    return next(calls, None)


def pieces(files: Sequence[str], file: str, expressions: Sequence[ast.expr]) -> list[Piece]:
    """The expressions, and those that the names, attributes, parameters and functions in them stand for.

    files: of the script, in which assignments to an attribute are looked for.
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
    """What the names in an expression stand for."""
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
                yield from _set_to(piece.file, iter(tree.body if (tree := tree_of(piece.file)) else ()), n.id)
                yield from _arguments(files, scope, n.id)
        if isinstance(n, ast.Call) and called(n) not in _ARITHMETIC:
            yield from (Piece(file, value) for file in files for value in _returned(file, called(n)))


def _set_to(file: str, nodes: Iterator[ast.AST], name: str, attribute: bool = False) -> Iterator[Piece]:
    """The numbers that are assigned to a name, or to an attribute of any object."""
    for n in nodes:
        for target, value in assigned(n):
            mine = isinstance(target, ast.Attribute) and target.attr == name
            if (mine if attribute else isinstance(target, ast.Name) and target.id == name) and _is_number(file, value):
                yield Piece(file, value)


def assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of what a statement assigns; the value of `a *= b` is `a * b`."""
    if isinstance(node, ast.AugAssign):
        return [(node.target, ast.copy_location(ast.BinOp(node.target, node.op, node.value), node))]
    if isinstance(node, ast.AnnAssign):
        return [] if node.value is None else [(node.target, node.value)]
    found: list[tuple[ast.expr, ast.expr]] = []
    for target in node.targets if isinstance(node, ast.Assign) else ():
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):  # type: ignore[attr-defined]
            found += zip(target.elts, node.value.elts)  # type: ignore[attr-defined]
        else:
            found.append((target, node.value))  # type: ignore[attr-defined]
    return found


def _is_number(file: str, value: ast.expr) -> bool:
    """May an expression be a number, and no object that a constructor makes?"""
    if not isinstance(value, ast.Call):
        return not isinstance(value, (ast.Dict, ast.List, ast.Set, ast.Lambda))
    return called(value) in _ARITHMETIC or any(f.name == called(value) for f in functions(file))


def _returned(file: str, name: str) -> Iterator[ast.expr]:
    """What a function or property of the script returns."""
    for f in functions(file):
        if f.name == name:
            yield from (n.value for n in ast.walk(f) if isinstance(n, ast.Return) and n.value is not None)


def _option_default(file: str, name: str) -> Iterator[ast.expr]:
    """The default of an option of argparse's or click's whose value has this name."""
    for n in nodes_of(file):
        if isinstance(n, ast.Call) and called(n) in ("add_argument", "option"):
            flags = [a.value for a in n.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if name in [flag.lstrip("-").replace("-", "_") for flag in flags]:
                yield from (k.value for k in n.keywords if k.arg == "default")


def _arguments(files: Sequence[str], scope: Any, name: str) -> Iterator[Piece]:
    """What calls of a function, or of the class whose constructor it is, give for its parameter."""
    names = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
    if name not in names and name not in [a.arg for a in scope.args.kwonlyargs]:
        return
    method = names[:1] in (["self"], ["cls"])
    classes = (c for file in files for c in nodes_of(file) if isinstance(c, ast.ClassDef) and scope in c.body)
    called_as = next((c.name for c in classes if scope.name == "__init__"), scope.name)
    place = names.index(name) - method if name in names else None
    for file in files:
        for n in nodes_of(file):
            if isinstance(n, ast.Call) and called(n) == called_as:
                given = next((k.value for k in n.keywords if k.arg == name), None)
                if given is None and place is not None and place < len(n.args):
                    given = n.args[place]
                if given is not None and not isinstance(given, ast.Starred):
                    yield Piece(file, given)


def text_of(found: Sequence[Piece]) -> str:
    return "; ".join(piece.text for piece in found)


def divided_by(piece: Piece, pattern: re.Pattern[str], unless: re.Pattern[str] | None = None) -> bool:
    """Does an expression divide by something of this pattern? unless: what is divided has this pattern."""
    divisions = piece.operands(ast.Div, ast.FloorDiv)
    return any(pattern.search(right) and not (unless and unless.search(left)) for left, right in divisions)
