"""The events of all ranks, and queries that several rules share.

An event is a dict. Every event has `k`, its kind. All kinds except "worker" also have `t` (seconds, without the time
that recording took) and `at` ([file, line] of the script, or []). The other fields, by kind:

    loader        loader: name; size, batch, workers, sampler and further settings; length: number of batches;
                  holds: digests of the data set; sampler_at, cut_at: lines that make the sampler and the Subset;
                  cut: digest of the Subset's indices; initialize: first line of worker_init_fn
    pass          An iteration over a loader begins. loader; n: number of the pass; epoch: of the sampler
    yield         loader, n; idx: indices; rows: digests of the rows, by tensor; padded: the same for padded rows
                  (padded_rows.py); waited: seconds; grad: are gradients enabled?
    pass_end      The loader was read to its end. loader, n; vars: the numbers in the script's variables
    loop_end      The loop over a loader that reads a batch ahead has ended. loader; vars
    worker        n; worker: number of the worker; begun: generator -> its state when the worker began, for the
                  generators that the worker used
    ddp, fsdp     ranks: of the group; ddp: number of the module; find_unused, broadcasts: its settings; parameters:
                  how many it has
    replaced      This line replaced a parameter of a DDP module by another
    cut           whole: name -> sample of the weight before fully_shard sharded it
    forward       ddp: number of the DDP module, -1 for FSDP, None for neither; digest: of the inputs
    mode          ddp; module: class; of: number of modules that depend on the mode; count: number of these in
                  evaluation mode; still: some of their names; digest: of all their names
    norm          name, kind, ddp; size: number of examples; trained: is its weight trained?
    search        ddp; seconds: time that DDP searched for unused parameters
    past          A forward bypassed this DDP module. ddp
    own_reduction The script decides how DDP or FSDP combines gradients
    no_sync, loaded, initialized, join      a call of no_sync, load_state_dict of a model, torch.nn.init, Join
    backward      synced, local: DDP modules that reduce in it, or that are under no_sync; form: loss_kind;
                  mean: the same, but "other" if a hook may divide the gradients; count: loss_divisor;
                  terms: loss_terms; means: mean_sizes; draws, masked: DrawRecorder.take; unsent: is FSDP's reduction
                  turned off? cut_at: line of a gather whose result is in the loss without a gradient;
                  reached: DDP module -> number of parameters reached; library: does a library call backward?
    seed          generator: "torch's", "Python's" or "NumPy's"; value: its seed
    dropped       Gradients were dropped before a step used them. opt; passes: numbers, from 1, of their backward passes
    optimizer     opt: its number; lr: of each group
    before        A step begins. opt; step: number of steps made; lr; parameters: number of trained parameters;
                  without: names of those without a gradient; backwards: number of backward passes so far;
                  rescaled: were gradients divided? scale: loss scale; logged: DDP module -> seconds of communication;
                  unwaited: [number of handles without a wait, line]; shrunk: factor that the gradient shards were
                  multiplied by; uses: numbers of the backward passes that the gradients come from.
                  At some steps also samples by name (weights; own: gradients after the backward; grads: gradients now),
                  own_norm: L2 norm of the gradients after the backward, settings, outside (name -> [line, how, call
                  stack]) and made_at
    step          A step has ended. opt; step; rescaled; machine: threads, cores, queued, devices. At some steps also
                  samples: weights, state; and shards: name -> did the step change this rank's shard?
    of_shard      An operation on a shard inside a step. opt; kind: "product" or "norm"; op; weight: name; shape: of the
                  shard; whole: shape of the weight
    shards        A step on shards has ended. opt; optimizer: its class; exchanged: did the step communicate?
    moved         Weights changed between this step and the next, outside the optimizer. opt, step
    buffers       opt, step; buffers: samples of buffers that are never sent; sent: samples of buffers that DDP
                  overwrites
    restored      load_state_dict of the optimizer or of its scheduler was called. opt
    sched_made    A scheduler was created. sched: its number
    sched         A scheduler has stepped. sched, opt, lr, library; metric: of ReduceLROnPlateau; type; horizon, name:
                  value and name of its length setting; base: initial lr; count: number of steps
    sched_error   Its step raised an error. The fields of sched without opt, lr and library; text: of the error
    clip          scale: loss scale in the gradients; norm; bound; changed: did it make gradients smaller?
    coll          op; n, d, by, root: number of elements, dtype, reduction, root; of: "grad" or "weight"; number: of the
                  parameter; result: of a small sum; sent, vars: its input after an evaluation, and the script's
                  variables; path: call stack. For gradients also clipped, digest, given (sample), by (lines)
    p2p           op
    refused       A call raised an error. op; text: of the error
    group         op; world: size after it
    spawn         torch.multiprocessing was called. joined: is the process in a group already?
    said          Output. how, text, path, vars
    wrote         A file was opened for writing. path
    save          A checkpoint was saved. path, bytes, seconds, wrapped; own_buffers, other_buffers: number of its
                  buffers with this rank's values, and with others
    item          An item of a stream that a library shards. row: digest
    wait          A call waited for the device. kind, seconds
    trouble       text: of an error inside a recorder
    unseen        The recorders missed the import of torch. It is the only event of its rank
    limit         Doctor ends the script: it has made the steps that --steps asks for
    end           The script has ended. failed: with an error?
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
MIN_TRAINED = 2  # minimum number of yields that a backward followed, in a training loader


@dataclass
class Pass:
    """One iteration over a loader, on one rank."""

    loader: str  # the loader's name
    n: int  # the number of the pass on its rank
    at: list[Any]  # the line of the loop
    epoch: Any = None  # the sampler's `epoch` when the pass began
    yields: list[Event] = field(default_factory=list)  # its "yield" events
    trained: int = 0  # the number of yields that a backward followed
    complete: bool = False  # was the loader read to its end?
    begin: int = 0  # position of its first event in the rank's events
    end: int = 0  # position of its last event

    @property
    def training(self) -> bool:
        """Was the model trained on the batches of this pass?"""
        return self.trained >= MIN_TRAINED and self.trained * 2 >= len(self.yields)

    @property
    def indices(self) -> list[int] | None:
        """The indices of all examples; None if the indices of a batch are unknown."""
        if any(y["idx"] is None for y in self.yields):
            return None
        return [i for y in self.yields for i in y["idx"]]

    @property
    def digests(self) -> list[int]:
        """The digests of the rows in the first tensor of each batch."""
        return [digest for y in self.yields if y["rows"] for digest in y["rows"][0]]


class RecordedRun:
    """The events of all ranks."""

    def __init__(self, ranks: Sequence[list[Event]], cut: bool = False) -> None:
        self.ranks = list(ranks)  # the events of each rank, in order
        self.cut = cut  # was the script ended from outside?
        self.processes = len(self.ranks)  # the number of ranks

    def events(self, rank: int, *kinds: str, **fields: Any) -> Iterator[Event]:
        """The rank's events of these kinds with these field values."""
        return (
            event
            for event in self.ranks[rank]
            if event["k"] in kinds and all(event.get(name) == value for name, value in fields.items())
        )

    def all_events(self, *kinds: str, **fields: Any) -> Iterator[Event]:
        """The events of these kinds with these field values on all ranks, rank by rank."""
        return (event for rank in range(self.processes) for event in self.events(rank, *kinds, **fields))

    def has(self, *kinds: str, **fields: Any) -> bool:
        """Does any rank have such an event?"""
        return any(True for _ in self.all_events(*kinds, **fields))

    def line(self, *kinds: str, rank: int = 0, **fields: Any) -> Any:
        """[file, line] of the rank's first event of these kinds with these field values, or None."""
        return next((event["at"] for event in self.events(rank, *kinds, **fields)), None)

    def files(self, *kinds: str) -> list[str]:
        """The script's files that contain the line of an event of these kinds on rank 0."""
        return sorted({event["at"][0] for event in self.events(0, *kinds) if event["at"]})

    def per_peer(self, *kinds: str, **fields: Any) -> list[list[Event]]:
        """For each peer: its events of these kinds with these field values."""
        return [list(self.events(rank, *kinds, **fields)) for rank in self.peers]

    def together(self, kind: str) -> list[tuple[Event, ...]]:
        """The peers' events of a kind, zipped: the first event of each peer, the second event of each peer, and so on.
        [] if the peers have different numbers of events."""
        per_peer = self.per_peer(kind)
        return list(zip(*per_peer)) if len(set(map(len, per_peer))) == 1 else []

    def about(self, loader: str, rank: int = 0) -> Event:
        """A loader's "loader" event, or {}."""
        return self.loaders[rank].get(loader, {})

    def over(self, loader: str, rank: int = 0, trained: bool = False) -> list[Pass]:
        """A rank's passes over a loader that read at least one batch. trained: only passes that train the model."""
        own = (one for one in self.passes[rank] if one.loader == loader and one.yields)
        return [one for one in own if one.training or not trained]

    @cached_property
    def world_size(self) -> int:
        """The number of processes in the script's default process group; 1 without one."""
        return max((e["world"] for e in self.all_events("group") if e["op"] == "init_process_group"), default=1)

    @cached_property
    def reduces_gradients(self) -> bool:
        """Does DDP, FSDP or a collective of the script reduce gradients?"""
        wrapped = any(len(e["ranks"]) > 1 for e in self.all_events("ddp", "fsdp"))
        return self.world_size > 1 and (wrapped or self.reduces_by_hand)

    @cached_property
    def meant_as_replicas(self) -> bool:
        """Does the script mean the processes to be replicas of one model?

        Yes if a sampler shards one data set over the processes, or if weights are broadcast before the first step. No
        if the processes send each other messages, or weights in mid-training: that may synchronize the model in another
        way.
        """
        given = any(e["op"] == "broadcast" for e, _ in self._weights_sent)
        alone = not self.has("p2p") and not any(stepped for _, stepped in self._weights_sent)
        return self.world_size > 1 and (self._data_sharded or given) and alone

    @cached_property
    def exchanges_weights(self) -> bool:
        """Do ranks with shards of one data set broadcast weights in mid-training, without reducing gradients?"""
        late = [{e["op"] for e, stepped in _weights_sent(events) if stepped} for events in self.ranks]
        plain = all(ops == {"broadcast"} for ops in late)
        reduced = self.reduces_gradients or self.has("coll", of="grad")
        return self.world_size > 1 and self._data_sharded and plain and not reduced and not self.has("p2p")

    @cached_property
    def _data_sharded(self) -> bool:
        """Does a sampler shard the training data over the ranks?"""
        return any(self.about(loader).get("sampler") == "distributed" for loader in self.training_loaders)

    @cached_property
    def _weights_sent(self) -> list[tuple[Event, bool]]:
        """(event, was a step made before it?) for each collective that sends weights, on all ranks."""
        return [sent for events in self.ranks for sent in _weights_sent(events)]

    @cached_property
    def peers(self) -> list[int]:
        """Rank 0 and the ranks that train one model with rank 0: the smallest DDP or FSDP group of rank 0. Without such
        a group: all ranks."""
        groups = [e["ranks"] for e in self.events(0, "ddp", "fsdp") if len(e["ranks"]) > 1]
        return [r for r in min(groups, key=len, default=range(self.processes)) if r < self.processes]

    @cached_property
    def completed(self) -> bool:
        """Did the script finish on all ranks?"""
        last = [events[-1] if events else {} for events in self.ranks]
        return not self.cut and all(e.get("k") == "end" and not e.get("failed") for e in last)

    @cached_property
    def shortened(self) -> bool:
        """Would the script have made more steps, had it not been ended, or failed?"""
        return self.cut or self.has("limit") or self.failed

    @cached_property
    def failed(self) -> bool:
        """Did the script end with an error on a rank?"""
        return self.has("end", failed=True)

    @cached_property
    def reduces_by_hand(self) -> bool:
        """Does every rank reduce gradients with the script's collectives (hand-written data parallelism)?"""
        return all(any(self.events(rank, "coll", of="grad")) for rank in range(self.processes))

    @cached_property
    def model_parallel(self) -> set[str]:
        """Names of weights that are shards of one model, as in hand-written tensor parallelism. Such weights differ at
        the start, and their gradients are never reduced, but gradients of other weights are."""
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
        """For each rank: loader name -> "loader" event."""
        return [{e["loader"]: e for e in self.events(rank, "loader")} for rank in range(self.processes)]

    @cached_property
    def passes(self) -> list[list[Pass]]:
        """For each rank: its passes, in order."""
        return [self._passes(events) for events in self.ranks]

    def _passes(self, events: list[Event]) -> list[Pass]:
        found: dict[int, Pass] = {}
        waiting: dict[str, int] = {}  # loader -> number of yields since the last backward
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
            elif kind == "backward":  # the script may have read several batches before it trains on the first
                for loader in [name for name, count in waiting.items() if count]:
                    latest[loader].trained += 1
                    waiting[loader] -= 1
            elif kind == "step":  # the script may have read one batch ahead
                waiting = {loader: min(count, 1) for loader, count in waiting.items()}
        for one in found.values():  # some scripts never ask for another batch after the last one
            length = lengths.get(one.loader)
            one.complete = one.complete or bool(length and len(one.yields) >= length)
        return list(found.values())

    @cached_property
    def training_loaders(self) -> set[str]:
        """The names of the loaders that any rank trains on."""
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for passes in self.passes:
            for one in passes:
                counts[one.loader][0] += one.trained
                counts[one.loader][1] += len(one.yields)
        return {n for n, (fed, all_) in counts.items() if fed >= MIN_TRAINED and fed * 2 >= all_}

    def at_common_steps(self, kind: str, field: str = "k") -> list[list[Event]]:
        """For each optimizer step: the peers' events of this kind with this field. Skips steps where a peer has no such
        event."""
        by_step = [{(e["opt"], e["step"]): e for e in self.events(rank, kind) if e.get(field)} for rank in self.peers]
        return [[events[key] for events in by_step] for key in by_step[0] if all(key in events for events in by_step)]

    def steps(self, rank: int = 0) -> int:
        """The number of steps of the rank's optimizer with the most steps."""
        return max((e["step"] for e in self.events(rank, "step")), default=0)


def _weights_sent(events: list[Event]) -> Iterator[tuple[Event, bool]]:
    """(event, was a step made before it?) for each collective that sends weights. After the first step, a collective on
    a copy of weights counts only if weights change afterwards. Otherwise the script did not use the result."""
    stepped = False
    for n, e in enumerate(events):
        stepped = stepped or e["k"] == "step"
        if e["k"] == "coll" and e.get("of") == "weight" and not (stepped and e.get("copy") and not _moved(events, n)):
            yield e, stepped


def _moved(events: list[Event], begin: int) -> bool:
    """Do weights change outside the optimizers after event number `begin`, before each optimizer has stepped once?"""
    optimizers = len({e["opt"] for e in events if e["k"] == "step"})
    for e in events[begin:]:
        if e["k"] == "moved":
            return True
        optimizers -= e["k"] == "step"
        if optimizers <= 0:
            return False
    return False


def file_line(at: Any) -> str:
    """Format [file, line] as "file:line", with the absolute or relative path, whichever is shorter. None or []: ""."""
    if not at:
        return ""
    path, line = at[0], at[1]
    near = os.path.relpath(path)
    return f"{near if len(near) < len(path) else path}:{line}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Join the first `most` names, followed by ", ..." if there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def finding_at(cause: str, at: Any, evidence: str, beside: Any = None, fitting: str = "") -> Finding:
    """Build a Finding. at, beside: [file, line], or None or [] without a line. fitting: the remedy for this run."""
    return Finding(cause, file_line(at), evidence, file_line(beside), fitting)


def restored_line(run: RecordedRun, before: Event) -> Any:
    """The line where only some ranks load the state of an optimizer or its scheduler before this step, or None."""

    def earlier(e: Event) -> bool:
        return e["k"] == "restored" or e["opt"] != before["opt"] or e["step"] < before["step"]

    begun = [takewhile(earlier, events) for events in run.per_peer("restored", "before")]
    per_rank = [[e["at"] for e in events if e["k"] == "restored" and e["at"]] for events in begun]
    return next((at for mine in per_rank for at in mine if any(mine.count(at) != o.count(at) for o in per_rank)), None)


def computes_parts(run: RecordedRun) -> bool:
    """Do the ranks compute parts of a model? Then the first tensors that they exchange in a forward differ, although
    the model's inputs may be equal."""
    sent = zip(*([e["in_forward"] for e in events if "in_forward" in e] for events in run.per_peer("coll")))
    return len(set(next(sent, ()))) > 1


Rule = Callable[[RecordedRun], Iterator[Finding]]


def first_of(run: RecordedRun, *rules: Rule) -> list[Finding]:
    """The first finding of the first rule that has one. A rule yields its findings with the most serious first."""
    return list(islice((finding for rule in rules for finding in rule(run)), 1))


def first_of_each(run: RecordedRun, *rules: Rule) -> list[Finding]:
    """The first finding of each rule."""
    return [finding for rule in rules for finding in first_of(run, rule)]


def read_run(directory: str, processes: int, cut: bool = False) -> RecordedRun:
    """Read the logs of all ranks. The log of a killed process may be incomplete."""
    names = ("workers-{}.jsonl", "rank-{}.jsonl")  # in this order: the rank's events end with "end"
    per_rank = ([os.path.join(directory, name.format(rank)) for name in names] for rank in range(processes))
    ranks = [[event for path in paths for event in read_records(path)] for paths in per_rank]
    unify_padded(ranks)
    return RecordedRun(ranks, cut)
