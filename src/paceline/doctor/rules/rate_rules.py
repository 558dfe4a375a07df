"""Rules about how the learning rate and the global batch grow with the number of processes.

The source alone supports only a note. If the recorded numbers confirm the source, the finding is a fault.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at, first_of
from paceline.doctor.rules.schedule_rules import accumulated
from paceline.observe.expressions import BATCH, RATE, WORLD, Piece, call_at, divided_by, pieces, world_pattern
from paceline.observe.source import assigned, called, calls_in, holds, keyword, nodes_of, targets

_ROOT = re.compile(r"sqrt|\*\* *\(?0?\.5|pow")
_PARTS = re.compile(r"accum|micro", re.IGNORECASE)
_DISTRIBUTED = re.compile(r"world|dist|ddp|parallel|rank|gpu|process", re.IGNORECASE)


def findings(run: RecordedRun) -> list[Finding]:
    """Check for lr_scaled_alone, and for lr_scaled_twice or lr_not_scaled."""
    return [*first_of(run, _scaled_alone), *first_of(run, _by_text)]


def _scaled_alone(run: RecordedRun) -> Iterator[Finding]:
    """lr_scaled_alone: the learning rate is multiplied by the number of processes, but the global batch stays constant.

    The global batch stays constant if the script divides the batch size, or the number of micro-batches, by the number
    of processes. The gradient does not grow either, because DDP averages gradients and each loss is a mean.

    Not reported if the learning rate is also multiplied by a batch size (the linear rule) or by a square root, or if
    the recorded numbers show that the scaling line did not run.
    """
    optimizer = next((e for e in run.events(0, "optimizer") if e["at"] and e["lr"]), None)
    loader = next((e for e in run.events(0, "loader") if e["loader"] in run.training_loaders and e["batch"]), None)
    backwards, micro = list(run.events(0, "backward")), accumulated(run)
    if optimizer is None or loader is None or not backwards or not any(run.events(0, "ddp", "fsdp")):
        return
    if not all(_is_mean(e, micro, run.world_size * loader["batch"]) for e in backwards):
        return
    files = run.files("optimizer", "loader", "backward", "pass", "ddp")
    rate = _argument(files, optimizer["at"], ("lr", 1))
    scaled = [p for p in rate if _factors(p, WORLD)]
    otherwise = any(divided_by(p, WORLD) or _ROOT.search(p.text) or _factors(p, BATCH) for p in rate)
    if len(scaled) != 1 or otherwise or not _was_run(scaled[0], rate, optimizer["lr"][0], run.world_size):
        return
    # A library may have re-created the loader at another line.
    made = [e["at"] for e in run.events(0, "loader", size=loader["size"], batch=loader["batch"])]
    of_batch = next(filter(None, (_argument(files, at, ("batch_size", 1)) for at in made if at)), [])
    for parts, each, what in (
        (of_batch, loader["batch"], "examples"),
        (_micro_batch_numbers(files), micro, "micro-batches"),
    ):
        divided = next((p for p in parts if divided_by(p, WORLD)), None)
        if divided is not None:
            if _was_run(divided, parts, each, 1 / run.world_size):
                evidence = (
                    f"each of {run.world_size} processes takes {each:g} {what} per step, in total "
                    f"{each * run.world_size:g} for any number of processes (`{ast.unparse(divided.node)}`), but "
                    f"the learning rate is multiplied by {run.world_size} (`{ast.unparse(scaled[0].node)}`) and is "
                    f"{optimizer['lr'][0]:g}"
                )
                yield finding_at("lr_scaled_alone", scaled[0].line, evidence, divided.line)
            return


def _is_mean(backward: Event, micro: int, of_all: int) -> bool:
    """Is the loss a mean over this process's examples, perhaps divided by the number of micro-batches?

    A sum divided by the size of the global batch (`of_all`) is not such a mean: DDP's averaging makes its gradient
    smaller with more processes, and the learning rate may compensate for that.
    """
    if backward["mean"] == "mean":
        return True
    if micro == 1 or (backward.get("count") or [0])[0] == of_all:
        return False
    terms = [*([backward["count"]] if backward.get("count") else []), *(backward.get("means") or ())]
    return backward["mean"] == "divided" and bool(terms) and all(_near(factor * micro, 1.0) for _, factor in terms)


def _argument(files: list[str], line: list[object], named: tuple[str, int]) -> list[Piece]:
    """Return an argument of the call at `line` as pieces of source. named: the argument's name and position."""
    call = call_at(line)
    name, place = named
    for n in calls_in(ast.walk(call)) if call else ():
        given = keyword(n, name)
        if given is None and len(n.args) > place and called(n)[:1].isupper():
            given = n.args[place]
        if given is not None:
            return pieces(files, str(line[0]), [given])
    return []


def _micro_batch_numbers(files: list[str]) -> list[Piece]:
    """Return the values that are assigned to names that contain "accum" or "micro"."""
    made = [(file, *pair) for file in files for n in nodes_of(file) for pair in assigned(n)]
    return [p for file, to, value in made if _PARTS.search(ast.unparse(to)) for p in pieces(files, file, [value])]


def _factors(piece: Piece, pattern: re.Pattern[str]) -> bool:
    """Does the piece multiply by something that matches the pattern?"""
    return any(pattern.search(side) for pair in piece.operands(ast.Mult) for side in pair)


def _was_run(line: Piece, made_of: list[Piece], value: float, factor: float) -> bool:
    """Did the line that multiplies by `factor` run? A number in the source may confirm or refute it. Otherwise the
    conditions around the line decide."""
    constants = [(p, n) for p in made_of for n in ast.walk(p.node) if isinstance(n, ast.Constant)]
    numbers = [n.value for p, n in constants if type(n.value) is float or (type(n.value) is int and n is p.node)]
    if any(_near(number * factor, value) for number in numbers):
        return True
    conditions = [n for n in nodes_of(line.file) if isinstance(n, (ast.If, ast.IfExp)) and holds(n, line.node.lineno)]
    refuted = any(_near(number, value) for number in numbers)
    return not refuted and all(_DISTRIBUTED.search(ast.unparse(n.test)) for n in conditions)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * abs(b)


# --- rules that read only the source


def _by_text(run: RecordedRun) -> Iterator[Finding]:
    """lr_scaled_twice or lr_not_scaled, from the source."""
    files = run.files("optimizer", "ddp", "loader", "backward", "sched") if run.reduces_gradients else []
    nodes = [(file, node) for file in files for node in nodes_of(file)]
    scaled = [(file, *found) for file, node in nodes for found in _scalings(node, world_pattern(file))]
    divided = any(_divides(node, world_pattern(file)) for file, node in nodes)
    if len(scaled) > 1:
        lines = "; ".join(f"line {line}: {text}" for _, line, text in scaled[:3])
        yield finding_at("lr_scaled_twice", [*scaled[1][:2]], lines)
    loaders = (e for e in run.events(0, "loader") if e["loader"] in run.training_loaders and e["batch"])
    batch, optimizer = next((e["batch"] for e in loaders), None), next(run.events(0, "optimizer"), None)
    if run.reduces_gradients and not scaled and not divided and optimizer is not None and batch:
        evidence = (
            f"{run.world_size} processes take {batch} examples each, {run.world_size * batch} per step, and lr is "
            f"{optimizer['lr'][0]} for any number of processes"
        )
        yield finding_at("lr_not_scaled", optimizer["at"], evidence)


def divides_rate(run: RecordedRun) -> bool:
    """Does the script divide its learning rate by the number of processes?"""
    return any(
        isinstance(value, ast.BinOp)
        and isinstance(value.op, ast.Div)
        and RATE.search(name)
        and world_pattern(file).search(ast.unparse(value))
        for file in run.files("optimizer")
        for node in nodes_of(file)
        for name, value in _named(node)
    )


def multiplies_rate(run: RecordedRun) -> bool:
    """Does the script multiply its learning rate by the number of processes?"""
    nodes = [(file, node) for file in run.files("optimizer", "ddp", "loader") for node in nodes_of(file)]
    return any(found for file, node in nodes for found in _scalings(node, world_pattern(file)))


def _named(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """(name, value) of each assignment or keyword argument."""
    if isinstance(node, ast.keyword) and node.arg:
        return [(node.arg, node.value)]
    return [(ast.unparse(target), node.value) for target in targets(node)] if isinstance(node, ast.Assign) else []


def _scalings(node: ast.AST, world: re.Pattern[str]) -> list[tuple[int, str]]:
    """(line, text) of each multiplication of a learning rate by the number of processes, one entry per factor."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        hits = len(world.findall(ast.unparse(node.value))) if RATE.search(ast.unparse(node.target)) else 0
        return [(node.lineno, ast.unparse(node))] * hits
    return [
        (value.lineno, f"{name} = {ast.unparse(value)}")
        for name, value in _named(node)
        if RATE.search(name) and not isinstance(value, (ast.Call, ast.Dict, ast.List))
        for piece in ast.walk(value)
        if isinstance(piece, ast.BinOp) and isinstance(piece.op, ast.Mult)
        for side in (piece.left, piece.right)
        if not isinstance(side, ast.BinOp) and world.search(ast.unparse(side))
    ]


def _divides(node: ast.AST, world: re.Pattern[str]) -> bool:
    """Is a batch size divided by the number of processes?"""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
        return bool(BATCH.search(ast.unparse(node.left)) and world.search(ast.unparse(node.right)))
    return False
