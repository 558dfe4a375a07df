"""Rules about time and memory.

A cost is the share of a step's time that an activity takes. It is the median over rank 0's steps, without the first
three steps.

Each cost is timed directly instead of as the difference of two runs, so noise changes a share by a few hundredths of
its size. A cost is reported from the share at which a change is worthwhile: 5% of a step; 15% for waiting on data,
because collating a batch of small examples takes that much in healthy scripts with small models; 0.2% for the search of
`find_unused_parameters`, because removing the search costs nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean, median
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at
from paceline.doctor.rules.schedule_rules import micro_batches

SHARE = 0.05
DATA_SHARE = 0.15
DATA_SECONDS = 1e-3  # minimum per step: collating the smallest batch takes this long
SEARCH_SHARE = 0.002  # DDP's search alone, without its message
MIN_STEPS = 6  # minimum number of timed steps
_FIRST = 3  # leave out this many steps at the start


def findings(run: RecordedRun) -> list[Finding]:
    found: list[Finding] = []
    for rule in (_find_unused, _loader, _threads, _device, _waits, _no_sync, _checkpoints):
        found += rule(run)
    return found


def _steps(run: RecordedRun) -> list[tuple[float, list[Event]]]:
    """(seconds, events) of each step of the optimizer that steps most on rank 0, without the first steps."""
    made = Counter(e["opt"] for e in run.events(0, "step")).most_common(1)
    steps: list[tuple[float, list[Event]]] = []
    began, inside = None, []
    for e in run.ranks[0] if made else ():
        inside.append(e)
        if e["k"] in ("pass", "pass_end"):
            began = None  # an epoch ends here: the time until the next step belongs to no step
        if e["k"] == "step" and e["opt"] == made[0][0]:
            steps += [(e["t"] - began, inside)] if began is not None else []
            began, inside = e["t"], []
    return steps[_FIRST:]


def _share(run: RecordedRun, seconds: Callable[[Event], float]) -> tuple[float, float]:
    """(median share of a step, median seconds per step); zeros if there are too few steps.

    seconds: returns the seconds that an event takes.
    """
    steps = [(whole, sum(map(seconds, events))) for whole, events in _steps(run) if whole > 0]
    if len(steps) < MIN_STEPS:
        return 0.0, 0.0
    return median(part / whole for whole, part in steps), median(part for _, part in steps)


def _find_unused(run: RecordedRun) -> Iterator[Finding]:
    """find_unused: the search found every parameter used in every backward pass."""
    for ddp in run.events(0, "ddp", find_unused=True):
        number = str(ddp["ddp"])
        counts = [e["reached"].get(number) for e in run.all_events("backward") if number in (e.get("reached") or {})]
        all_used = all(c is not None and c >= ddp["parameters"] for c in counts)
        share, seconds = _share(run, partial(_seconds, "search", ddp=ddp["ddp"]))
        if len(counts) >= 2 * run.processes and all_used and share >= SEARCH_SHARE:
            evidence = (
                f"the loss used all {ddp['parameters']} parameters in each of {len(counts) // run.processes} "
                f"backward passes on all ranks; searching the graph took {seconds * 1e3:.2g} ms per step "
                f"({share:.1%}), plus a message"
            )
            yield finding_at("find_unused", ddp["at"], evidence)
            return


def _seconds(kind: str, e: Event, **fields: Any) -> float:
    """Seconds of this event if it has this kind and these fields; otherwise 0."""
    return e["seconds"] if e["k"] == kind and all(e.get(name) == value for name, value in fields.items()) else 0.0


def _loader(run: RecordedRun) -> Iterator[Finding]:
    """loader_starves, no_workers, no_pinned_memory."""
    trainers = run.training_loaders
    share, seconds = _share(run, lambda e: e["waited"] if e["k"] == "yield" and e["loader"] in trainers else 0.0)
    waited: dict[str, float] = defaultdict(float)
    for e in run.events(0, "yield"):
        waited[e["loader"]] += e["waited"]
    about = run.about(max(sorted(trainers), key=lambda n: waited[n], default=""))
    if share < DATA_SHARE or seconds < DATA_SECONDS or not about:
        return
    evidence = f"waiting for data took {seconds * 1e3:.3g} ms per step ({share:.0%} of it)"
    yield finding_at("loader_starves", about["at"], f"{evidence} (num_workers={about['workers']})")
    if about["workers"] == 0:
        yield finding_at("no_workers", about["at"], f"{evidence}; num_workers=0")
    if not about["pinned"] and any("devices" in e["machine"] for e in _measured(run)):
        yield finding_at("no_pinned_memory", about["at"], f"{evidence}; pin_memory=False")


def _measured(run: RecordedRun, rank: int = 0) -> list[Event]:
    """The step events with a snapshot of the machine."""
    return [e for e in run.events(rank, "step") if e.get("machine")]


def _threads(run: RecordedRun) -> Iterator[Finding]:
    """threads: there are more threads than cores, and threads wait for a core."""
    states = _measured(run)
    if len(states) < 2:
        return
    first, last = states[0], states[-1]
    threads, cores = last["machine"]["threads"], last["machine"]["cores"]
    seconds, queued = last["t"] - first["t"], (last["machine"]["queued"], first["machine"]["queued"])
    share = (queued[0] - queued[1]) / seconds if None not in queued and seconds > 0 else 0.0
    if threads * run.processes >= 2 * cores and threads > max(1, cores // run.processes) and share >= SHARE:
        evidence = (
            f"{run.processes} processes with {threads} threads each on {cores} cores; threads of rank 0 waited for a "
            f"core {share:.0%} of the time"
        )
        yield finding_at("threads", run.line("optimizer"), evidence)


def _device(run: RecordedRun) -> Iterator[Finding]:
    """one_device: several ranks hold memory on device 0 although there are other devices."""
    last = [e["machine"] for rank in range(run.processes) for e in _measured(run, rank)[-1:]]
    used = [machine["devices"] for machine in last if "devices" in machine]
    on_first = [rank for rank, devices in enumerate(used) if devices[0] > 0]
    if len(on_first) >= 2 and len(used[0]) >= 2:
        evidence = f"ranks {', '.join(map(str, on_first))} hold memory on device 0 of {len(used[0])} devices"
        yield finding_at("one_device", run.line("optimizer", rank=1), evidence)


def _waits(run: RecordedRun) -> Iterator[Finding]:
    """empty_cache, synchronises: calls in nearly every step."""
    steps = _steps(run)
    for cause, emptied in (("empty_cache", True), ("synchronises", False)):
        seconds = partial(_waiting, emptied)
        calls = [e for _, inside in steps for e in inside if seconds(e)]
        share, took = _share(run, seconds)
        if len(calls) >= 0.9 * len(steps) and share >= SHARE:
            evidence = (
                f"{calls[0]['kind']}, {len(calls)} calls in {len(steps)} steps, took {took * 1e3:.3g} ms per step "
                f"({share:.0%})"
            )
            yield finding_at(cause, calls[0]["at"], evidence)


def _waiting(emptied: bool, e: Event) -> float:
    """Seconds of a call that waits for the device: empty_cache if `emptied`, otherwise any other call."""
    return e["seconds"] if e["k"] == "wait" and e["kind"].endswith("empty_cache") == emptied else 0.0


def _no_sync(run: RecordedRun) -> Iterator[Finding]:
    """no_no_sync: several reductions per optimizer step."""
    steps = [b for b, _ in micro_batches(run) if len(b) > 1 and all(x["synced"] for x in b)]
    sent = [v for e in run.events(0, "before") for v in (e.get("logged") or {}).values() if v]
    whole = [s for s, _ in _steps(run)]
    if len(steps) < MIN_STEPS // 2 or not sent or len(whole) < 2:
        return
    k = len(steps[0])
    took = (k - 1) * mean(sent)
    share = min(took / mean(whole), 1.0)
    if share >= SHARE:
        evidence = (
            f"{k} reductions per optimizer step; {k - 1} of them take {took * 1e3:.3g} ms ({share:.0%} of the step)"
        )
        yield finding_at("no_no_sync", steps[0][0]["at"], evidence)


def _checkpoints(run: RecordedRun) -> Iterator[Finding]:
    """same_checkpoint, module_prefix."""
    writers: dict[str, list[tuple[int, Event]]] = defaultdict(list)
    for rank in range(run.processes):
        for e in run.events(rank, "save"):
            writers[e["path"] or "/dev/null"].append((rank, e))
    files = [calls for path, calls in writers.items() if not path.startswith("/dev/")]
    same = next((calls for calls in files if len({rank for rank, _ in calls}) > 1), None)
    if same is not None:
        e = same[0][1]
        evidence = (
            f"{len({rank for rank, _ in same})} ranks wrote {e['path']} ({e['bytes']} bytes, "
            f"{e['seconds'] * 1e3:.3g} ms per write)"
        )
        yield finding_at("same_checkpoint", e["at"], evidence)
    wrapped = next((e for e in run.all_events("save") if e["wrapped"]), None)
    if wrapped is not None and any(run.events(0, "ddp")):
        evidence = f"the file contains the name {wrapped['wrapped']!r}"
        yield finding_at("module_prefix", wrapped["at"], evidence)
