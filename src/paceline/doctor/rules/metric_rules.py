"""Rules about metrics that are computed from the ranks' local numbers: wrong divisors, and averages of averages.

The rules divide the script's variables after an evaluation loop (variable_recorder.py) by each other or by the size of
the data set. They compare the quotients with rank 0's output and with the numbers that the ranks sent.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.evaluation_rules import Evaluation, all_evaluations, is_exchange
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at, first_of_each
from paceline.observe.expressions import divided_by_world, divisions
from paceline.observe.source import calls_of, holds, keyword, nodes_of, scope_at, statement_at

CLOSE = 2e-5  # relative difference between a float32 number and the quotient that it comes from
UNLIKE = 1e-3  # relative difference between counts that are not equal
MIN_COUNT = 8  # minimum count of examples or tokens that a rank divides by
DIGITS = 3  # minimum digits of a printed number: fewer digits fit many quotients
_NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?:e[-+]?\d+)?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_DURATION = re.compile(r"time|sec|elapsed|durat|start|begin|\bt\d|(^|\.)lr$", re.IGNORECASE)
_TRAINS = re.compile(r"\.(fit|validate|test)\(")
_AVERAGES = re.compile(r"""["'](mean|avg|average)["']|\.mean\(|\bmean\(|sync_dist|ReduceOp\.AVG""")

Numbers = dict[str, float]


def findings(run: RecordedRun) -> list[Finding]:
    """local_metric, mean_of_means: the first of each."""
    if run.world_size < 2 or run.processes < 2:
        return []
    return first_of_each(run, _share_of_whole, _mean_of_quotients)


def _whole_shards(run: RecordedRun) -> list[Evaluation]:
    """The evaluations in which every rank reads its shard to the end."""
    return [one for one in all_evaluations(run) if one.sharded and one.complete]


# --- rank 0's local sum, divided by the size of the whole data set


def _share_of_whole(run: RecordedRun) -> Iterator[Finding]:
    """local_metric: rank 0 reports a sum over its shard, divided by the number of examples of all ranks."""
    for one in _whole_shards(run):
        size, read = run.about(one.loader).get("size") or 0, len(set(one.passes[0].indices or ()))
        events, *of_others = (events[p.end - p.begin :] for p, events in zip(one.passes, one.after))
        exchanged = [v for e in events if e["k"] == "coll" for v in e.get("result") or ()]
        ours, theirs = _captures(events), [n for events in of_others for n in _captures(events)]
        for said in (e for e in events if e["k"] == "said" and size and 2 * read <= 1.5 * size):
            printed = [*_printed(said["text"]), *_of_whole(said["text"], size)]
            for (value, half), (name, own) in product(printed, sorted(_both(ours))):
                if not own or abs(own / size - value) > half or _same(own, (size, read)):
                    continue
                others = [n[name] for n in theirs if name in n]
                whole = [own + other for other in others]  # sums of two ranks; of more, sums are larger
                of_all = [v / d for v in exchanged for d in (1.0, size, run.world_size)]
                # The variable may contain the sum over all ranks of an earlier evaluation.
                if all(other == own for other in others) or any(abs(v - value) <= half for v in of_all):
                    continue
                line = _division(run, name, size, ours) or (said["at"] if f"{own:g}/{size}" in said["text"] else None)
                if line is not None and not all(abs(w / size - value) <= half for w in whole):
                    evidence = (
                        f"rank 0 logged {said['text'].strip()!r}: `{name}`, {own:g} after the {read} examples of its "
                        f"shard, divided by all {size} examples"
                    )
                    yield finding_at("local_metric", said["at"], evidence, line)


def _captures(events: list[Event]) -> list[Numbers]:
    """The values of the variables until the first exchange. Afterwards a sum may cover all ranks."""
    found = []
    for e in events:
        found += [e["vars"]] if e.get("vars") else []
        if is_exchange(e):
            break
    return found


def _both(captures: list[Numbers]) -> set[tuple[str, float]]:
    return {pair for numbers in captures for pair in numbers.items()}


def _printed(text: str) -> Iterator[tuple[float, float]]:
    """(number, half a unit of its last digit) for each decimal number in a text. A second pair, divided by 100, is for
    the case that the number is a percentage."""
    for match in _NUMBER.finditer(text):
        digits = match.group()
        mantissa, _, exponent = digits.lower().partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        if len(mantissa.replace(".", "").strip("0")) < DIGITS and len(mantissa.partition(".")[2]) < DIGITS:
            continue
        yield float(digits), 0.501 * unit
        yield float(digits) / 100, 0.00501 * unit


def _of_whole(text: str, size: int) -> Iterator[tuple[float, float]]:
    """(value, tolerance) for each fraction that a text writes as two numbers, such as `57/128`, if the second number is
    `size`."""
    for part, whole in re.findall(r"(?<![\d.])(\d+) ?(?:/|of|out of) ?(\d+)(?![\d.])", text):
        if int(whole) == size and len(part) >= DIGITS - 1:
            yield int(part) / size, 0.1 / size


def _same(value: float, others: Sequence[float]) -> bool:
    return any(math.isclose(value, other, rel_tol=1e-9) for other in others)


def _division(run: RecordedRun, name: str, size: int, captures: list[Numbers]) -> list[Any] | None:
    """The line that divides the variable `name` by a `len(...)`, or by a variable with the value `size`."""
    last = re.split(r"[.\[]", name)[0 if "[" in name else -1]
    sizes = {re.split(r"[.\[]", n)[-1] for n, value in _both(captures) if value == size}
    for file in run.files("optimizer", "pass", "said", "coll", "loader"):
        for part, by, line in divisions(nodes_of(file)):
            words = set(_NAME.findall(ast.unparse(by)))
            if last in _NAME.findall(ast.unparse(part)) and ("len" in words or words & sizes):
                return [file, line]
    return None


# --- a mean of the ranks' quotients with different divisors


def _mean_of_quotients(run: RecordedRun) -> Iterator[Finding]:
    """mean_of_means: each rank divides its sum by its local count, and the quotients are averaged."""
    for one in _whole_shards(run):
        per_rank = [[e for e in events if is_exchange(e) and e.get("sent")] for events in one.after]
        calls = list(zip(*per_rank)) if len(set(map(len, per_rank))) == 1 else []
        sent = [(es, values) for es in calls for values in zip(*(e["sent"] for e in es))]
        for es, values in sent:
            whole_numbers = len(set(values)) == 1 or all(v == int(v) for v in values)
            found = None if whole_numbers else _quotient(one, es, values)
            if found is None or any(_close(found[1][1], counts) for _, counts in sent):
                continue
            (top, bottom), (sums, counts) = found
            mean, whole = sum(values) / len(values), sum(sums) / sum(counts)
            path = [frame for frame in es[0].get("path", ()) if _is_script(one, frame)]
            logged = _log_call(path, (top, bottom))
            if not (logged or _averaged(one, es[0], path, mean, whole)):
                continue
            shown = " and ".join(f"{c:g}" for c in counts[:4])
            evidence = (
                f"each rank sent `{top}` divided by its local `{bottom}` ({shown}); the mean of these quotients is "
                f"{mean:.6g}, but the sum of `{top}` divided by the sum of `{bottom}` is {whole:.6g}"
            )
            at, beside = (logged, None) if logged else _lines(one, es[0], path)
            yield finding_at("mean_of_means", at, evidence, beside)


def _quotient(
    one: Evaluation, es: Sequence[Event], values: Sequence[float]
) -> tuple[tuple[str, str], tuple[list[float], list[float]]] | None:
    """((name of a sum, name of a count), (each rank's sum, each rank's count)), if every rank sent the quotient of
    these two variables and the counts differ between ranks; or None."""
    for numbers in _numbers_before(one, es):
        names = [n for n in numbers[0] if all(n in theirs for theirs in numbers[1:])]
        for bottom in names:
            counts = [theirs[bottom] for theirs in numbers]
            whole = all(c >= MIN_COUNT and c == int(c) for c in counts)
            if not whole or max(counts) - min(counts) <= UNLIKE * max(counts) or _DURATION.search(bottom):
                continue
            for top in (name for name in names if name != bottom and not _DURATION.search(name)):
                sums = [theirs[top] for theirs in numbers]
                if _close([s / c for s, c in zip(sums, counts)], values):
                    return (top, bottom), (sums, counts)
    return None


def _numbers_before(one: Evaluation, es: Sequence[Event]) -> Iterator[list[Numbers]]:
    """Yield the values of the variables as one dictionary per rank: first those at the call, then those at the end of
    each loop before the call."""
    if all(e.get("vars") for e in es):
        yield [e["vars"] for e in es]
    ends = [
        [e["vars"] for e in events if e["k"] in ("pass_end", "loop_end") and e.get("vars") and e["t"] <= call["t"]]
        for events, call in zip(one.after, es)
    ]
    if len({len(found) for found in ends}) == 1:
        yield from ([*numbers] for numbers in reversed(list(zip(*ends))))


def _close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=CLOSE) for a, b in zip(ours, theirs))


def _averaged(one: Evaluation, call: Event, path: list[list[Any]], mean: float, whole: float) -> bool:
    """Are the sent values averaged over the ranks: by the call, by the code around it, or in rank 0's output?"""
    at = call["at"]
    if call.get("by") == "AVG" or (at and divided_by_world(*at)):
        return True
    said = [e["text"] for e in one.after[0] if e["k"] == "said" and e["t"] >= call["t"]]
    printed = [(abs(value - mean), abs(value - whole), half) for text in said for value, half in _printed(text)]
    return any(_AVERAGES.search(_statement(*frame)) for frame in path) or any(
        of_mean <= half and of_whole > 2 * half for of_mean, of_whole, half in printed
    )


def _is_script(one: Evaluation, frame: list[Any]) -> bool:
    folder = next((p.at[0].rpartition("/")[0] for p in one.passes if p.at), None)
    return folder is not None and frame[0].startswith(folder) and "site-packages" not in frame[0]


def _statement(file: str, line: int) -> str:
    """The text of the innermost statement at a line."""
    found = statement_at(file, line)
    return "" if found is None or hasattr(found.node, "body") else ast.unparse(found.node)


def _lines(one: Evaluation, call: Event, path: list[list[Any]]) -> tuple[Any, Any]:
    """(the line nearest to the quotient's computation, the line of the collective if a helper makes the call)."""
    if not path:
        return call["at"], None
    near = one.passes[0].at
    line = script_lines.frame_in_scope(path, near)
    if line == path[0] and len(path) > 1 and near and scope_at(*path[0]) is not scope_at(*near):
        line = path[1]  # the helper's caller computes the quotient
    return line, path[0] if path[0] != line else None


def _log_call(path: list[list[Any]], names: tuple[str, str]) -> list[Any] | None:
    """The line of `self.log(..., sync_dist=True)`, if Lightning makes the averaging call for it."""
    words = {re.split(r"[.\[]", name)[-1] for name in names}
    for file in dict.fromkeys(file for file, _ in path):
        logs = [n for n in calls_of(file, "log", "log_dict") if keyword(n, "sync_dist") is not None]
        found = [n for n in logs if "sum" not in ast.unparse(n)]
        direct = [n for n in found if any(holds(n, line) for f, line in path if f == file)]
        named = [n for n in found if words & set(_NAME.findall(ast.unparse(n)))]
        if direct or (found and _TRAINS.search(_statement(*path[0]))):
            return [file, (direct or named or found)[0].lineno]
    return None
