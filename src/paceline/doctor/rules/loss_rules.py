"""Rules about a loss's terms: each must be a mean over the global batch. Also finds the lines that compute them."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.model_rules import MIN_STEPS, MOSTLY, UNEQUAL, averaged_passes, differ, unequal_divisors
from paceline.doctor.rules.rate_rules import multiplies_rate
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at, first_of
from paceline.doctor.rules.schedule_rules import accumulated
from paceline.doctor.rules.script_lines import Line
from paceline.observe.expressions import RATE, divisions, products, world_pattern
from paceline.observe.source import (
    Scope,
    called,
    calls_in,
    calls_of,
    holds,
    names_in,
    nodes_of,
    scope_at,
    targets,
    tree_of,
)

_COUNTS = ("one_hot", "bincount", "histc", "argmax", "topk", "scatter_add", "scatter_add_", "max")
_PRODUCTS = ("dot", "einsum", "vdot", "inner")
_LOSS = re.compile(r"loss|objective|backward|\bbce\b|\bnll\b", re.IGNORECASE)
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)  # statements without others inside
_MAX_DEPTH = 6  # follow this many assignments
_ROUTING = ("output_router_logits", "router_aux_loss_coef")  # settings that make transformers add the loss itself

Pass = tuple[Event, ...]  # the "backward" events of all ranks for one backward pass


def findings(run: RecordedRun) -> list[Finding]:
    """loss_mean_of_means, term_times_processes, own_fractions, factor: the first of each."""
    alike = [now for now in averaged_passes(run) if len({_form(e) for e in now}) == 1]
    passes = [now for now in alike if now[0].get("terms")]
    lines = {tuple(now[0]["at"]) for now in passes} if len(run.peers) > 1 else ()
    by_line = [[now for now in passes if tuple(now[0]["at"]) == line] for line in sorted(lines)]
    rules = (_unequal, _times_processes, _own_fractions)
    found = [f for some in by_line for rule in rules for f in islice(rule(some), 1)]
    if len(run.peers) > 1 and alike and not found:
        found += first_of(run, _too_large, _too_small)
    found += first_of(run, _gathered_constants)
    return list({f.cause: f for f in reversed(found)}.values())[::-1]


def _form(backward: Event) -> tuple[str, ...]:
    return tuple(term["kind"] for term in backward.get("terms") or ())


def _gathered_constants(run: RecordedRun) -> Iterator[Finding]:
    """gathered_without_gradient: a product in the loss has a factor that was gathered from tensors with gradients, and
    has none itself."""
    passes = list(run.events(0, "backward"))
    cut = [e for e in passes if e.get("cut_at")]
    if run.world_size > 1 and len(cut) >= MIN_STEPS and len(cut) >= MOSTLY * len(passes):
        evidence = (
            f"in {len(cut)} of {len(passes)} backward passes the loss multiplies by a tensor that was gathered from "
            "the ranks. The rank's own tensor had a gradient, and the gathered one has none"
        )
        yield finding_at("gathered_without_gradient", cut[0]["cut_at"], evidence, cut[0]["at"])


def _too_large(run: RecordedRun) -> Iterator[Finding]:
    """factor: the whole loss is a mean of each rank, times the number of processes. DDP averages the gradients, so they
    are too large by this factor. Another factor may have the same value, so the source must show the product."""
    passes = averaged_passes(run)
    size, at, micro = len(run.peers), passes[0][0]["at"], accumulated(run)
    large = [now for now in passes if all(_is_times(e, size, micro) for e in now)]
    line = _product_of_loss(run.files("backward", "forward", "ddp", "optimizer"))
    if len(large) >= MIN_STEPS and len(large) >= MOSTLY * len(passes) and line is not None:
        evidence = (
            f"in {len(large)} of {len(passes)} backward passes the loss was each rank's mean, multiplied by {size}, "
            "the number of processes; the average of the ranks' gradients keeps this factor"
        )
        yield finding_at("factor", line, evidence, at)


def _is_times(backward: Event, size: int, micro: int) -> bool:
    """Is every term of the loss a mean over this rank's rows, multiplied by `size`? micro: the number of micro-batches,
    which may divide the loss."""
    terms = backward.get("terms") or []
    if terms:
        common = [t["outer"] if len(terms) > 1 else t["inner"] for t in terms]
        means = all(t["kind"] in ("mean", "weighed") for t in terms)
        left = 0 if micro == size else 1
        return means and all(_times(factors, size) - _times(factors, 1 / size) == left for factors in common)
    return bool(backward.get("means")) and all(_has([factor * micro], size) for _, factor in backward["means"])


def _times(factors: list[float], number: float) -> int:
    return sum(math.isclose(f, number, rel_tol=1e-6) for f in factors)


def _product_of_loss(files: list[str]) -> Line:
    """The first line that multiplies by the number of processes in a statement about a loss."""
    for file in files:
        world = world_pattern(file)
        about = (n for n in nodes_of(file) if isinstance(n, _SIMPLE) and _LOSS.search(ast.unparse(n)))
        for left, right, line in products(part for n in about for part in ast.walk(n)):
            texts = ast.unparse(left), ast.unparse(right)
            if any(world.search(by) and not RATE.search(what) for what, by in (texts, texts[::-1])):
                return [file, line]
    return None


def _too_small(run: RecordedRun) -> Iterator[Finding]:
    """factor: the whole loss is a rank's sum, divided by a number that the ranks have summed. DDP divides the gradients
    by the number of processes once more."""
    if accumulated(run) > 1 or multiplies_rate(run):
        return
    passes, size = averaged_passes(run), len(run.peers)
    sums = _sums_before_backwards(run.ranks[run.peers[0]])
    small = [now for now, known in zip(passes, sums) if all(_is_over(e, known, size) for e in now)]
    if len(small) >= MIN_STEPS and len(small) >= MOSTLY * len(passes):
        backward = small[0][0]
        evidence = (
            f"in {len(small)} of {len(passes)} backward passes each rank divided its sum by a count of all ranks (at "
            f"first {backward['terms'][0]['count']:g}), and the average of the gradients divided by {size} again"
        )
        line = term_line(backward, 0)
        yield finding_at("factor", line or backward["at"], evidence, backward["at"])


def _is_over(backward: Event, sums: set[float], size: int) -> bool:
    """Is every term a sum divided by one of these numbers, and not multiplied by `size`?"""
    terms = backward.get("terms") or []
    return bool(terms) and all(
        t["kind"] == "sum" and t["count"] in sums and not _has([*t["outer"], *t["inner"]], size) for t in terms
    )


def _sums_before_backwards(events: list[Event]) -> list[set[float]]:
    """For each backward: the results of sums over the ranks since the last step."""
    found: list[set[float]] = []
    since: set[float] = set()
    for e in events:
        if e["k"] == "coll" and e.get("by") == "SUM":
            since |= set(e.get("result") or ())
        elif e["k"] == "backward":
            found.append(set(since))
        elif e["k"] == "step":
            since = set()
    return found


def _unequal(passes: list[Pass]) -> Iterator[Finding]:
    """loss_mean_of_means: a term is divided by a count that differs between ranks."""
    for place in range(max(len(now[0]["terms"]) for now in passes)):
        terms = [(now, [e["terms"][place] for e in now]) for now in passes if place < len(now[0]["terms"])]
        divided = [(now, [[t["count"] or 0, t["factor"]] for t in found]) for now, found in terms]
        if unequal := unequal_divisors(divided):
            counted = sum(all(count > 0 for count, _ in found) for _, found in divided)
            shown = " and ".join(f"{count:g}" for count, _ in unequal[0][1][:2])
            what = f"term {place + 1} of the loss" if len(unequal[0][0][0]["terms"]) > 1 else "its loss"
            evidence = (
                f"in {len(unequal)} of {counted} backward passes the ranks divided {what} by "
                f"different local counts (at first {shown}), and the gradients were averaged as if the counts were "
                "equal"
            )
            at = passes[0][0]["at"]
            yield finding_at("loss_mean_of_means", term_line(passes[0][0], place) or at, evidence, at)


def _times_processes(passes: list[Pass]) -> Iterator[Finding]:
    """term_times_processes: the loss is multiplied by the number of processes. This is right for a term that is a
    rank's sum divided by the number of all ranks' targets, but not for a term that is a mean over the rank's rows."""
    size, backward = len(passes[0]), passes[0][0]
    in_text = _divides_by_processes(backward)
    places = [
        {n for n, term in enumerate(now[0]["terms"]) if _is_scaled_mean(term, size, in_text)}
        for now in passes
        if any(_is_global(now, n, size) for n in range(len(now[0]["terms"])))
    ]
    common = set.intersection(*places) if places else set()
    if len(places) >= MIN_STEPS and len(places) >= MOSTLY * len(passes) and common:
        place = min(common)
        evidence = (
            f"in {len(places)} of {len(passes)} backward passes the loss was multiplied by {size}, the number of "
            "ranks. One term is divided by the number of all ranks' targets and needs that factor; term "
            f"{place + 1} is each rank's mean, so it is {size} times too large"
        )
        weighed = backward["terms"][place]["kind"] == "weighed"
        line = term_line(backward, place) or (fractions_line(backward) if weighed else None)
        yield finding_at("term_times_processes", line or backward["at"], evidence, backward["at"])


def _is_global(now: Pass, place: int, size: int) -> bool:
    """Is a term divided by the number of all ranks' targets, and multiplied by the number of processes?"""
    terms = [e["terms"][place] for e in now]
    if any(t["kind"] != "sum" or not t["count"] or t["own"] is None or not _has(t["outer"], size) for t in terms):
        return False
    equal = not differ([t["count"] for t in terms])
    return equal and sum(t["own"] for t in terms) <= terms[0]["count"] * (1 + UNEQUAL)


def _is_scaled_mean(term: Event, size: int, in_text: bool) -> bool:
    """Is a term a rank's mean, multiplied by the number of processes without a matching division?

    in_text: does the script divide by the number of processes? Only then may a coefficient of 1/2 on two ranks be that
    division.
    """
    taken_back = _has(term["divided"], size) or (in_text and _has(term["inner"], 1 / size))
    return term["kind"] in ("weighed", "mean") and _has(term["outer"], size) and not taken_back


def _has(factors: list[float], wanted: float) -> bool:
    return any(math.isclose(f, wanted, rel_tol=1e-6) for f in factors)


def _own_fractions(passes: list[Pass]) -> Iterator[Finding]:
    """own_fractions: a term weights means over a rank's rows by fractions of the same rank's rows. Fractions of the
    global batch would be the same on all ranks."""
    for place in range(max(len(now[0]["terms"]) for now in passes)):
        long = [now for now in passes if place < len(now[0]["terms"]) and now[0]["terms"][place]["weights"]]
        terms = [[e["terms"][place]["weights"] for e in now] for now in long]
        unlike = [now for now in terms if len({digest for digest, *_ in now}) > 1]
        sums = [total for now in terms for _, total, _ in now]
        if len(unlike) >= MIN_STEPS and len(unlike) >= MOSTLY * len(terms) and not differ(sums):
            backward = passes[0][0]
            evidence = (
                f"in {len(unlike)} of {len(terms)} backward passes a term of the loss multiplied means over a rank's "
                f"rows by {terms[0][0][2]} fractions. The fractions differ between ranks, and sum to {sums[0]:.3g} on "
                "each: the mean of such products is not the product of the global means"
            )
            line = fractions_line(backward) or term_line(backward, place)
            yield finding_at("own_fractions", line or backward["at"], evidence, backward["at"])


# --- the line that computes a term


def term_line(backward: dict[str, Any], place: int) -> Line:
    """The line of one term of a loss. backward: the event; place: the term's position in the sum."""
    recorded = (backward.get("lines") or {}).get("terms") or []
    if place < len(recorded) and recorded[place]:
        return list(recorded[place])
    at = backward["at"]
    at = (script_lines.loss_return(at) if backward.get("library") else at) or at
    if not at or tree_of(at[0]) is None:
        return None
    scope = scope_at(*at)
    loss = _loss(scope, at[1])
    terms = list(_operands(scope, loss, at[1], _MAX_DEPTH)) if loss is not None else []
    return [at[0], _made(scope, terms[place])] if place < len(terms) and len(terms) > 1 else None


def fractions_line(backward: dict[str, Any]) -> Line:
    """The line that multiplies fractions of tokens by mean probabilities. If transformers computes the loss, the line
    of the setting that requests this term."""
    at = backward["at"]
    if not at:
        return None
    for call in calls_of(at[0], "sum", "mean", *_PRODUCTS):
        if _multiplies(call) and any(calls_in(ast.walk(scope_at(at[0], call.lineno)), *_COUNTS)):
            return [at[0], call.lineno]
    for n in nodes_of(at[0]):
        if isinstance(n, ast.keyword) and n.arg in _ROUTING:
            return [at[0], n.value.lineno]
        if isinstance(n, ast.Assign) and any(getattr(target, "attr", "") in _ROUTING for target in n.targets):
            return [at[0], n.lineno]
    return None


def _divides_by_processes(backward: Event) -> bool:
    """Does the script divide 1 or a coefficient by the number of processes?"""
    file = backward["at"][0] if backward["at"] else ""
    divided = (by for _, by, _ in divisions(n for n in nodes_of(file) if isinstance(n, ast.BinOp)))
    return any(world_pattern(file).search(ast.unparse(by)) for by in divided)


def _multiplies(call: ast.Call) -> bool:
    """Does a call sum a product? `(a * b).sum()`, `torch.sum(a * b)`, `torch.dot(a, b)`."""
    of = call.func.value if isinstance(call.func, ast.Attribute) else None
    parts = [*call.args, *([of] if of is not None else [])]
    if called(call) in _PRODUCTS:
        return len(parts) > 1
    return any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult) for part in parts)


def _loss(scope: Scope, line: int) -> ast.expr | None:
    """The expression of the loss on a line: the argument or the object of a call of backward, or a return value."""
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
    made = (n for n in ast.walk(scope) if isinstance(n, (ast.Assign, ast.AugAssign)) and n.lineno < line)
    found = (n for n in made if any(name in names_in(target) for target in targets(n)))
    return max(found, key=lambda n: n.lineno, default=None)


def _terms(scope: Scope, name: str, line: int, depth: int) -> Iterator[ast.expr]:
    """The terms that a script adds up in a variable, in the order of the autograd graph."""
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
        for side in (value.left, value.right):  # a sum times a number
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
    """The line that computes a term: the assignment of its variable, or the line of the term itself."""
    if any(isinstance(n, ast.Call) for n in ast.walk(term)):
        return term.lineno
    lines = [made.lineno for name in names_in(term) if (made := _assigned(scope, name, term.lineno)) is not None]
    return max(lines, default=term.lineno)
