"""Rules about evaluation: duplicates from padding, means of means, metrics of rank 0's shard alone."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.data_rules import MIN_SHARED, changes_between_epochs
from paceline.doctor.rules.gathered_results import LIGHTNING, uses_all
from paceline.doctor.rules.padded_rows import lengths
from paceline.doctor.rules.printed_values import comes_from
from paceline.doctor.rules.recorded_run import Event, Pass, RecordedRun, finding_at
from paceline.observe.expressions import divided_by_world

MIN_BATCHES = 2  # of an evaluation that ends early: a single batch may be looked at for its shapes
_MAX_COUNTS = 4  # numbers in a gather that may be counts of examples
_GATHER_FOR_METRICS = "Gather with accelerator.gather_for_metrics, which leaves the duplicates out; gather does not."
_SUMS = ("all_reduce", "reduce")
_GATHERS = ("all_gather", "gather", "all_gather_object", "gather_object", "all_gather_into_tensor", "all_to_all")
# In a line of output: file names, counts of things, rates, times, epochs, steps, bytes.
_NO_METRIC = re.compile(  # a file's name, a rate, a time, a count of epochs or of things, seconds, bytes
    r"\S+\.(pt|pth|ckpt|bin|npy|npz|json|jsonl|csv|txt|log|pkl|safetensors)\b"
    r"|\b\d+ (files?|ranks?|process(es)?|gpus?|workers?|shards?|batches|predictions?)\b"
    r"|(lr|learning.?rate|time|took|elapsed|eta|epoch|step|iter|iteration|memory|mem)s?\W*[\d.]+(e[+-]?\d+)?(\s*(/|of)\s*\d+)?"
    r"|\d[\d.]*\s*(s|secs?|seconds|ms|min|minutes|h|hours|it/s|[kmg]i?b)\b|\d+:\d\d(:\d\d)?([.,]\d+)?|\d{4}-\d\d-\d\d",
    re.IGNORECASE,
)
_EXCHANGES = (*_SUMS, *_GATHERS, "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single")


@dataclass
class _Evaluation:
    """One evaluation on all ranks."""

    passes: list[Pass]  # of each rank, over the evaluation's loader
    after: list[list[Event]]  # of each rank, the events from the begin of its pass until training goes on

    @property
    def reads(self) -> Counter[int]:
        """index -> how often it was read, over all ranks."""
        return Counter(i for p in self.passes for i in p.indices or [])


def findings(run: RecordedRun) -> list[Finding]:
    """padded_evaluation, local_metric, mean_of_means: the first of each."""
    if run.world_size < 2 or run.processes < 2:
        return []
    padded: list[Finding] = []
    local: list[Finding] = []
    means: list[Finding] = []
    for loader in sorted({p.loader for p in run.passes[0]} - run.training_loaders):
        for one in _evaluations(run, loader):
            if not padded:
                padded = _padded(run, loader, one)
            if not local:
                local = _local_metric(run, loader, one)
            if not means:
                means = _mean_of_means(run, loader, one)
        if not local:
            local = _evaluated_alone(run, loader)
    return [*padded, *local, *means]


def _evaluations(run: RecordedRun, loader: str) -> list[_Evaluation]:
    """The evaluations with a loader; [] where only some ranks evaluate: on all data, or sharded elsewhere."""
    per_rank = [
        [p for p in passes if p.loader == loader and not p.training and (p.complete or len(p.yields) >= MIN_BATCHES)]
        for passes in run.passes
    ]
    if not all(per_rank):
        return []  # only some ranks evaluate: on all the data, or not sharded by this loader
    rounds = []
    for passes in zip(*per_rank):
        if all(p.yields for p in passes):
            after = [_until_training(run, rank, p) for rank, p in enumerate(passes)]
            rounds.append(_Evaluation(list(passes), after))
    return rounds


def sharded_evaluations(run: RecordedRun) -> Iterator[tuple[str, list[Pass], list[list[Event]]]]:
    """(a loader's name, each rank's pass over it, each rank's events from the pass until training goes on) of the
    evaluations in which every rank reads a part, to its end."""
    for loader in sorted({p.loader for p in run.passes[0]} - run.training_loaders):
        for one in _evaluations(run, loader):
            if _sharded(one) and all(p.complete for p in one.passes):
                yield loader, one.passes, one.after


def is_exchange(event: Event) -> bool:
    """Is it a collective by which the script's ranks tell each other results?"""
    return event["k"] == "coll" and event["op"] in _EXCHANGES and not event.get("of")


def _until_training(run: RecordedRun, rank: int, one: Pass) -> list[Event]:
    """A rank's events from the begin of a pass until it trains, or begins the next pass over the loader."""
    events = run.ranks[rank]
    end = len(events)
    for position in range(one.end + 1, end):
        e = events[position]
        if (e["k"] in ("yield", "pass") and e["loader"] in run.training_loaders) or e["k"] == "backward":
            end = position
            break
        if e["k"] == "pass" and e["loader"] == one.loader:
            end = position
            break
    return events[one.begin : end]


def _sharded(one: _Evaluation) -> bool:
    """Does each rank read a part, by its indices?"""
    union = len(one.reads)
    return all(p.indices and len(set(p.indices)) < union for p in one.passes)


def _disjoint(run: RecordedRun, loader: str, one: _Evaluation) -> bool:
    """Does each rank read data of its own, by their content? A stream's part, a data set that was cut before, or one
    that deals out its examples itself and has the same ones in every evaluation."""
    read: list[set[int]] = []
    for p in one.passes:
        leaves = [{d for y in p.yields if y["rows"] for d in y["rows"][leaf]} for leaf in range(_leaves(p))]
        read.append(max(leaves, key=len, default=set()))
    if min(map(len, read)) < MIN_SHARED or sum(map(len, read)) > len(set().union(*read)):
        return False
    held = [run.loaders[rank].get(loader, {}).get("holds") for rank in range(run.processes)]
    if not all(p.indices for p in one.passes) or all(h and held[0] and h != held[0] for h in held[1:]):
        return True
    again = [p for p in run.passes[0] if p.loader == loader and p.yields]
    return changes_between_epochs(again, list(range(_leaves(one.passes[0])))) is False


def _leaves(one: Pass) -> int:
    """The number of tensors with digests in every batch."""
    return min((len(y["rows"]) for y in one.yields if y["rows"]), default=0)


def _padded(run: RecordedRun, loader: str, one: _Evaluation) -> list[Finding]:
    """padded_evaluation: some examples are read twice, and the script neither drops nor discounts them."""
    reads = one.reads
    total, unique = sum(reads.values()), len(reads)
    twice = total - unique
    if not all(p.complete for p in one.passes) or not 0 < twice < total / 3:
        return []
    if not _sharded(one) or not _same_data(one):
        return []
    exchanged = [e for e in one.after[0] if e["k"] == "coll" and e["op"] in _EXCHANGES and not e.get("of")]
    if not exchanged:
        return []
    values = [v for e in exchanged if e["op"] in _SUMS for v in e.get("result") or []]
    sums = [e for e in exchanged if e["op"] in _SUMS]
    values += [*_totals(_sums_of(exchanged)), *_gathered_sums(one)]
    of_tokens, of_unique = _token_counts(one)
    if unique in values or any(v in of_unique for v in values):
        return []  # the script counted each once
    counted_twice = [v for v in values if v in of_tokens]
    gathers = [e for e in exchanged if e["op"] not in _SUMS]
    loop = one.passes[0].at
    if gathers and total not in values and not counted_twice and not all(uses_all(e, loop) for e in gathers):
        return []
    if sums and total not in values and not counted_twice:
        if any(e.get("n", 0) % unique == 0 and e.get("n") for e in sums):
            return []  # a place for each example
        if not all(uses_all(e, loop, sums=True) for e in sums):
            return []
    if sums and values and total not in values and not counted_twice and any(_counts(v, unique, total) for v in values):
        return []
    counted = f", and the count that it summed over the ranks is {total}" if total in values else ""
    if counted_twice and not counted:
        counted = f", and the count of tokens that it summed over the ranks, {counted_twice[0]:g}, has theirs twice too"
    sampler = run.loaders[0].get(loader, {}).get("sampler_name")
    evidence = (
        f"{total} examples were evaluated where there are {unique}: {twice} of them twice, by {sampler}'s padding"
    )
    at, by = exchanged[0]["at"], exchanged[0].get("path") or []
    fitting = _GATHER_FOR_METRICS if any("accelerate" in file.split(os.sep) for file, _ in by) else ""
    line = script_lines.validation_log(at) if any(LIGHTNING.search(file) for file, _ in by) else None
    return [finding_at("padded_evaluation", line or at, evidence + counted, None, fitting)]


def _gathered_sums(one: _Evaluation) -> list[float]:
    """Of the few numbers that all ranks gathered once, after the evaluation's loop: the sums over the ranks. What is
    gathered in every batch may be labels, and their sums anything."""
    calls = [[e for e in events if e["k"] == "coll" and e["op"] in _GATHERS] for events in one.after]
    if len({len(found) for found in calls}) > 1:
        return []
    often = Counter(str(e["at"]) for e in calls[0])
    few = [es for es in zip(*calls) if often[str(es[0]["at"])] == 1 and 0 < len(es[0].get("sent") or ()) <= _MAX_COUNTS]
    return [sum(values) for es in few for values in zip(*(e.get("sent") or () for e in es))]


def _token_counts(one: _Evaluation) -> tuple[set[int], set[int]]:
    """The numbers of tokens that the ranks have read, by each tensor of padded sequences: with those of the examples
    that were read twice, and of each example once."""
    all_, once = set(), set()
    for rows in lengths([y for p in one.passes for y in p.yields]):
        if len(rows) == sum(one.reads.values()) and len({n for _, n in rows}) > 1:
            all_.add(sum(n for _, n in rows))
            once.add(sum(dict(rows).values()))
    return all_ - once, once - all_


def _mean_of_means(run: RecordedRun, loader: str, one: _Evaluation) -> list[Finding]:
    """mean_of_means: numbers of unequal shards are added and divided by the number of ranks."""
    sizes = [sum(len(y["rows"][0]) for y in p.yields if y["rows"]) for p in one.passes]
    shared = (_sharded(one) and _same_data(one)) or _disjoint(run, loader, one)
    if not shared or not all(p.complete for p in one.passes) or len(set(sizes)) == 1:
        return []
    exchanged = [
        e for e in one.after[0] if e["k"] == "coll" and e["op"] in _SUMS and not e.get("of") and e.get("result")
    ]
    values = [v for e in exchanged for v in e["result"]] + _totals(exchanged)
    if sum(sizes) in values or len(one.reads) in values:
        return []  # the count is exchanged too
    for e in exchanged:
        if e["at"] and (e.get("by") == "AVG" or divided_by_world(*e["at"])):
            evidence = (
                f"the ranks evaluate {', '.join(map(str, sizes))} examples; what they add up is divided by the number "
                "of ranks, as if they had as many each, and no count is exchanged"
            )
            return [finding_at("mean_of_means", e["at"], evidence)]
    return []


def _sums_of(exchanged: list[Event]) -> list[Event]:
    return [e for e in exchanged if e["op"] in _SUMS and e.get("result")]


def _totals(calls: list[Event]) -> list[float]:
    """For a call that is made for every batch: the sum of its results, element by element."""
    by: dict[tuple[Any, ...], list[list[float]]] = defaultdict(list)
    for e in calls:
        by[(*e["at"], len(e["result"]))].append(e["result"])
    return [sum(column) for results in by.values() if len(results) > 1 for column in zip(*results)]


def _counts(value: float, unique: int, total: int) -> bool:
    """May a value be a number of examples, or of tokens or pixels in them, without the duplicates?"""
    return value >= unique and value == int(value) and value % unique == 0 and value % total != 0


def _same_data(one: _Evaluation) -> bool:
    """Do indices that two ranks read mean the same example, by the rows' digests?"""
    seen: dict[int, list[int]] = {}
    for p in one.passes:
        for y in p.yields:
            for row, index in enumerate(y["idx"]):
                if y["rows"] and row < len(y["rows"][0]):
                    rows = [leaf[row] for leaf in y["rows"]]
                    if index in seen and not any(a == b for a, b in zip(seen[index], rows)):
                        return False
                    seen[index] = rows
    return True


def _metric(said: Event) -> bool:
    """Does a line of output tell more than a rate, a time or an epoch?"""
    return said["how"] == "file" or bool(re.search(r"\d", _NO_METRIC.sub("", said["text"])))


def _told(run: RecordedRun, one: Pass, said: Event) -> bool:
    """May a line of rank 0's output tell what it computed in this pass, and not something else? Where results were
    exchanged since the training, before the pass, the script's text must show that."""
    shown = comes_from(said["at"], one.at) if said["how"] != "file" else None
    return shown is not False if not _exchanged_before(run, one) else bool(shown)


def _exchanged_before(run: RecordedRun, one: Pass) -> bool:
    """Did rank 0 exchange results after its last backward before a pass?"""
    for e in reversed(run.ranks[0][: one.begin]):
        if e["k"] == "backward":
            return False
        if e["k"] == "coll" and e["op"] in _EXCHANGES and not e.get("of"):
            return True
    return False


def _evaluated_alone(run: RecordedRun, loader: str) -> list[Finding]:
    """local_metric: rank 0 alone evaluates, with a sampler that gives it its shard."""
    about = run.loaders[0].get(loader, {})
    if about.get("sampler") != "distributed" or (about["replicas"] or 1) < 2 or not about["size"]:
        return []
    if any(p.loader == loader for passes in run.passes[1:] for p in passes):
        return []
    for one in run.passes[0]:
        if one.loader != loader or not one.complete or one.training or not one.indices:
            continue
        events = _until_training(run, 0, one)
        said = [e for e in events[one.end - one.begin :] if e["k"] == "said" and _metric(e) and _told(run, one, e)]
        if said and not any(e["k"] == "coll" and e["op"] in _EXCHANGES and not e.get("of") for e in events):
            evidence = (
                f"rank 0 alone evaluates, and {about['sampler_name']} gave it {len(set(one.indices))} of "
                f"{about['size']} examples; then it logged {said[0]['text'].strip()!r}"
            )
            return [finding_at("local_metric", said[0]["at"], evidence)]
    return []


def _until_next_evaluation(loader: str, events: list[Event]) -> list[Event]:
    """The events until a pass over another loader begins."""
    begins = (i for i, e in enumerate(events) if e["k"] == "pass" and e["loader"] != loader)
    return events[: next(begins, len(events))]


def _local_metric(run: RecordedRun, loader: str, one: _Evaluation) -> list[Finding]:
    """local_metric: rank 0 alone logs a number after all evaluated their shards, and nothing was exchanged."""
    if not (_sharded(one) and _same_data(one)) and not _disjoint(run, loader, one):
        return []
    for events in one.after:
        if any(e["k"] == "coll" and e["op"] in _EXCHANGES and not e.get("of") for e in events):
            return []
        if any(e["k"] == "p2p" for e in events):
            return []
    after = [
        _until_next_evaluation(loader, events[p.end - p.begin :])
        for events, p in zip(one.after, one.passes, strict=True)
    ]
    said, *others = ([e for e in events if e["k"] == "said" and _metric(e)] for events in after)
    written = [{e["path"] for e in events if e["k"] in ("save", "wrote") or e.get("how") == "file"} for events in after]
    if not said or any(others) or any(paths - written[0] for paths in written[1:]):
        return []  # every rank tells of its own shard, or keeps what it has of it
    said = [e for e in said if _told(run, one.passes[0], e)]
    if not said:
        return []
    sizes = [sum(len(y["rows"][0]) for y in p.yields if y["rows"]) for p in one.passes]
    own, union = (len(set(one.passes[0].indices or [])), len(one.reads)) if _sharded(one) else (sizes[0], sum(sizes))
    evidence = (
        f"rank 0 alone logged {said[0]['text'].strip()!r} after it had read {own} of the {union} examples that the "
        "ranks evaluate; nothing was exchanged in between"
    )
    return [finding_at("local_metric", said[0]["at"], evidence)]
