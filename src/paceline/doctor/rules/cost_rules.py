"""Rules about time and memory.

A cost is a share of a step: the seconds that one thing took in the step, by all of the step's; the median over rank 0's
steps after the first three.

Each cost is timed itself, and not found as the difference of two runs, so that noise changes a share by a few
hundredths of its size. The thresholds are where acting is worth while: 5% of a step; 15% for waiting on data, since
collating a batch of small examples takes as much in healthy scripts with small models; 0.2% for the search of
`find_unused_parameters`, since leaving it out costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at

SHARE = 0.05
DATA_SHARE = 0.15
DATA_SECONDS = 1e-3  # of a step, at least: collating the smallest batch takes as much
SEARCH_SHARE = 0.002  # DDP's search alone, without its message
MIN_STEPS = 6  # timed steps
_FIRST = 3  # steps that are left out


def findings(run: RecordedRun) -> list[Finding]:
    found: list[Finding] = []
    for rule in (_find_unused, _loader, _threads, _device, _waits, _no_sync, _checkpoints):
        found += rule(run)
    return found


def _steps(run: RecordedRun, rank: int = 0) -> list[tuple[float, list[Event]]]:
    """(seconds, events) of each step of the optimizer that steps most, without the first ones."""
    by: dict[Any, int] = defaultdict(int)
    for e in run.events(rank, "step"):
        by[e["opt"]] += 1
    if not by:
        return []
    busiest = max(by, key=lambda opt: by[opt])
    steps: list[tuple[float, list[Event]]] = []
    began, inside = None, []
    for e in run.ranks[rank]:
        inside.append(e)
        if e["k"] in ("pass", "pass_end"):
            began = None  # an epoch's end, with what belongs to no step
        if e["k"] == "step" and e["opt"] == busiest:
            if began is not None:
                steps.append((e["t"] - began, inside))
            began, inside = e["t"], []
    return steps[_FIRST:]


def _share(run: RecordedRun, seconds: Callable[[Event], float], rank: int = 0) -> tuple[float, float] | None:
    """(median share of a step, median seconds) of events, by `seconds` of each; None: too few steps."""
    steps = [(whole, sum(map(seconds, events))) for whole, events in _steps(run, rank) if whole > 0]
    if len(steps) < MIN_STEPS:
        return None
    return median(part / whole for whole, part in steps), median(part for _, part in steps)


def _find_unused(run: RecordedRun) -> list[Finding]:
    """find_unused: the search found all parameters used in every backward pass."""
    for ddp in run.events(0, "ddp"):
        if not ddp["find_unused"]:
            continue
        number = str(ddp["ddp"])
        counts = [e["reached"].get(number) for e in run.all_events("backward") if number in (e.get("reached") or {})]
        if len(counts) < 2 * run.processes or any(c is None or c < ddp["parameters"] for c in counts):
            continue
        cost = _share(run, partial(_searching, ddp["ddp"]))
        if cost is None or cost[0] < SEARCH_SHARE:
            continue
        evidence = (
            f"all {ddp['parameters']} parameters were reached in each of {len(counts) // run.processes} backward "
            f"passes on all ranks; searching the graph took {cost[1] * 1e3:.2g} ms of a step, {cost[0]:.1%}, beside a "
            "message"
        )
        return [finding_at("find_unused", ddp["at"], evidence)]
    return []


def _searching(number: int, e: Event) -> float:
    """Seconds of the search of DDP module `number`."""
    return e["seconds"] if e["k"] == "search" and e["ddp"] == number else 0.0


def _loader(run: RecordedRun) -> list[Finding]:
    """loader_starves, no_workers, no_pinned_memory."""
    trainers = run.training_loaders
    cost = _share(run, lambda e: e["waited"] if e["k"] == "yield" and e["loader"] in trainers else 0.0)
    if cost is None or cost[0] < DATA_SHARE or cost[1] < DATA_SECONDS or not trainers:
        return []
    waited: dict[str, float] = defaultdict(float)
    for e in run.events(0, "yield"):
        waited[e["loader"]] += e["waited"]
    about = run.loaders[0].get(max(trainers, key=lambda n: waited[n]))
    if about is None:
        return []
    evidence = f"{cost[1] * 1e3:.3g} ms of a step were spent waiting for data, {cost[0]:.0%} of it"
    found = [finding_at("loader_starves", about["at"], f"{evidence} (num_workers={about['workers']})")]
    if about["workers"] == 0:
        found.append(finding_at("no_workers", about["at"], f"{evidence}; num_workers=0"))
    states = [e["machine"] for e in run.events(0, "step") if e.get("machine")]
    if not about["pinned"] and any("devices" in s for s in states):
        found.append(finding_at("no_pinned_memory", about["at"], f"{evidence}; pin_memory=False"))
    return found


def _threads(run: RecordedRun) -> list[Finding]:
    """threads: more threads than cores, which wait for a core."""
    states = [e for e in run.events(0, "step") if e.get("machine")]
    if len(states) < 2:
        return []
    threads, cores = states[-1]["machine"]["threads"], states[-1]["machine"]["cores"]
    if threads * run.processes < 2 * cores or threads <= max(1, cores // run.processes):
        return []
    first, last = states[0], states[-1]
    seconds = last["t"] - first["t"]
    queued = last["machine"]["queued"], first["machine"]["queued"]
    share = (queued[0] - queued[1]) / seconds if None not in queued and seconds > 0 else 0.0
    if share < SHARE:
        return []
    evidence = (
        f"{run.processes} processes with {threads} threads each on {cores} cores; threads of rank 0 stood ready "
        f"without a core for {share:.0%} of the time"
    )
    made = next(run.events(0, "optimizer"), None)
    return [finding_at("threads", made["at"] if made else None, evidence)]


def _device(run: RecordedRun) -> list[Finding]:
    """one_device: several ranks hold memory on device 0, where there are others."""
    last = [[e["machine"] for e in run.events(r, "step") if e.get("machine")][-1:] for r in range(run.processes)]
    states = [s[0] for s in last if s and "devices" in s[0]]
    if len(states) < 2 or len(states[0]["devices"]) < 2:
        return []
    on_first = [r for r, s in enumerate(states) if s["devices"][0] > 0]
    if len(on_first) < 2:
        return []
    evidence = f"ranks {', '.join(map(str, on_first))} hold memory on device 0, of {len(states[0]['devices'])}"
    made = next(run.events(1, "optimizer"), None)
    return [finding_at("one_device", made["at"] if made else None, evidence)]


def _waits(run: RecordedRun) -> list[Finding]:
    """empty_cache, synchronises: in nearly every step."""
    found = []
    steps = _steps(run)
    for cause, emptied in (("empty_cache", True), ("synchronises", False)):
        seconds = partial(_waiting, emptied)
        calls = [e for _, inside in steps for e in inside if e["k"] == "wait" and seconds(e)]
        cost = _share(run, seconds)
        if cost is None or len(calls) < 0.9 * len(steps) or cost[0] < SHARE:
            continue
        evidence = (
            f"{calls[0]['kind']}, {len(calls)} calls in {len(steps)} steps, took {cost[1] * 1e3:.3g} ms of a step, "
            f"{cost[0]:.0%}"
        )
        found.append(finding_at(cause, calls[0]["at"], evidence))
    return found


def _waiting(emptied: bool, e: Event) -> float:
    """Seconds of a call that waits for the device: of empty_cache, or else of the others."""
    return e["seconds"] if e["k"] == "wait" and e["kind"].endswith("empty_cache") == emptied else 0.0


def _no_sync(run: RecordedRun) -> list[Finding]:
    """no_no_sync: several reductions for one optimizer step."""
    from paceline.doctor.rules.schedule_rules import micro_batches

    steps = [b for b, _ in micro_batches(run) if len(b) > 1 and all(x["synced"] for x in b)]
    if len(steps) < MIN_STEPS // 2:
        return []
    k = len(steps[0])
    sent = [v for e in run.events(0, "before") for v in (e.get("logged") or {}).values() if v]
    whole = [s for s, _ in _steps(run)]
    if not sent or len(whole) < 2:
        return []
    share = min((k - 1) * mean(sent) / mean(whole), 1.0)
    if share < SHARE:
        return []
    took = (k - 1) * mean(sent) * 1e3
    evidence = f"{k} reductions for each optimizer step; {k - 1} of them take {took:.3g} ms, {share:.0%} of it"
    return [finding_at("no_no_sync", steps[0][0]["at"], evidence)]


def _checkpoints(run: RecordedRun) -> list[Finding]:
    """same_checkpoint, module_prefix."""
    found = []
    writers: dict[str, set[int]] = defaultdict(set)
    first: dict[str, Event] = {}
    for rank in range(run.processes):
        for e in run.events(rank, "save"):
            if e["path"] and not e["path"].startswith("/dev/"):
                writers[e["path"]].add(rank)
                first.setdefault(e["path"], e)
    same = [path for path, ranks in writers.items() if len(ranks) > 1]
    if same:
        e = first[same[0]]
        evidence = (
            f"{len(writers[same[0]])} ranks wrote {same[0]} ({e['bytes']} bytes, {e['seconds'] * 1e3:.3g} ms each time)"
        )
        found.append(finding_at("same_checkpoint", e["at"], evidence))
    wrapped = next((e for e in run.all_events("save") if e["wrapped"]), None)
    if wrapped is not None and any(run.events(0, "ddp")):
        evidence = f"the names begin with `module.`, such as {wrapped['wrapped']!r}"
        found.append(finding_at("module_prefix", wrapped["at"], evidence))
    return found
