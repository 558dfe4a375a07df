"""How the learning rate is scaled with the processes: read in the script's text alone, so a note, never a fault."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.judge.places import called, functions, tree_of
from paceline.doctor.judge.record import Run, place

_DEEP = 3  # assignments that are followed
_NEAR = 8  # lines

WORLD = re.compile(r"world_?size|get_world_size|num_replicas|n_?gpus?\b|num_gpus|WORLD_SIZE|ngpus|nproc", re.IGNORECASE)
_ISWORLD = re.compile(r"get_world_size\(|WORLD_SIZE")
_RATE = re.compile(r"\blr\b|learning_?rate|_lr\b|\blr_|base_lr|\['lr'\]", re.IGNORECASE)
_BATCH = re.compile(r"batch", re.IGNORECASE)


def findings(run: Run) -> list[Finding]:
    if not run.reduces:
        return []
    files = {e["at"][0] for e in run.of(0, "optimizer", "ddp", "loader", "backward", "sched") if e["at"]}
    scaled: list[tuple[str, int, str]] = []
    divided = False
    for file in sorted(files):
        try:
            with open(file, encoding="utf-8") as source:
                tree = ast.parse(source.read())
        except (OSError, SyntaxError, ValueError):
            continue
        world = _world(tree)
        for node in ast.walk(tree):
            scaled += [(file, line, text) for line, text in _scalings(node, world)]
            divided = divided or _divides(node, world)
    optimizer = next(run.of(0, "optimizer"), None)
    if len(scaled) > 1:
        lines = "; ".join(f"line {line}: {text}" for _, line, text in scaled[:3])
        return [Finding("lr_scaled_twice", place([scaled[1][0], scaled[1][1]]), lines)]
    batch = next((e["batch"] for e in run.of(0, "loader") if e["loader"] in run.trainers and e["batch"]), None)
    if not scaled and not divided and optimizer is not None and batch:
        rate = optimizer["lr"][0]
        evidence = f"{run.world} processes take {run.world * batch} examples a step, {batch} each; lr stays {rate}"
        return [Finding("lr_not_scaled", place(optimizer["at"]), evidence)]
    return []


def divides_rate(run: Run) -> bool:
    """Does the script divide its learning rate by the number of processes?"""
    for file in sorted({e["at"][0] for e in run.of(0, "optimizer") if e["at"]}):
        tree = tree_of(file)
        world = _world(tree) if tree is not None else None
        for n in ast.walk(tree) if tree is not None else ():
            named = [(ast.unparse(t), n.value) for t in n.targets] if isinstance(n, ast.Assign) else []
            named += [(n.arg, n.value)] if isinstance(n, ast.keyword) and n.arg else []
            for name, value in named:
                division = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)
                if world and division and _RATE.search(name) and world.search(ast.unparse(value)):
                    return True
    return False


def _world(tree: ast.AST) -> re.Pattern[str]:
    """What stands for the number of processes: the usual names, and those to which one of them is assigned."""
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            names |= {
                one.id
                for one, value in pairs
                if isinstance(one, ast.Name) and not isinstance(value, (ast.BinOp, ast.Tuple, ast.IfExp))
                if _ISWORLD.search(ast.unparse(value)) and not _RATE.search(one.id) and not _BATCH.search(one.id)
            }
    more = "".join(rf"|\b{re.escape(name)}\b" for name in sorted(names))
    return re.compile(WORLD.pattern + more, re.IGNORECASE)


def _scalings(node: ast.AST, world: re.Pattern[str]) -> list[tuple[int, str]]:
    """Multiplications of a learning rate by the number of processes, one for each factor."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        target, factor = ast.unparse(node.target), ast.unparse(node.value)
        hits = len(world.findall(factor)) if _RATE.search(target) else 0
        return [(node.lineno, ast.unparse(node))] * hits
    named: list[tuple[str, ast.expr]] = []
    if isinstance(node, ast.Assign):
        named = [(ast.unparse(target), node.value) for target in node.targets]
    elif isinstance(node, ast.keyword) and node.arg:
        named = [(node.arg, node.value)]
    found = []
    for name, value in named:
        if _RATE.search(name) and not isinstance(value, (ast.Call, ast.Dict, ast.List)):
            for piece in ast.walk(value):
                if isinstance(piece, ast.BinOp) and isinstance(piece.op, ast.Mult):
                    for side in (piece.left, piece.right):
                        plain = not isinstance(side, ast.BinOp)
                        if plain and world.search(ast.unparse(side)):
                            found.append((value.lineno, f"{name} = {ast.unparse(value)}"))
    return found


def _divides(node: ast.AST, world: re.Pattern[str]) -> bool:
    """Is a batch size divided by the number of processes?"""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
        return bool(_BATCH.search(ast.unparse(node.left)) and world.search(ast.unparse(node.right)))
    return False


def made_at(kind: str, *lines: list[Any]) -> list[Any] | None:
    """[file, line] where the script calls this class, in the files of these lines."""
    call = next(_calls(kind, lines), None)
    return None if call is None else [call[0], call[2].lineno]


def written(kind: str, *lines: list[Any]) -> str:
    """The arguments of that call, with what is assigned to the names in them, and to the names in that."""
    call = next(_calls(kind, lines), None)
    if call is None:
        return ""
    _, tree, node = call
    text = ", ".join(ast.unparse(a) for a in (*node.args[1:], *(k.value for k in node.keywords)))
    for _ in range(_DEEP):
        names = set(re.findall(r"[A-Za-z_]\w*", text))
        assigned = (n for n in ast.walk(tree) if isinstance(n, ast.Assign))
        more = [ast.unparse(n.value) for n in assigned for t in n.targets if isinstance(t, ast.Name) and t.id in names]
        text += "; " + "; ".join(m for m in more if "(" not in m or "len(" in m)
    return _world(tree).sub("world_size", text)


def _calls(kind: str, lines: Sequence[list[Any]]) -> Iterator[tuple[str, ast.Module, ast.Call]]:
    for file in sorted({line[0] for line in lines}):
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Call) and called(node) == kind:
                assert tree is not None
                yield file, tree, node


def divided_by_world(file: str, line: int) -> bool:
    """Is what is reduced at a line divided by the number of processes, in the lines after it in the same function?"""
    tree = tree_of(file)
    if tree is None:
        return False
    inside = [n for n in functions(tree) if n.lineno <= line <= (n.end_lineno or 0)]
    scope: ast.AST = max(inside, key=lambda n: n.lineno, default=tree)
    calls = (n for n in ast.walk(scope) if isinstance(n, ast.Call) and n.lineno <= line <= (n.end_lineno or 0))
    sent = {n.args[0].id for n in calls if n.args and isinstance(n.args[0], ast.Name)}
    world = _world(tree)
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
