"""Rules about evaluation: duplicates from padding, means of means, metrics that cover only rank 0's shard."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.data_rules import MIN_SHARED, changes_between_epochs, rows_of
from paceline.doctor.rules.gathered_results import LIGHTNING, uses_all
from paceline.doctor.rules.padded_rows import lengths
from paceline.doctor.rules.printed_values import comes_from
from paceline.doctor.rules.recorded_run import Event, Pass, RecordedRun, finding_at, first_of_each
from paceline.observe.expressions import divided_by_world

MIN_BATCHES = 2  # batches of an evaluation that ends early: a script may read a single batch for its shapes
_UNLIKE = 1e-6  # relative difference between metrics that are not equal
_MAX_COUNTS = 4  # a gather of at most this many numbers may gather counts of examples
_GATHER_FOR_METRICS = "Use accelerator.gather_for_metrics, which drops the duplicates; accelerator.gather keeps them."
_SUMS = ("all_reduce", "reduce")
_GATHERS = ("all_gather", "gather", "all_gather_object", "gather_object", "all_gather_into_tensor", "all_to_all")
# Numbers in a line of output that are not metrics.
_NO_METRIC = re.compile(  # a file name, a rate, a time, a count of epochs or other things, seconds, bytes
    r"\S+\.(pt|pth|ckpt|bin|npy|npz|json|jsonl|csv|txt|log|pkl|safetensors)\b"
    r"|\b\d+ (files?|ranks?|process(es)?|gpus?|workers?|shards?|batches|predictions?)\b"
    r"|(lr|learning.?rate|time|took|elapsed|eta|epoch|step|iter|iteration|memory|mem)s?\W*[\d.]+(e[+-]?\d+)?(\s*(/|of)\s*\d+)?"
    r"|\d[\d.]*\s*(s|secs?|seconds|ms|min|minutes|h|hours|it/s|[kmg]i?b)\b|\d+:\d\d(:\d\d)?([.,]\d+)?|\d{4}-\d\d-\d\d",
    re.IGNORECASE,
)
_EXCHANGES = (*_SUMS, *_GATHERS, "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single")


@dataclass
class Evaluation:
    """One evaluation on all ranks."""

    loader: str  # the loader's name
    passes: list[Pass]  # each rank's pass over that loader
    after: list[list[Event]]  # each rank's events from the start of its pass until training continues

    @property
    def reads(self) -> Counter[int]:
        """index -> number of reads, over all ranks."""
        return Counter(i for p in self.passes for i in p.indices or [])

    @property
    def sizes(self) -> list[int]:
        """The number of rows that each rank read."""
        return [len(p.digests) for p in self.passes]

    @property
    def complete(self) -> bool:
        """Did all ranks read their loader to the end?"""
        return all(p.complete for p in self.passes)

    @property
    def sharded(self) -> bool:
        """Does each rank read only a part of the indices?"""
        union = len(self.reads)
        return all(p.indices and len(set(p.indices)) < union for p in self.passes)

    @property
    def of_one_set(self) -> bool:
        """Does each rank read a part of one data set?"""
        return self.sharded and _same_data(self)


def findings(run: RecordedRun) -> list[Finding]:
    """padded_evaluation, local_metric, mean_of_means: the first of each."""
    if run.world_size < 2 or run.processes < 2:
        return []
    return first_of_each(run, _padded, _local_metric, _mean_of_means, _decided_alone)


def evaluating_loaders(run: RecordedRun) -> list[str]:
    return sorted({p.loader for p in run.passes[0]} - run.training_loaders)


def evaluations(run: RecordedRun, loader: str) -> Iterator[Evaluation]:
    """The evaluations with a loader on all ranks. Evaluations on only some ranks are left out: they read all data, or
    are sharded in a different way."""
    per_rank = [
        [p for p in passes if p.loader == loader and not p.training and (p.complete or len(p.yields) >= MIN_BATCHES)]
        for passes in run.passes
    ]
    for passes in zip(*per_rank):
        if all(p.yields for p in passes):
            yield Evaluation(loader, list(passes), [_until_training(run, rank, p) for rank, p in enumerate(passes)])


def all_evaluations(run: RecordedRun) -> Iterator[Evaluation]:
    return (one for loader in evaluating_loaders(run) for one in evaluations(run, loader))


def is_exchange(event: Event) -> bool:
    """Is it a collective that exchanges results between the script's ranks?"""
    return event["k"] == "coll" and event["op"] in _EXCHANGES and not event.get("of")


def _until_training(run: RecordedRun, rank: int, one: Pass) -> list[Event]:
    """A rank's events from the start of a pass until the rank trains, or starts the next pass over the loader."""

    def ends(e: Event) -> bool:
        trains = e["k"] in ("yield", "pass") and e["loader"] in run.training_loaders
        return trains or e["k"] == "backward" or (e["k"] == "pass" and e["loader"] == one.loader)

    events = run.ranks[rank]
    end = next((n for n in range(one.end + 1, len(events)) if ends(events[n])), len(events))
    return events[one.begin : end]


def _disjoint(run: RecordedRun, one: Evaluation) -> bool:
    """Do the ranks read disjoint data, by content? Such data are the parts of a stream, a data set that was sharded
    beforehand, and a data set that gives a rank the same examples in every evaluation."""
    read: list[set[int]] = []
    for p in one.passes:
        leaves = [{d for y in p.yields if y["rows"] for d in y["rows"][leaf]} for leaf in range(_leaves(p))]
        read.append(max(leaves, key=len, default=set()))
    if min(map(len, read)) < MIN_SHARED or sum(map(len, read)) > len(set().union(*read)):
        return False
    held = [run.about(one.loader, rank).get("holds") for rank in range(run.processes)]
    if not all(p.indices for p in one.passes) or all(h and held[0] and h != held[0] for h in held[1:]):
        return True
    return changes_between_epochs(run.over(one.loader), list(range(_leaves(one.passes[0])))) is False


def _leaves(one: Pass) -> int:
    """The number of tensors with digests in every batch."""
    return min((len(y["rows"]) for y in one.yields if y["rows"]), default=0)


def _padded(run: RecordedRun) -> Iterator[Finding]:
    """padded_evaluation: some examples are read twice, and the script neither drops the duplicates nor corrects for
    them."""
    for one in all_evaluations(run):
        total, unique = sum(one.reads.values()), len(one.reads)
        exchanged = [e for e in one.after[0] if is_exchange(e)]
        if not one.complete or not 0 < total - unique < total / 3 or not one.of_one_set or not exchanged:
            continue
        values = [v for e in exchanged if e["op"] in _SUMS for v in e.get("result") or []]
        values += [*_totals([e for e in exchanged if e["op"] in _SUMS and e.get("result")]), *_gathered_sums(one)]
        of_tokens, of_unique = _token_counts(one)
        twice = [v for v in values if v in of_tokens]
        if unique in values or any(v in of_unique for v in values):
            continue  # the script counted each example once
        if total not in values and not twice and _may_drop(exchanged, values, one.passes[0].at, unique, total):
            continue
        counted = f", and the count that the script summed over the ranks is {total}" if total in values else ""
        if twice and not counted:
            counted = f", and the count of tokens that the script summed, {twice[0]:g}, includes the duplicates"
        evidence = (
            f"{total} examples were evaluated, but there are only {unique}: {total - unique} were evaluated twice, "
            f"because {run.about(one.loader).get('sampler_name')} pads the shards{counted}"
        )
        at, by = exchanged[0]["at"], exchanged[0].get("path") or []
        fitting = _GATHER_FOR_METRICS if any("accelerate" in file.split(os.sep) for file, _ in by) else ""
        line = script_lines.validation_log(at) if any(LIGHTNING.search(file) for file, _ in by) else None
        yield finding_at("padded_evaluation", line or at, evidence, run.about(one.loader).get("sampler_at"), fitting)


def _may_drop(exchanged: list[Event], values: list[float], loop: Any, unique: int, total: int) -> bool:
    """May the script drop the duplicates, judging by its source, or by the sizes and values of its collectives?"""
    sums = [e for e in exchanged if e["op"] in _SUMS]
    placed = any(e.get("n") and e["n"] % unique == 0 for e in sums)  # one element per example
    counts = bool(sums) and any(_counts(v, unique, total) for v in values)
    return placed or counts or not all(uses_all(e, loop, sums=e["op"] in _SUMS) for e in exchanged)


def _gathered_sums(one: Evaluation) -> list[float]:
    """Sums over the ranks of numbers that were gathered once, if a gather has at most _MAX_COUNTS numbers. (A gather in
    every batch may gather labels, and their sums may be anything.)"""
    calls = [[e for e in events if e["k"] == "coll" and e["op"] in _GATHERS] for events in one.after]
    often = Counter(str(e["at"]) for e in calls[0])
    pairs = zip(*calls) if len(set(map(len, calls))) == 1 else ()
    few = [es for es in pairs if often[str(es[0]["at"])] == 1 and 0 < len(es[0].get("sent") or ()) <= _MAX_COUNTS]
    return [sum(values) for es in few for values in zip(*(e.get("sent") or () for e in es))]


def _token_counts(one: Evaluation) -> tuple[set[int], set[int]]:
    """(numbers of tokens including the duplicates, numbers of tokens with each example counted once), with one number
    for each tensor of padded sequences and side of the padding."""
    all_, once = set(), set()
    for rows in lengths([y for p in one.passes for y in p.yields]):
        if len(rows) == sum(one.reads.values()) and len({n for _, n in rows}) > 1:
            all_.add(sum(n for _, n in rows))
            once.add(sum(dict(rows).values()))
    return all_ - once, once - all_


def _mean_of_means(run: RecordedRun) -> Iterator[Finding]:
    """mean_of_means: results of unequal shards are summed and divided by the number of ranks."""
    for one in all_evaluations(run):
        if not one.complete or len(set(one.sizes)) == 1 or not (one.of_one_set or _disjoint(run, one)):
            continue
        exchanged = [e for e in one.after[0] if is_exchange(e) and e["op"] in _SUMS and e.get("result")]
        values = [v for e in exchanged for v in e["result"]] + _totals(exchanged)
        if sum(one.sizes) in values or len(one.reads) in values:
            continue  # the script also sums the number of examples
        for e in exchanged:
            if e["at"] and (e.get("by") == "AVG" or divided_by_world(*e["at"])):
                evidence = (
                    f"the ranks evaluate {', '.join(map(str, one.sizes))} examples; the sum of their results is "
                    "divided by the number of ranks, as if the shards were equal, and no count is exchanged"
                )
                yield finding_at("mean_of_means", e["at"], evidence)


def _totals(calls: list[Event]) -> list[float]:
    """For each call that is made several times, such as in every batch: the sums of its results, by element."""
    by: dict[tuple[Any, ...], list[list[float]]] = defaultdict(list)
    for e in calls:
        by[(*e["at"], len(e["result"]))].append(e["result"])
    return [sum(column) for results in by.values() if len(results) > 1 for column in zip(*results)]


def _counts(value: float, unique: int, total: int) -> bool:
    """May a value be a number of examples, or of their tokens or pixels, without the duplicates?"""
    return value >= unique and value == int(value) and value % unique == 0 and value % total != 0


def _same_data(one: Evaluation) -> bool:
    """Do indices that two ranks read refer to the same example, by the digests of the rows?"""
    seen: dict[int, list[int]] = {}
    for index, rows in (pair for p in one.passes for pair in rows_of(p)):
        if index in seen and not any(a == b for a, b in zip(seen[index], rows)):
            return False
        seen[index] = rows
    return True


def _metric(said: Event) -> bool:
    """Does a line of output have a number other than a rate, a time or an epoch?"""
    return said["how"] == "file" or bool(re.search(r"\d", _NO_METRIC.sub("", said["text"])))


def _reported(run: RecordedRun, one: Pass, said: Event) -> bool:
    """May a line of rank 0's output report a result of this pass? If results were exchanged between training and the
    pass, the source must show that the line reports one."""
    shown = comes_from(said["at"], one.at) if said["how"] != "file" else None
    return shown is not False if not _exchanged_before(run, one) else bool(shown)


def _exchanged_before(run: RecordedRun, one: Pass) -> bool:
    """Did rank 0 exchange results between its last backward and the start of a pass?"""
    since = takewhile(lambda e: e["k"] != "backward", reversed(run.ranks[0][: one.begin]))
    return any(map(is_exchange, since))


def _local_metric(run: RecordedRun) -> Iterator[Finding]:
    """local_metric: rank 0 reports the metric of its shard, or is the only rank to evaluate, on its shard."""
    for loader in evaluating_loaders(run):
        for one in evaluations(run, loader):
            yield from _logged_alone(run, one)
        yield from _evaluated_alone(run, loader)


def _decided_alone(run: RecordedRun) -> Iterator[Finding]:
    """local_metric: a callback decides by a metric that differs between the ranks."""
    for events in zip(*run.per_peer("decides")):
        mine, *others = events
        for rank, other in zip(run.peers[1:], others):
            known = other["by"] == mine["by"] and math.isfinite(mine["value"]) and math.isfinite(other["value"])
            if known and not math.isclose(mine["value"], other["value"], rel_tol=_UNLIKE):
                evidence = (
                    f"{mine['who']} decides by {mine['by']!r}, which is {mine['value']:.6g} on rank {run.peers[0]} and "
                    f"{other['value']:.6g} on rank {rank}"
                )
                yield finding_at("local_metric", script_lines.unsynced_log(run, {mine["by"]}), evidence)


def _evaluated_alone(run: RecordedRun, loader: str) -> Iterator[Finding]:
    """local_metric: only rank 0 evaluates, with a sampler that gives it a shard."""
    about = run.about(loader)
    sharded = about.get("sampler") == "distributed" and (about["replicas"] or 1) > 1 and about["size"]
    others = any(p.loader == loader for passes in run.passes[1:] for p in passes)
    for one in run.over(loader) if sharded and not others else ():
        events = _until_training(run, 0, one)
        said = [e for e in events[one.end - one.begin :] if e["k"] == "said" and _metric(e) and _reported(run, one, e)]
        if one.complete and not one.training and one.indices and said and not any(map(is_exchange, events)):
            evidence = (
                f"only rank 0 evaluates, and {about['sampler_name']} gave it {len(set(one.indices))} of "
                f"{about['size']} examples; then it logged {said[0]['text'].strip()!r}"
            )
            yield finding_at("local_metric", said[0]["at"], evidence)


def _until_next_evaluation(loader: str, events: list[Event]) -> list[Event]:
    """The events until a pass over another loader starts."""
    begins = (i for i, e in enumerate(events) if e["k"] == "pass" and e["loader"] != loader)
    return events[: next(begins, len(events))]


def _logged_alone(run: RecordedRun, one: Evaluation) -> Iterator[Finding]:
    """local_metric: all ranks evaluate their shards and exchange nothing, and then only rank 0 logs a number."""
    if any(is_exchange(e) or e["k"] == "p2p" for events in one.after for e in events):
        return
    after = [_until_next_evaluation(one.loader, events[p.end - p.begin :]) for events, p in zip(one.after, one.passes)]
    said, *others = ([e for e in events if e["k"] == "said" and _metric(e)] for events in after)
    written = [{e["path"] for e in events if e["k"] in ("save", "wrote") or e.get("how") == "file"} for events in after]
    if any(others) or any(paths - written[0] for paths in written[1:]):
        return  # every rank reports its shard, or saves its result
    said = [e for e in said if _reported(run, one.passes[0], e)]
    if said and (one.of_one_set or _disjoint(run, one)):
        own, union = one.sizes[0], sum(one.sizes)
        if one.sharded:
            own, union = len(set(one.passes[0].indices or [])), len(one.reads)
        evidence = (
            f"only rank 0 logged {said[0]['text'].strip()!r}, after it had read {own} of the {union} examples that the "
            "ranks evaluate, and the ranks exchanged nothing in between"
        )
        yield finding_at("local_metric", said[0]["at"], evidence)
