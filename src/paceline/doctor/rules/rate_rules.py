"""A learning rate that grows with the number of processes where the global batch does not.

The text alone makes a note at most (lr_scaling_rules.py). Here the numbers of the run must agree with it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter

from paceline.doctor.findings import Finding
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at
from paceline.doctor.rules.schedule_rules import micro_batches
from paceline.observe.expressions import BATCH, WORLD, Piece, call_at, divided_by, pieces
from paceline.observe.source import assigned, called, holds, nodes_of

_ROOT = re.compile(r"sqrt|\*\* *\(?0?\.5|pow")
_PARTS = re.compile(r"accum|micro", re.IGNORECASE)
_DISTRIBUTED = re.compile(r"world|dist|ddp|parallel|rank|gpu|process", re.IGNORECASE)


def findings(run: RecordedRun) -> list[Finding]:
    """lr_scaled_alone: the rate is multiplied by the number of processes, and each takes that part of the batch, or of
    the micro-batches, so that the global batch stays. DDP averages, and the losses are means: the gradient stays too.

    Not where the rate is a product with a batch (the linear rule), or with a root; nor where the numbers of the run say
    that the source's line was not run.
    """
    optimizer = next((e for e in run.events(0, "optimizer") if e["at"] and e["lr"]), None)
    loader = next((e for e in run.events(0, "loader") if e["loader"] in run.training_loaders and e["batch"]), None)
    backwards = list(run.events(0, "backward"))
    k = Counter(len(calls) for calls, _ in micro_batches(run)).most_common(1)
    micro = k[0][0] if k else 1
    if optimizer is None or loader is None or not any(run.events(0, "ddp", "fsdp")):
        return []
    if not backwards or not all(_is_mean(e, micro, run.world_size * loader["batch"]) for e in backwards):
        return []
    files = sorted({e["at"][0] for e in run.events(0, "optimizer", "loader", "backward", "pass", "ddp") if e["at"]})
    rate = _argument(files, optimizer["at"], ("lr", 1))
    scaled = [p for p in rate if _factors(p, WORLD)]
    if len(scaled) != 1 or any(divided_by(p, WORLD) or _ROOT.search(p.text) for p in rate):
        return []
    linear = any(_factors(p, BATCH) for p in rate)
    if linear or not _was_run(scaled[0], rate, optimizer["lr"][0], run.world_size):
        return []
    # A library may have made the loader anew, at another line.
    made = [e["at"] for e in run.events(0, "loader") if (e["size"], e["batch"]) == (loader["size"], loader["batch"])]
    parts = next(filter(None, (_argument(files, at, ("batch_size", 1)) for at in made if at)), [])
    divided = next((p for p in parts if divided_by(p, WORLD)), None)
    each, what = loader["batch"], "examples"
    if divided is None:
        parts = _micro_batch_numbers(files)
        divided = next((p for p in parts if divided_by(p, WORLD)), None)
        each, what = micro, "micro-batches"
    if divided is None or not _was_run(divided, parts, each, 1 / run.world_size):
        return []
    evidence = (
        f"each of {run.world_size} processes takes {each:g} {what} a step, {each * run.world_size:g} together for any "
        f"number of processes (`{ast.unparse(divided.node)}`), and the rate is multiplied by {run.world_size} "
        f"(`{ast.unparse(scaled[0].node)}`): {optimizer['lr'][0]:g}"
    )
    return [finding_at("lr_scaled_alone", scaled[0].line, evidence, divided.line)]


def _is_mean(backward: Event, micro: int, of_all: int) -> bool:
    """Is a loss a mean over this process's examples, perhaps divided by the number of micro-batches? A sum that is
    divided by the global batch (of_all) is none: DDP's mean makes it smaller with more processes, and the rate may make
    up."""
    if backward["mean"] == "mean":
        return True
    if micro == 1 or (backward.get("count") or [0])[0] == of_all:
        return False
    terms = [*([backward["count"]] if backward.get("count") else []), *(backward.get("means") or ())]
    return backward["mean"] == "divided" and bool(terms) and all(_near(factor * micro, 1.0) for _, factor in terms)


def _argument(files: list[str], line: list[object], named: tuple[str, int]) -> list[Piece]:
    """The argument of this name, or place, of the call at a line, and what it is made of."""
    call = call_at(line)
    name, place = named
    calls = [n for n in ast.walk(call) if isinstance(n, ast.Call)] if call else []
    for n in calls:
        given = next((k.value for k in n.keywords if k.arg == name), None)
        if given is None and len(n.args) > place and called(n)[:1].isupper():
            given = n.args[place]
        if given is not None:
            return pieces(files, str(line[0]), [given])
    return []


def _micro_batch_numbers(files: list[str]) -> list[Piece]:
    """What is assigned to names of accumulation."""
    made = [(file, *pair) for file in files for n in nodes_of(file) for pair in assigned(n)]
    return [p for file, to, value in made if _PARTS.search(ast.unparse(to)) for p in pieces(files, file, [value])]


def _factors(piece: Piece, pattern: re.Pattern[str]) -> bool:
    """Does it multiply by something of this pattern?"""
    return any(pattern.search(side) for pair in piece.operands(ast.Mult) for side in pair)


def _was_run(line: Piece, made_of: list[Piece], value: float, factor: float) -> bool:
    """Was the line with the factor run? By the numbers in the source where they tell, or else by where it stands."""
    constants = [(p, n) for p in made_of for n in ast.walk(p.node) if isinstance(n, ast.Constant)]
    numbers = [n.value for p, n in constants if type(n.value) is float or (type(n.value) is int and n is p.node)]
    if any(_near(number * factor, value) for number in numbers):
        return True
    conditions = [n for n in nodes_of(line.file) if isinstance(n, (ast.If, ast.IfExp)) and holds(n, line.node.lineno)]
    told = any(_near(number, value) for number in numbers)
    return not told and all(_DISTRIBUTED.search(ast.unparse(n.test)) for n in conditions)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * abs(b)
