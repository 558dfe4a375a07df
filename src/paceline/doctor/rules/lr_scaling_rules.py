"""How the learning rate is scaled with the number of processes. Read from the source alone, so a note and never a
fault."""

from __future__ import annotations

import ast
import re

from paceline.doctor.findings import Finding
from paceline.doctor.rules.recorded_run import RecordedRun, finding_at
from paceline.observe.expressions import BATCH, RATE, world_pattern
from paceline.observe.source import nodes_of


def findings(run: RecordedRun) -> list[Finding]:
    """lr_scaled_twice, lr_not_scaled."""
    if not run.reduces_gradients:
        return []
    files = {e["at"][0] for e in run.events(0, "optimizer", "ddp", "loader", "backward", "sched") if e["at"]}
    scaled: list[tuple[str, int, str]] = []
    divided = False
    for file in sorted(files):
        world = world_pattern(file)
        for node in nodes_of(file):
            scaled += [(file, line, text) for line, text in _scalings(node, world)]
            divided = divided or _divides(node, world)
    optimizer = next(run.events(0, "optimizer"), None)
    if len(scaled) > 1:
        lines = "; ".join(f"line {line}: {text}" for _, line, text in scaled[:3])
        return [finding_at("lr_scaled_twice", [scaled[1][0], scaled[1][1]], lines)]
    batch = next(
        (e["batch"] for e in run.events(0, "loader") if e["loader"] in run.training_loaders and e["batch"]), None
    )
    if not scaled and not divided and optimizer is not None and batch:
        rate = optimizer["lr"][0]
        evidence = (
            f"{run.world_size} processes take {run.world_size * batch} examples a step, {batch} each; lr stays {rate}"
        )
        return [finding_at("lr_not_scaled", optimizer["at"], evidence)]
    return []


def divides_rate(run: RecordedRun) -> bool:
    """Does the script divide its learning rate by the number of processes?"""
    for file in sorted({e["at"][0] for e in run.events(0, "optimizer") if e["at"]}):
        world = world_pattern(file)
        for n in nodes_of(file):
            named = [(ast.unparse(t), n.value) for t in n.targets] if isinstance(n, ast.Assign) else []
            named += [(n.arg, n.value)] if isinstance(n, ast.keyword) and n.arg else []
            for name, value in named:
                division = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)
                if division and RATE.search(name) and world.search(ast.unparse(value)):
                    return True
    return False


def _scalings(node: ast.AST, world: re.Pattern[str]) -> list[tuple[int, str]]:
    """(line, text) of the multiplications of a learning rate by the number of processes, one for each factor."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        target, factor = ast.unparse(node.target), ast.unparse(node.value)
        hits = len(world.findall(factor)) if RATE.search(target) else 0
        return [(node.lineno, ast.unparse(node))] * hits
    named: list[tuple[str, ast.expr]] = []
    if isinstance(node, ast.Assign):
        named = [(ast.unparse(target), node.value) for target in node.targets]
    elif isinstance(node, ast.keyword) and node.arg:
        named = [(node.arg, node.value)]
    found = []
    for name, value in named:
        if RATE.search(name) and not isinstance(value, (ast.Call, ast.Dict, ast.List)):
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
        return bool(BATCH.search(ast.unparse(node.left)) and world.search(ast.unparse(node.right)))
    return False
