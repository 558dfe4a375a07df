"""Compute the figures of a row from the ranks' records. Pure.

Examples are counted by shard and micro-batch. If several ranks compute the same micro-batch, each with a part of the
model (a pipeline), each rank counts an equal share of the examples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.compare.cases import Case

Record = Mapping[str, Any]
"""The record of one rank (worker/probe.py)."""

Losses = Mapping[tuple[int, int], float]
"""(epoch, step) -> the mean loss of that global batch over all ranks."""

# If a step sent more bytes than this, but the profile shows no communication, the profiler missed the communication.
_UNSEEN_BYTES = 2**16


@dataclass(frozen=True)
class Figures:
    """The figures of one case, over all rounds. None: not measured."""

    examples_per_second: float  # the median of `rounds`
    rounds: tuple[float, ...]  # examples per second in each round
    step_seconds: float  # the median of all timed steps
    p95_seconds: float  # the 95th percentile of all timed steps
    mean_seconds: float  # the mean of all timed steps: compute + waiting + communicating
    compute: float | None  # seconds of the mean step with computation
    waiting: float  # seconds of the mean step spent waiting for data
    communicating: float | None  # seconds of the mean step in communication without computation
    hidden: float | None  # seconds of communication in the mean step that overlap with computation
    memory: tuple[int, ...]  # peak bytes, by rank
    memory_kind: str  # the kind of these bytes: "allocated" or "resident" (worker/resources.py)
    wire: float | None  # bytes that all ranks send per step
    start_up: float  # seconds from the launch to the end of the first step
    parameter_bytes: int  # bytes of the parameters on the rank that holds the most
    losses: Losses  # losses in the first round
    # Reasons why the losses of this case, or of all cases, may differ from those of `single` (worker/probe.py).
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Row:
    """One line of the table: figures, or why there are none."""

    case: Case  # the case
    figures: Figures | None = None  # from the rounds before a failure; None if there were no such rounds
    failed: str | None = None  # why the case failed, in one line; None if it ran in every round
    difference: float | None = None  # the largest difference of a step's loss from that of `single`
    cause: str | None = None  # why the losses differ from those of `single`; None if they do not


def compute_figures(rounds: Sequence[Sequence[Record]]) -> Figures:
    """Compute the figures of one case from the records of all ranks, of each round."""
    ranks = [record for records in rounds for record in records if _timed(record)]
    seconds = [step["seconds"] for record in ranks for step in _timed(record)]
    waiting = statistics.fmean(step["waited"] for record in ranks for step in _timed(record))
    mean = statistics.fmean(seconds)
    wires = [wire_bytes(records) for records in rounds]
    wire = statistics.fmean(w for w in wires if w is not None) if None not in wires else None
    shares = communication_shares(rounds, wire)
    communicating = None if shares is None else min(shares[0] * mean, mean - waiting)
    speeds = tuple(examples_per_second(records) for records in rounds)
    size = max(len(records) for records in rounds)
    return Figures(
        examples_per_second=statistics.median(speeds),
        rounds=speeds,
        step_seconds=statistics.median(seconds),
        p95_seconds=percentile(seconds, 0.95),
        mean_seconds=mean,
        compute=None if communicating is None else max(mean - waiting - communicating, 0.0),
        waiting=waiting,
        communicating=communicating,
        hidden=None if shares is None else max(shares[1] - shares[0], 0.0) * mean,
        memory=tuple(max(records[rank]["memory_bytes"] for records in rounds) for rank in range(size)),
        memory_kind=ranks[0]["memory_kind"],
        wire=wire,
        start_up=statistics.median(max(_start_ups(records)) for records in rounds),
        parameter_bytes=max(record["parameter_bytes"] for record in ranks),
        losses=mean_losses(rounds[0]),
        traits=frozenset(trait for record in rounds[0] for trait in record.get("traits", ())),
    )


def _timed(record: Record) -> list[Mapping[str, Any]]:
    return [step for step in record["steps"] if step["timed"]]


def _start_ups(records: Iterable[Record]) -> list[float]:
    return [record["start_up_seconds"] for record in records if record["start_up_seconds"] is not None]


def percentile(values: Sequence[float], part: float) -> float:
    """The percentile by nearest rank. part: the fraction, such as 0.95."""
    ordered = sorted(values)
    return ordered[max(math.ceil(part * len(ordered)) - 1, 0)]


def examples_per_second(records: Sequence[Record]) -> float:
    """The sum of all ranks' examples per second. (Ranks need not make their steps at the same time.)"""
    holders: dict[tuple[Any, ...], int] = {}
    for record in records:
        for key, _ in _parts(record):
            holders[key] = holders.get(key, 0) + 1
    speed = 0.0
    for record in records:
        steps = _timed(record)
        if steps:
            examples = sum(count / holders[key] for key, count in _parts(record))
            speed += examples / sum(step["seconds"] for step in steps)
    return speed


def _parts(record: Record) -> list[tuple[tuple[Any, ...], int]]:
    """[((epoch, step, shard, micro-batch), examples), ...] of the timed steps."""
    return [
        ((step["epoch"], step["step"], shard, micro), count)
        for step in _timed(record)
        for shard, micro, count in step["parts"]
    ]


def wire_bytes(records: Sequence[Record]) -> float | None:
    """Bytes that all ranks together send per step.

    None if a rank could not measure its bytes, or if ranks use NCCL, which uses the machine's links instead of the
    network.

    A rank without steps is a server. It does not know when the timing of its workers began. So the bytes that the
    workers received count as the bytes that the server sent.
    """
    workers = [record for record in records if record["steps"]]
    if any(record["bytes_sent"] is None for record in workers):
        return None
    if len(records) > 1 and any(not record["device"].startswith("cpu") for record in records):
        return None
    total = sum(record["bytes_sent"] for record in workers)
    if len(workers) < len(records):
        total += sum(record["bytes_received"] for record in workers)
    return float(total / max(len(_timed(record)) for record in workers))


def communication_shares(rounds: Sequence[Sequence[Record]], wire: float | None) -> tuple[float, float] | None:
    """(exposed, all) communication as fractions of the profiled steps' time, averaged over the ranks.

    Fractions are used because a step takes longer under the profiler.

    None (not measured) in three cases: a rank has no profile; bytes were sent over the network but the profiler saw no
    operation; one process holds several replicas and copies between them.
    """
    ranks = [record for records in rounds for record in records if record["steps"]]
    shards = {shard for step in ranks[0]["steps"] for shard, _, _ in step["parts"]}
    if len(rounds[0]) == 1 and len(shards) > 1:
        return None
    found = [record["communication"] for record in ranks]
    if any(one is None for one in found):
        return None
    if wire is not None and wire > _UNSEEN_BYTES and not any(one["operations"] for one in found):
        return None
    seconds = sum(record["profiled_seconds"] for record in ranks)
    exposed, total = (sum(one[part] for one in found) / seconds for part in ("exposed", "seconds"))
    return exposed, total


def mean_losses(records: Sequence[Record]) -> dict[tuple[int, int], float]:
    """The mean loss of each global batch with complete records: all examples, or all chunks of a work queue.

    For each backward call, the ranks' sum of losses is divided by their sum of weights. A batch's loss is the sum over
    its calls.
    """
    chunks = max(record.get("chunks", 0) for record in records)
    sums: dict[tuple[int, int], dict[str, list[float]]] = {}
    examples: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
    totals: dict[tuple[int, int], int] = {}
    for record in records:
        for step in record["steps"]:
            key = step["epoch"], step["step"]
            totals[key] = step["total"]
            for shard, micro, count in step["parts"]:
                examples.setdefault(key, {})[shard, micro] = count
            for call, (top, weight) in step["losses"].items():
                pair = sums.setdefault(key, {}).setdefault(call, [0.0, 0.0])
                pair[0] += top
                pair[1] += weight
    if chunks:
        whole = [key for key in totals if len({shard for shard, _ in examples.get(key, {})}) == chunks]
    else:
        whole = [key for key, total in totals.items() if sum(examples.get(key, {}).values()) == total]
    means = {key: [top / weight for top, weight in sums.get(key, {}).values() if weight] for key in sorted(whole)}
    return {key: sum(values) for key, values in means.items() if values}


def loss_difference(losses: Losses, others: Losses) -> float | None:
    """The largest absolute difference over the common steps. NaN if a difference is NaN; None without common steps."""
    differences = [abs(value - others[key]) for key, value in losses.items() if key in others]
    if any(math.isnan(value) for value in differences):
        return math.nan
    return max(differences, default=None)
