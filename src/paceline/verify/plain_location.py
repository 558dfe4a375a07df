"""Find the script's line of a difference, from the records of the subject run.

The records have the lines that change weights and gradients, in order, with the collectives between them
(observe/write_tracer.py), and the lines that make the nodes of the loss (observe/graph_lines.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.observe.source import calls_in, names_in, scope_at, targets, tree_of
from paceline.observe.write_tracer import COLLECTIVE, EXCHANGE, GRADIENT, WEIGHT

_REDUCED_LATE = {"not-reduced", "rank-missing"}
_BY_LOSS = {"weights", "mean-of-means", "batch-level"}
_MEANS = ("Mean", "Loss", "KlDiv")
_SCALES = ("Div", "Mul")
_NORMS = ("sum", "norm", "vector_norm", "all_reduce", "get_total_norm", "global_norm")
_MAX_ASSIGNMENTS = 6

Entry = list[Any]
At = tuple[str, int]


@dataclass(frozen=True)
class Location:
    """A line of the script, a second line or None, and a sentence."""

    at: At
    beside: At | None
    sentence: str


def locate(
    cause: str | None, steps: list[dict[str, Any]], made: dict[str, Any], nodes: list[Any], in_parts: bool = False
) -> Location | None:
    """The line of a difference.

    Args:
        cause: the kind of the difference (hypotheses.py).
        steps: the records of the ranks, of the step that differs first.
        made: the lines that make loaders and wrappers.
        nodes: [name, file, line] of the nodes of the loss.
        in_parts: each rank holds a part of the model.
    """
    if not steps:
        return None
    mine = steps[0]
    lines = mine.get("lines", {})
    if cause == "same-examples":
        source = made.get("stream") or made.get("sampler") or made.get("loader")
        return _at(source, made.get("loader"), "The examples come from")
    if cause == "ranks-drift-apart":
        return _weight_write(steps)
    if cause == "update":
        step = tuple(lines.get("step", ()))
        inside = [e for e in mine.get("writes_in_update", ()) if e[0] == WEIGHT]
        at = inside[-1][2][0][:2] if inside else lines.get("step")
        return _at(at, step if step and list(step) != list(at or ()) else None, "The optimizer's update is at")
    if cause == "lr_scaled_twice":
        return _at(made.get("optimizer"), None, "The optimizer is made at")
    if cause == "steps_differ":
        calls = [e for e in mine.get("writes", ()) if e[0] == COLLECTIVE]
        return _at(calls[-1][2][0][:2] if calls else lines.get("step"), lines.get("step"), "The ranks decide at")
    if cause in _REDUCED_LATE:
        if lines.get("past_wrapper"):
            return _at(lines["past_wrapper"], made.get("wrapper"), "The forward that bypasses the wrapper is at")
        if lines.get("no_sync"):
            return _at(lines["no_sync"], lines.get("backward"), "The backward runs under no_sync, at")
    if cause == "backward-lost" and lines.get("cut_gather"):
        return _at(lines["cut_gather"], lines.get("forward"), "The tensors are gathered at")
    between = cause == "backward-lost" or in_parts
    if between and (calls := _calls_in_forward(mine, lines)):
        return _at(calls[0][2][0][:2], calls[0][2][1][:2], "The ranks exchange tensors in the forward at")
    found = _gradient_write(mine, lines, cause in _BY_LOSS)
    if found is not None:
        return found
    return _loss(cause, nodes, lines)


def _at(at: Any, beside: Any, words: str) -> Location | None:
    if not at:
        return None
    second = tuple(beside) if beside and list(beside) != list(at) else None
    return Location((at[0], at[1]), second, f"{words} {at[0]}:{at[1]}.")


def _place(entry: Entry) -> At:
    return (entry[2][0][0], entry[2][0][1])


def _weight_write(steps: list[dict[str, Any]]) -> Location | None:
    """The line that writes weights on some ranks only; else the first line that writes them outside an update."""
    written = [[e for e in step.get("writes", ()) if e[0] == WEIGHT] for step in steps]
    places = [{_place(e) for e in entries} for entries in written]
    some = [e for entries in written for e in entries if not all(_place(e) in found for found in places)]
    for entry in some or [e for entries in written for e in entries]:
        if _place(entry) == tuple(steps[0].get("lines", {}).get("step", ())):
            continue
        stack = entry[2]
        return _at(stack[0][:2], stack[1][:2] if len(stack) > 1 else None, "The weights are written by")
    return None


def _gradient_write(step: dict[str, Any], lines: dict[str, Any], by_loss: bool) -> Location | None:
    """The line that changes the gradients between the last backward and the update, if there is one. by_loss: the loss
    may be the reason, so a line that only reduces the gradients is none."""
    entries: list[Entry] = step.get("writes", [])
    backward = tuple(lines.get("backward", ()))
    last = max((n for n, e in enumerate(entries) if e[0] == GRADIENT and _passes(e, backward)), default=-1)
    after = entries[last + 1 :]
    writes = [n for n, e in enumerate(after) if e[0] == GRADIENT]
    calls = [n for n, e in enumerate(after) if e[0] == COLLECTIVE]
    if not writes:
        return None
    first = writes[0]
    if calls and calls[0] > first:  # changed before the ranks' gradients are combined
        own, other = _in_common(after[first][2], after[calls[0]][2])
        return _at(own, other, "The gradients are changed before they are reduced, at")
    written = {_place(after[n]) for n in writes}
    before = [n for n in calls if n < first and _place(after[n]) not in written]  # others reduce the gradients
    if before and len(written) == 1:
        call = after[before[-1]][2]
        return _at(call[0][:2], _place(after[first]), "The gradients are multiplied by a number that is reduced at")
    reductions = {_place(after[n]) for n in calls} if by_loss else set()
    own_writes = [n for n in writes if _place(after[n]) not in {backward, *reductions}]
    if not own_writes:
        return None
    at = _place(after[own_writes[-1]])
    return _at(at, _norm_line(at), "The gradients are changed after the backward, at")


def _norm_line(at: At) -> At | None:
    """The line that computes the norm, or another sum, that a line scales gradients by."""
    file, line = at
    if tree_of(file) is None:
        return None
    nodes = list(ast.walk(scope_at(file, line)))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and node.lineno == line}
    for _ in range(_MAX_ASSIGNMENTS):
        made = [
            node
            for node in nodes
            if isinstance(node, ast.Assign)
            and node.lineno < line
            and any(n in names for t in targets(node) for n in names_in(t))
        ]
        if not made:
            return None
        last = max(made, key=lambda node: node.lineno)
        if any(calls_in(ast.walk(last.value), *_NORMS)):
            return file, last.lineno
        names, line = set(names_in(last.value)), last.lineno
    return None


def _calls_in_forward(step: dict[str, Any], lines: dict[str, Any]) -> list[Entry]:
    """The collectives before the first backward, called by a function of the script."""
    found: list[Entry] = []
    for entry in step.get("writes", []):
        if _passes(entry, tuple(lines.get("backward", ()))):
            break
        if entry[0] in (COLLECTIVE, EXCHANGE) and len(entry[2]) > 1:
            found.append(entry)
    return found


def _passes(entry: Entry, line: tuple[Any, ...]) -> bool:
    return any(tuple(frame[:2]) == line for frame in entry[2])


def _in_common(one: list[Any], other: list[Any]) -> tuple[Any, Any]:
    """The lines of two stacks in the innermost call that both are in."""
    calls = {frame[2]: frame for frame in other}
    for frame in one:
        if frame[2] in calls:
            return frame[:2], calls[frame[2]][:2]
    return one[0][:2], other[0][:2]


def _loss(cause: str | None, nodes: Iterable[Any], lines: dict[str, Any]) -> Location | None:
    """The line that computes the loss: its mean, or its factor."""
    kinds = (_SCALES, _MEANS) if cause == "factor" else (_MEANS, _SCALES)
    rows = list(nodes)
    for kind in kinds:
        for name, *at in rows:
            if any(word in name for word in kind):
                return _at(at, lines.get("backward"), "The loss is computed at")
    return None
