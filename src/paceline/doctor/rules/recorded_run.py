"""The events of all ranks, and the questions that several rules ask of them.

An event is a dict. Its fields `k`, the kind, `t`, seconds without recording's own, and `at`, [file, line] of the script
or [], are in all of them. The others, by kind:

    loader        loader: name; size, batch, workers, sampler and more of its settings; length: batches; holds: digests
                  of the data set; sampler_at, cut_at: lines that make the sampler and the Subset; cut: digest of the
                  Subset's indices; initialize: first line of worker_init_fn
    pass          loader; n: number of the pass; epoch: the sampler's. An iteration over a loader begins
    yield         loader, n; idx: indices; rows, padded: digests, padded_rows by tensor; waited: seconds; grad: are
                  gradients enabled?
    pass_end      loader, n. The loader was read to its end. vars: the numbers in the script's variables
    loop_end      loader; vars. The loop over a loader that reads a batch ahead has ended
    worker        n; worker: its number; begun: generator -> state at its begin, of the generators that were used
    ddp, fsdp     ranks: of the group; ddp: number; find_unused, broadcasts; parameters: how many
    replaced      a parameter of a DDP module was replaced by another one, at this line
    cut           whole: name -> sample of the weight that fully_shard has cut
    forward       ddp: number, -1 for FSDP, None for neither; digest: of the inputs
    mode          ddp; module: class; count of its `of` parts are in evaluation mode; still: some of their names; digest
    norm          name, kind, ddp; size: examples; trained: is its weight trained?
    search        ddp; seconds that find_unused_parameters took
    past          ddp. A forward went past this DDP module
    no_sync, loaded, initialized, join      one was called: load_state_dict of a model, torch.nn.init, Join
    backward      synced, local: DDP modules that reduce, or are under no_sync; mean: loss_kind, "other" if a hook may
                  divide; form: loss_kind; count: loss_divisor; terms: loss_terms; means: mean_sizes;
                  draws, masked: DrawRecorder.take; unsent: is FSDP told not to reduce? reached: DDP module
                  -> parameters reached; library: does a library call it?
    seed          generator: "torch's", "Python's" or "NumPy's"; value: its seed
    dropped       opt; passes: numbers of the backward passes, from 1, whose gradients went before a step used them
    optimizer     opt: number; lr: of each group
    before        opt; step: made so far; lr; parameters: trained ones; without: those without a gradient; backwards;
                  rescaled: were gradients divided? scale: loss scale; logged: DDP module -> seconds of communication;
                  unwaited: [handles, line]; shrunk: factor of the shards; uses: numbers of the backward passes whose
                  gradients it is given. At some steps samples by name: weights; own: gradients after the backward;
                  grads: gradients now; and settings, outside (name -> [line, how, call stack]), made_at
    step          opt; step; rescaled; machine: threads, cores, queued, devices. At some steps samples: weights, state
    of_shard      opt; kind: "product" or "norm"; op; weight; shape: of the shard; whole: of the weight. In a step
    shards        opt; optimizer: its class; exchanged: did the step exchange anything? At its end
    moved         opt, step. Weights changed between this step and the next, not by the optimizer
    buffers       opt, step; buffers: samples of those that nothing sends; sent: of those that DDP overwrites
    restored      opt. Its load_state_dict was called, or that of its scheduler
    sched_made    sched: number
    sched         sched, opt, lr, library; type; horizon, name: its length and what it calls it; base: lr; count: steps
    sched_error   the same without opt, lr and library; text
    clip          scale: loss scale in the gradients; norm; bound; changed: did it make gradients smaller?
    coll          op; n, d, by, root: elements, dtype, reduction, root; of: "grad" or "weight", number: the parameter's;
                  result: of a small sum; sent, vars: what it was given after an evaluation; path: call stack.
                  Of gradients: clipped, digest, given (sample), by (lines)
    p2p, refused  op; text: of the error
    group         op; world: size after it
    spawn         joined: is the process in a group already? torch.multiprocessing was called
    said          how, text, path, vars: output; wrote: path: a file that was opened; save: path, bytes, seconds,
                  wrapped
    wait          kind, seconds: a call that waits for the device
    trouble       text: of an error inside a recorder
    unseen        torch was loaded in a way that the recorders do not see: the only event of its rank
    end           failed: the script has ended
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, takewhile
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules.padded_rows import unify_padded
from paceline.observe.records import read_records

Event = dict[str, Any]
MIN_TRAINED = 2  # yields followed by a backward, of a loader that trains


@dataclass
class Pass:
    """One iteration over a loader, on one rank."""

    loader: str  # the loader's name
    n: int  # the number of the pass in its process
    at: list[Any]  # the line of the loop
    epoch: Any = None  # the sampler's `epoch` when it began
    yields: list[Event] = field(default_factory=list)  # its "yield" events
    trained: int = 0  # how many of them a backward followed
    complete: bool = False  # was the loader read to its end?
    begin: int = 0  # places in the rank's events
    end: int = 0

    @property
    def training(self) -> bool:
        """Was the model trained on the batches of this pass?"""
        return self.trained >= MIN_TRAINED and self.trained * 2 >= len(self.yields)

    @property
    def indices(self) -> list[int] | None:
        """The indices of all examples; None where a batch has none."""
        if any(y["idx"] is None for y in self.yields):
            return None
        return [i for y in self.yields for i in y["idx"]]

    @property
    def digests(self) -> list[int]:
        """The digests of the rows that were read, by the first tensor of each batch."""
        return [digest for y in self.yields if y["rows"] for digest in y["rows"][0]]


class RecordedRun:
    """The events of all ranks."""

    def __init__(self, ranks: Sequence[list[Event]], cut: bool = False) -> None:
        self.ranks = list(ranks)  # the events of each rank, in order
        self.cut = cut  # was the script ended from outside?
        self.processes = len(self.ranks)  # the number of ranks

    def events(self, rank: int, *kinds: str, **fields: Any) -> Iterator[Event]:
        """The events of these kinds on one rank, with these values in their fields."""
        return (
            event
            for event in self.ranks[rank]
            if event["k"] in kinds and all(event.get(name) == value for name, value in fields.items())
        )

    def all_events(self, *kinds: str, **fields: Any) -> Iterator[Event]:
        """The same on all ranks, one after the other."""
        return (event for rank in range(self.processes) for event in self.events(rank, *kinds, **fields))

    def has(self, *kinds: str, **fields: Any) -> bool:
        """Has any rank such an event?"""
        return any(True for _ in self.all_events(*kinds, **fields))

    def line(self, *kinds: str, rank: int = 0, **fields: Any) -> Any:
        """[file, line] of the first such event of a rank; None where there is none."""
        return next((event["at"] for event in self.events(rank, *kinds, **fields)), None)

    def files(self, *kinds: str) -> list[str]:
        """The script's files with a line of such an event of rank 0."""
        return sorted({event["at"][0] for event in self.events(0, *kinds) if event["at"]})

    def per_peer(self, *kinds: str, **fields: Any) -> list[list[Event]]:
        """For each peer: such events."""
        return [list(self.events(rank, *kinds, **fields)) for rank in self.peers]

    def together(self, kind: str) -> list[tuple[Event, ...]]:
        """The peers' events of a kind: the first of each, the second of each, and so on; [] where the peers have
        unequally many."""
        per_peer = self.per_peer(kind)
        return list(zip(*per_peer)) if len(set(map(len, per_peer))) == 1 else []

    def about(self, loader: str, rank: int = 0) -> Event:
        """What is known of a loader: its "loader" event, or {}."""
        return self.loaders[rank].get(loader, {})

    def over(self, loader: str, rank: int = 0, trained: bool = False) -> list[Pass]:
        """A rank's passes over a loader that have read anything. trained: those in which it trained."""
        own = (one for one in self.passes[rank] if one.loader == loader and one.yields)
        return [one for one in own if one.training or not trained]

    @cached_property
    def world_size(self) -> int:
        """The number of processes in the script's default process group; 1 without one."""
        return max((e["world"] for e in self.all_events("group") if e["op"] == "init_process_group"), default=1)

    @cached_property
    def reduces_gradients(self) -> bool:
        """Are gradients reduced, by DDP, by FSDP or by the script's own collectives?"""
        wrapped = any(len(e["ranks"]) > 1 for e in self.all_events("ddp", "fsdp"))
        return self.world_size > 1 and (wrapped or self.reduces_by_hand)

    @cached_property
    def meant_as_replicas(self) -> bool:
        """Are the processes meant as replicas of one model, though nothing is reduced? They are where a sampler shards
        one data set over them, or weights are broadcast before the first step; not where they send each other messages,
        or weights in mid-training, since that may keep one model in another way."""
        given = any(e["op"] == "broadcast" for e, _ in self._weights_sent)
        alone = not self.has("p2p") and not any(stepped for _, stepped in self._weights_sent)
        return self.world_size > 1 and (self._dealt or given) and alone

    @cached_property
    def exchanges_weights(self) -> bool:
        """Do ranks with shards of one data set broadcast weights in mid-training, and reduce nothing?"""
        late = [{e["op"] for e, stepped in _weights_sent(events) if stepped} for events in self.ranks]
        plain = all(ops == {"broadcast"} for ops in late)
        reduced = self.reduces_gradients or self.has("coll", of="grad")
        return self.world_size > 1 and self._dealt and plain and not reduced and not self.has("p2p")

    @cached_property
    def _dealt(self) -> bool:
        """Does a sampler shard the training data over the ranks?"""
        return any(self.about(loader).get("sampler") == "distributed" for loader in self.training_loaders)

    @cached_property
    def _weights_sent(self) -> list[tuple[Event, bool]]:
        """(event, was a step made before it?) of all ranks' collectives that send weights."""
        return [sent for events in self.ranks for sent in _weights_sent(events)]

    @cached_property
    def peers(self) -> list[int]:
        """Rank 0 and the ranks that train one model with it: its smallest DDP or FSDP group; without one, all ranks."""
        groups = [e["ranks"] for e in self.events(0, "ddp", "fsdp") if len(e["ranks"]) > 1]
        return [r for r in min(groups, key=len, default=range(self.processes)) if r < self.processes]

    @cached_property
    def completed(self) -> bool:
        """Did the script come to its end on all ranks?"""
        last = [events[-1] if events else {} for events in self.ranks]
        return not self.cut and all(e.get("k") == "end" and not e.get("failed") for e in last)

    @cached_property
    def reduces_by_hand(self) -> bool:
        """Does each rank reduce gradients by a collective of the script's own?"""
        return all(any(self.events(rank, "coll", of="grad")) for rank in range(self.processes))

    @cached_property
    def model_parallel(self) -> set[str]:
        """Names of weights that are parts of one model, as in tensor parallelism by hand: they differ at the start, and
        their gradients are never reduced, where those of other weights are."""
        first: list[dict[str, Any]] = [
            next((e["weights"] for e in self.events(rank, "before") if e["weights"]), {})
            for rank in range(self.processes)
        ]
        sent = [e.get("number") for e in self.events(0, "coll", of="grad")]
        if any(self.events(0, "ddp")) or len(list(self.events(0, "optimizer"))) != 1 or not sent or None in sent:
            return set()
        numbered = enumerate(first[0].items(), 1)
        return {name for n, (name, w) in numbered if n not in sent and any(f.get(name) != w for f in first[1:])}

    @cached_property
    def averages_weights(self) -> bool:
        """Are weights reduced in mid-training, as in local SGD?"""
        return any(stepped and "reduce" in e["op"] for e, stepped in self._weights_sent)

    @cached_property
    def loaders(self) -> list[dict[str, Event]]:
        """For each rank: a loader's name -> its "loader" event."""
        return [{e["loader"]: e for e in self.events(rank, "loader")} for rank in range(self.processes)]

    @cached_property
    def passes(self) -> list[list[Pass]]:
        """For each rank: its passes, in order."""
        return [self._passes(events) for events in self.ranks]

    def _passes(self, events: list[Event]) -> list[Pass]:
        found: dict[int, Pass] = {}
        waiting: dict[str, int] = {}  # loader -> yields since the last backward
        latest: dict[str, Pass] = {}  # loader -> the pass of its last yield
        lengths = {e["loader"]: e.get("length") for e in events if e["k"] == "loader"}
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
            elif kind == "backward":  # several batches may have been read before the model is trained on the first
                for loader in [name for name, count in waiting.items() if count]:
                    latest[loader].trained += 1
                    waiting[loader] -= 1
            elif kind == "step":  # one batch may have been read ahead
                waiting = {loader: min(count, 1) for loader, count in waiting.items()}
        for one in found.values():  # some never ask for another batch after the last one
            length = lengths.get(one.loader)
            one.complete = one.complete or bool(length and len(one.yields) >= length)
        return list(found.values())

    @cached_property
    def training_loaders(self) -> set[str]:
        """Names of the loaders whose batches are trained on, on any rank."""
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for passes in self.passes:
            for one in passes:
                counts[one.loader][0] += one.trained
                counts[one.loader][1] += len(one.yields)
        return {n for n, (fed, all_) in counts.items() if fed >= MIN_TRAINED and fed * 2 >= all_}

    def at_common_steps(self, kind: str, field: str = "k") -> list[list[Event]]:
        """The peers' events of a kind, with this field, for each step of an optimizer at which all peers have one."""
        by_step = [{(e["opt"], e["step"]): e for e in self.events(rank, kind) if e.get(field)} for rank in self.peers]
        return [[events[key] for events in by_step] for key in by_step[0] if all(key in events for events in by_step)]

    def steps(self, rank: int = 0) -> int:
        """The most steps that an optimizer of this rank made."""
        return max((e["step"] for e in self.events(rank, "step")), default=0)


def _weights_sent(events: list[Event]) -> Iterator[tuple[Event, bool]]:
    """(event, was a step made before it?) of the collectives that send weights. A copy counts in mid-training where
    weights change afterwards: nothing is averaged by a result that the script drops."""
    stepped = False
    for n, e in enumerate(events):
        stepped = stepped or e["k"] == "step"
        if e["k"] == "coll" and e.get("of") == "weight" and not (stepped and e.get("copy") and not _moved(events, n)):
            yield e, stepped


def _moved(events: list[Event], begin: int) -> bool:
    """Do weights change after this event, by no optimizer, before each optimizer has stepped once?"""
    optimizers = len({e["opt"] for e in events if e["k"] == "step"})
    for e in events[begin:]:
        if e["k"] == "moved":
            return True
        optimizers -= e["k"] == "step"
        if optimizers <= 0:
            return False
    return False


def file_line(at: Any) -> str:
    """ "file:line" of [file, line], with the shorter of the file's absolute and relative paths; "" of nothing."""
    if not at:
        return ""
    path, line = at[0], at[1]
    near = os.path.relpath(path)
    return f"{near if len(near) < len(path) else path}:{line}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first of these names, and whether there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def finding_at(cause: str, at: Any, evidence: str, beside: Any = None, fitting: str = "") -> Finding:
    """A Finding, from [file, line] of what it names; None or [] where there is no line. fitting: its own remedy."""
    return Finding(cause, file_line(at), evidence, file_line(beside), fitting)


def restored_line(run: RecordedRun, before: Event) -> Any:
    """The line where some ranks alone load the state of an optimizer, or of its scheduler, before this step of it; or
    None."""

    def earlier(e: Event) -> bool:
        return e["k"] == "restored" or e["opt"] != before["opt"] or e["step"] < before["step"]

    begun = [takewhile(earlier, events) for events in run.per_peer("restored", "before")]
    per_rank = [[e["at"] for e in events if e["k"] == "restored" and e["at"]] for events in begun]
    return next((at for mine in per_rank for at in mine if any(mine.count(at) != o.count(at) for o in per_rank)), None)


Rule = Callable[[RecordedRun], Iterator[Finding]]


def first_of(run: RecordedRun, *rules: Rule) -> list[Finding]:
    """The first finding of the first rule that has one. Each rule yields what it finds, the gravest first."""
    return list(islice((finding for rule in rules for finding in rule(run)), 1))


def first_of_each(run: RecordedRun, *rules: Rule) -> list[Finding]:
    """The first finding of each rule."""
    return [finding for rule in rules for finding in first_of(run, rule)]


def read_run(directory: str, processes: int, cut: bool = False) -> RecordedRun:
    """Read the logs of all ranks; of a process that was killed, what it had written."""
    names = ("workers-{}.jsonl", "rank-{}.jsonl")  # a rank's own events last: they tell how it ended
    per_rank = ([os.path.join(directory, name.format(rank)) for name in names] for rank in range(processes))
    ranks = [[event for path in paths for event in read_records(path)] for paths in per_rank]
    unify_padded(ranks)
    return RecordedRun(ranks, cut)
