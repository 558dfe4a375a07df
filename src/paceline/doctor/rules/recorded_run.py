"""The events of all ranks of a run, and the questions that several judges ask of them."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Event = dict[str, Any]
MIN_TRAINED = 2  # yields followed by a backward, of a loader that trains


@dataclass
class Pass:
    """One iteration of a loader on one rank."""

    loader: str
    n: int
    at: list[Any]
    epoch: Any = None
    yields: list[Event] = field(default_factory=list)
    trained: int = 0  # yields that a backward followed
    complete: bool = False
    begin: int = 0  # positions in the events
    end: int = 0

    @property
    def training(self) -> bool:
        return self.trained >= MIN_TRAINED and self.trained * 2 >= len(self.yields)

    @property
    def indices(self) -> list[int] | None:
        if any(y["idx"] is None for y in self.yields):
            return None
        return [i for y in self.yields for i in y["idx"]]


class RecordedRun:
    """ranks: the events of each rank, in order. cut: the script was ended from outside."""

    def __init__(self, ranks: Sequence[list[Event]], cut: bool = False) -> None:
        self.ranks = list(ranks)
        self.cut = cut
        self.processes = len(self.ranks)

    def events(self, rank: int, *kinds: str) -> Iterator[Event]:
        return (event for event in self.ranks[rank] if event["k"] in kinds)

    def all_events(self, *kinds: str) -> Iterator[Event]:
        return (event for events in self.ranks for event in events if event["k"] in kinds)

    @cached_property
    def world_size(self) -> int:
        return max((e["world"] for e in self.all_events("group") if e["op"] == "init_process_group"), default=1)

    @cached_property
    def reduces_gradients(self) -> bool:
        """Do the script's processes reduce gradients, by DDP or by hand: are they replicas of one model?"""
        ddp = any(len(e["ranks"]) > 1 for e in self.all_events("ddp", "fsdp"))
        return self.world_size > 1 and (ddp or self.reduces_by_hand)

    @cached_property
    def meant_as_replicas(self) -> bool:
        """Are the processes meant as replicas, though nothing is reduced? A sampler deals them the examples of one data
        set, or they are given the same weights at the start. (Where they send each other messages, or weights in
        mid-training, they may well keep one model in another way.)"""
        dealt = any(self.loaders[0].get(n, {}).get("sampler") == "distributed" for n in self.training_loaders)
        sent = [(e["op"], stepped) for events in self.ranks for e, stepped in _weights_sent(events)]
        given = any(op == "broadcast" for op, _ in sent)
        return (
            self.world_size > 1
            and (dealt or given)
            and not any(self.all_events("p2p"))
            and not any(late for _, late in sent)
        )

    @cached_property
    def exchanges_weights(self) -> bool:
        """Do the ranks, each with examples that a sampler deals it, send weights as they are (no averages) in
        mid-training, and reduce nothing?"""
        dealt = any(self.loaders[0].get(n, {}).get("sampler") == "distributed" for n in self.training_loaders)
        late = [[e["op"] for e, stepped in _weights_sent(events) if stepped] for events in self.ranks]
        plain = all(ops and set(ops) == {"broadcast"} for ops in late)
        reduced = self.reduces_gradients or any(e.get("of") == "grad" for e in self.all_events("coll"))
        return self.world_size > 1 and dealt and plain and not reduced and not any(self.all_events("p2p"))

    @cached_property
    def peers(self) -> list[int]:
        """Rank 0 and those that train one model with it: the smallest group of DDP or FSDP that it is in; without them
        all ranks."""
        groups = [e["ranks"] for e in self.events(0, "ddp", "fsdp") if len(e["ranks"]) > 1]
        return [r for r in min(groups, key=len, default=range(self.processes)) if r < self.processes]

    @cached_property
    def completed(self) -> bool:
        """Did the script come to its end, on all ranks?"""
        last = [events[-1] if events else {} for events in self.ranks]
        return not self.cut and all(e.get("k") == "end" and not e.get("failed") for e in last)

    @cached_property
    def reduces_by_hand(self) -> bool:
        counts = Counter(
            rank for rank in range(self.processes) for e in self.events(rank, "coll") if e.get("of") == "grad"
        )
        return len(counts) == self.processes

    @cached_property
    def model_parallel(self) -> set[str]:
        """Weights that are parts of one model, as in tensor parallelism by hand: not the same at the start, and their
        gradients never reduced, where those of others are."""
        per_rank: Iterator[Iterator[Event]] = (self.events(rank, "before") for rank in range(self.processes))
        first: list[dict[str, Any]] = [next((e["weights"] for e in events if e["weights"]), {}) for events in per_rank]
        sent = [e.get("number") for e in self.events(0, "coll") if e.get("of") == "grad"]
        if any(self.events(0, "ddp")) or len(list(self.events(0, "optimizer"))) != 1 or not sent or None in sent:
            return set()
        numbered = enumerate(first[0].items(), 1)
        return {name for n, (name, w) in numbered if n not in sent and any(f.get(name) != w for f in first[1:])}

    @cached_property
    def averages_weights(self) -> bool:
        """Are weights themselves reduced in mid-training, as local SGD does?"""
        for events in self.ranks:
            stepped = False
            for e in events:
                stepped = stepped or e["k"] == "step"
                if stepped and e["k"] == "coll" and e.get("of") == "weight" and "reduce" in e["op"]:
                    return True
        return False

    @cached_property
    def loaders(self) -> list[dict[str, Event]]:
        return [{e["loader"]: e for e in self.events(rank, "loader")} for rank in range(self.processes)]

    @cached_property
    def passes(self) -> list[list[Pass]]:
        return [self._passes(events) for events in self.ranks]

    def _passes(self, events: list[Event]) -> list[Pass]:
        found: dict[int, Pass] = {}
        waiting: dict[str, int] = {}  # loader -> its last yields in a row, that no backward followed yet
        latest: dict[str, Pass] = {}
        for position, e in enumerate(events):
            kind = e["k"]
            if kind == "pass":
                found[e["n"]] = Pass(e["loader"], e["n"], e["at"], e.get("epoch"), begin=position, end=position)
                waiting = {}
            elif kind == "yield" and e["n"] in found:
                one = found[e["n"]]
                one.yields.append(e)
                one.end = position
                if e.get("grad", True):
                    waiting[e["loader"]] = waiting.get(e["loader"], 0) + 1
                    latest[e["loader"]] = one
            elif kind == "pass_end" and e["n"] in found:
                found[e["n"]].complete, found[e["n"]].end = True, position
            elif kind == "backward":  # several batches may have been read before the first is trained on
                for loader in [name for name, count in waiting.items() if count]:
                    latest[loader].trained += 1
                    waiting[loader] -= 1
            elif kind == "step":  # one may have been read ahead
                waiting = {loader: min(count, 1) for loader, count in waiting.items()}
        return list(found.values())

    @cached_property
    def training_loaders(self) -> set[str]:
        """Loaders whose batches feed a backward, on any rank."""
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for passes in self.passes:
            for one in passes:
                counts[one.loader][0] += one.trained
                counts[one.loader][1] += len(one.yields)
        return {n for n, (fed, all_) in counts.items() if fed >= MIN_TRAINED and fed * 2 >= all_}

    def steps(self, rank: int = 0) -> int:
        return max((e["step"] for e in self.events(rank, "step")), default=0)


def _weights_sent(events: list[Event]) -> Iterator[tuple[Event, bool]]:
    """Collectives of weights, and whether a step was made before."""
    stepped = False
    for e in events:
        stepped = stepped or e["k"] == "step"
        if e["k"] == "coll" and e.get("of") == "weight":
            yield e, stepped


def file_line(at: Any) -> str:
    """ "file:line", the file as it lies from here if that is shorter."""
    if not at:
        return ""
    path, line = at[0], at[1]
    near = os.path.relpath(path)
    return f"{near if len(near) < len(path) else path}:{line}"


def read_run(directory: str, processes: int, cut: bool = False) -> RecordedRun:
    """The records of all ranks; of a process that was killed, what it had written."""
    names = ("workers-{}.jsonl", "rank-{}.jsonl")  # a rank's own events last: they tell how it ended
    per_rank = ([os.path.join(directory, name.format(rank)) for name in names] for rank in range(processes))
    return RecordedRun([[event for path in paths for event in read_lines(path)] for paths in per_rank], cut)


def read_lines(path: str) -> list[Event]:
    found: list[Event] = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    found.append(json.loads(line))
                except ValueError:  # the end of one that was killed
                    continue
    except OSError:
        return found
    return found
