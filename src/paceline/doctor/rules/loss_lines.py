"""The line of the script where a term of a loss is computed, found in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from paceline.doctor.rules import script_lines
from paceline.observe.expressions import world_pattern
from paceline.observe.source import Scope, called, holds, nodes_of, scope_at, tree_of

_COUNTS = ("one_hot", "bincount", "histc", "argmax", "topk", "scatter_add", "scatter_add_", "max")
_TOTALS = ("sum", "mean", "dot", "einsum", "vdot", "inner")
_MAX_DEPTH = 6  # assignments that are followed
_ROUTING = ("output_router_logits", "router_aux_loss_coef")  # settings by which transformers adds the loss itself

Line = list[Any] | None


def term_line(backward: dict[str, Any], place: int) -> Line:
    """The line of a loss's term. backward: the event; place: the term's, in the order in which they are added."""
    at = backward["at"]
    at = (script_lines.loss_return(at) if backward.get("library") else at) or at
    if not at or tree_of(at[0]) is None:
        return None
    scope = scope_at(*at)
    loss = _loss(scope, at[1])
    terms = list(_operands(scope, loss, at[1], _MAX_DEPTH)) if loss is not None else []
    return [at[0], _made(scope, terms[place])] if place < len(terms) and len(terms) > 1 else None


def fractions_line(backward: dict[str, Any]) -> Line:
    """The line that multiplies fractions of tokens by means of probabilities; of a loss that transformers computes, the
    setting that asks for it."""
    at = backward["at"]
    if not at:
        return None
    for n in nodes_of(at[0]):
        if isinstance(n, ast.Call) and called(n) in _TOTALS and _multiplies(n):
            counting = (c for c in ast.walk(scope_at(at[0], n.lineno)) if isinstance(c, ast.Call))
            if any(called(c) in _COUNTS for c in counting):
                return [at[0], n.lineno]
    for n in nodes_of(at[0]):
        targets = n.targets if isinstance(n, ast.Assign) else []
        if isinstance(n, ast.keyword) and n.arg in _ROUTING:
            return [at[0], n.value.lineno]
        if any(getattr(target, "attr", "") in _ROUTING for target in targets):
            return [at[0], n.lineno]  # type: ignore[attr-defined]
    return None


def divides_by_processes(backward: dict[str, Any]) -> bool:
    """Does the script compute a part of 1 by the number of processes, or divide a coefficient by it?"""
    at = backward["at"]
    if not at or tree_of(at[0]) is None:
        return False
    world = world_pattern(at[0])
    divisors = (n.right for n in nodes_of(at[0]) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div))
    return any(world.search(ast.unparse(divisor)) for divisor in divisors)


def _multiplies(call: ast.Call) -> bool:
    """Does a call total a product? `(a * b).sum()`, `torch.sum(a * b)`, `torch.dot(a, b)`."""
    of = call.func.value if isinstance(call.func, ast.Attribute) else None
    parts = [*call.args, *([of] if of is not None else [])]
    if called(call) in ("dot", "einsum", "vdot", "inner"):
        return len(parts) > 1
    return any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult) for part in parts)


def _loss(scope: Scope, line: int) -> ast.expr | None:
    """What a line calls backward of, gives to backward, or returns."""
    for n in ast.walk(scope):
        if isinstance(n, ast.Call) and holds(n, line) and called(n) in ("backward", "manual_backward"):
            loss: ast.expr | None = n.args[0] if n.args else getattr(n.func, "value", None)
            while isinstance(loss, ast.Call) and loss.args:  # scaler.scale(loss)
                loss = loss.args[0]
            return loss
        if isinstance(n, ast.Return) and n.lineno == line:
            return n.value.elts[0] if isinstance(n.value, ast.Tuple) else n.value
    return None


def _assigned(scope: Scope, name: str, line: int) -> ast.Assign | ast.AugAssign | None:
    """The last assignment to a name before a line."""
    found = [
        n
        for n in ast.walk(scope)
        if isinstance(n, (ast.Assign, ast.AugAssign)) and n.lineno < line
        for target in (n.targets if isinstance(n, ast.Assign) else [n.target])
        if name in {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    ]
    return max(found, key=lambda n: n.lineno, default=None)


def _terms(scope: Scope, name: str, line: int, depth: int) -> Iterator[ast.expr]:
    """The terms of a loss that a script adds up under a name, in the order of its autograd graph."""
    made = _assigned(scope, name, line) if depth else None
    if made is None:
        return
    if isinstance(made, ast.AugAssign):
        yield from _terms(scope, name, made.lineno, depth - 1)
        if isinstance(made.op, (ast.Add, ast.Sub)):
            yield made.value
        return
    yield from _operands(scope, made.value, made.lineno, depth)


def _operands(scope: Scope, value: ast.expr, line: int, depth: int) -> Iterator[ast.expr]:
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
        yield from _operands(scope, value.left, line, depth)
        yield from _operands(scope, value.right, line, depth)
        return
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Mult, ast.Div)):
        for side in (value.left, value.right):  # a sum, times a number
            inner = list(_operands(scope, side, line, depth)) if isinstance(side, (ast.BinOp, ast.Name)) else []
            if len(inner) > 1:
                yield from inner
                return
    if isinstance(value, ast.Name):
        inner = list(_terms(scope, value.id, line, depth - 1))
        if len(inner) > 1:
            yield from inner
            return
    yield value


def _made(scope: Scope, term: ast.expr) -> int:
    """The line that computes a term: where its variable is assigned, or its own."""
    if any(isinstance(n, ast.Call) for n in ast.walk(term)):
        return term.lineno
    names = [n.id for n in ast.walk(term) if isinstance(n, ast.Name)]
    lines = [made.lineno for name in names if (made := _assigned(scope, name, term.lineno)) is not None]
    return max(lines, default=term.lineno)
