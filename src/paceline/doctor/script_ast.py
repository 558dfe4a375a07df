"""The script's source as syntax trees, for rules that need what no event tells."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

_MAX_DEPTH = 3  # how far assignments to the names in an expression are followed
_NEAR = 8  # lines within which what is reduced is divided

WORLD = re.compile(
    r"world_?size|get_world_size|num_replicas|n_?gpus?\b|num_gpus|num_processes|WORLD_SIZE|ngpus|nproc", re.IGNORECASE
)
RATE = re.compile(r"\blr\b|learning_?rate|_lr\b|\blr_|base_lr|\['lr'\]", re.IGNORECASE)
BATCH = re.compile(r"batch", re.IGNORECASE)
_IS_WORLD = re.compile(r"get_world_size\(|WORLD_SIZE")
_READS = ("get_world_size", "int", "get", "getenv", "max")  # calls that give that number
_MICRO_BATCHES = re.compile(r"accum|micro|chunk", re.IGNORECASE)

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


@cache
def tree_of(file: str) -> ast.Module | None:
    """The tree of a file; None where it cannot be read or parsed."""
    try:
        with open(file, encoding="utf-8") as text:
            return ast.parse(text.read())
    except (OSError, SyntaxError, ValueError):
        return None


def nodes_of(file: str) -> Iterator[ast.AST]:
    """All nodes of a file's tree."""
    tree = tree_of(file)
    return iter(()) if tree is None else ast.walk(tree)


def holds(node: ast.AST, line: int) -> bool:
    """Does a node span a line?"""
    return bool(node.lineno <= line <= (node.end_lineno or 0))  # type: ignore[attr-defined]


def functions(file: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in nodes_of(file) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))


def scope_at(file: str, line: int) -> Scope:
    """The innermost function that holds a line, or the module."""
    tree = tree_of(file)
    assert tree is not None
    return max((n for n in functions(file) if holds(n, line)), key=lambda n: n.lineno, default=tree)


def called(call: ast.Call) -> str:
    """The last part of the name that is called: `f` of `a.b.f(x)`."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


@cache
def accumulates(file: str, line: int) -> bool:
    """Does a line stand in a loop over micro-batches, by the words in the loop's head?"""
    loops = [n for n in nodes_of(file) if isinstance(n, ast.For) and holds(n, line)]
    innermost = max(loops, key=lambda n: n.lineno, default=None)
    return innermost is not None and bool(
        _MICRO_BATCHES.search(f"{ast.unparse(innermost.target)} {ast.unparse(innermost.iter)}")
    )


def world_pattern(file: str) -> re.Pattern[str]:
    """A pattern of what stands for the number of processes: the usual names, and those assigned from them."""
    names = set()
    for node in nodes_of(file):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            names |= {
                one.id
                for one, value in pairs
                if isinstance(one, ast.Name) and not isinstance(value, (ast.Tuple, ast.IfExp))
                if not any(isinstance(part, ast.BinOp) for part in ast.walk(value))
                if not isinstance(value, ast.Call) or called(value) in _READS
                if _IS_WORLD.search(ast.unparse(value)) and not RATE.search(one.id) and not BATCH.search(one.id)
            }
    more = "".join(rf"|\b{re.escape(name)}\b" for name in sorted(names))
    return re.compile(WORLD.pattern + more, re.IGNORECASE)


def call_line(kind: str, *lines: list[Any]) -> list[Any] | None:
    """[file, line] of the first call of this class or function, in the files of `lines`."""
    call = next(_calls(kind, lines), None)
    return None if call is None else [call[0], call[1].lineno]


def call_arguments(kind: str, *lines: list[Any]) -> str:
    """The text of that call's arguments and of assignments to names in it; `world_size` for any such name."""
    call = next(_calls(kind, lines), None)
    if call is None:
        return ""
    file, node = call
    text = ", ".join(ast.unparse(a) for a in (*node.args[1:], *(k.value for k in node.keywords)))
    for _ in range(_MAX_DEPTH):
        names = set(re.findall(r"[A-Za-z_]\w*", text))
        assigned = (n for n in nodes_of(file) if isinstance(n, ast.Assign))
        more = [ast.unparse(n.value) for n in assigned for t in n.targets if isinstance(t, ast.Name) and t.id in names]
        text += "; " + "; ".join(m for m in more if "(" not in m or "len(" in m)
    return world_pattern(file).sub("world_size", text)


def _calls(kind: str, lines: Sequence[list[Any]]) -> Iterator[tuple[str, ast.Call]]:
    for file in sorted({line[0] for line in lines}):
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and called(node) == kind:
                yield file, node


def divided_by_world(file: str, line: int) -> bool:
    """Is what is sent at a line divided by the number of processes within a few lines of the same function?"""
    if tree_of(file) is None:
        return False
    scope = scope_at(file, line)
    calls = (n for n in ast.walk(scope) if isinstance(n, ast.Call) and holds(n, line))
    sent = {n.args[0].id for n in calls if n.args and isinstance(n.args[0], ast.Name)}
    world = world_pattern(file)
    for n in ast.walk(scope):
        part: ast.expr | None = None
        divisor: ast.expr | None = None
        if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Div):
            part, divisor = n.target, n.value
        elif isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div):
            part, divisor = n.left, n.right
        if part is None or divisor is None or not line <= n.lineno <= line + _NEAR:  # type: ignore[attr-defined]
            continue
        names = {inner.id for inner in ast.walk(part) if isinstance(inner, ast.Name)}
        if names & sent and world.search(ast.unparse(divisor)):
            return True
    return False
