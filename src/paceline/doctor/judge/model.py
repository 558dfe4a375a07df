"""Batch norm, weights that part, parameters that nothing reaches."""

from __future__ import annotations

from paceline.doctor.findings import Finding
from paceline.doctor.judge.record import Event, Run, place

TOLERANCE = 1e-5  # of a tensor's mean magnitude: replicas that apply the same gradients have the same bits
LEAST_STEPS = 3  # without a gradient
_NAMED = 4


def findings(run: Run) -> list[Finding]:
    found = _no_gradient(run)
    if run.reduces or _shares_data(run):
        found += _weights(run)
    if run.reduces:
        found += _batch_norm(run)
    return found


def _shares_data(run: Run) -> bool:
    """Are the processes meant as replicas, since a sampler deals them the examples of one data set? (Where they send
    each other messages or weights, they may well keep one model in another way.)"""
    dealt = any(run.loaders[0].get(n, {}).get("sampler") == "distributed" for n in run.trainers)
    sends = any(run.all("p2p")) or any(e.get("of") == "weight" for e in run.all("coll"))
    return run.world > 1 and dealt and not sends


def _batch_norm(run: Run) -> list[Finding]:
    wrapped = any(run.of(0, "ddp"))
    inside = [e for e in run.of(0, "norm") if e["trained"] and (e["ddp"] is not None or not wrapped)]
    norms = list({e["name"]: e for e in reversed(inside)}.values())[::-1]
    if not norms:
        return []
    names = ", ".join(e["name"] for e in norms[:_NAMED]) + (", ..." if len(norms) > _NAMED else "")
    evidence = (
        f"{len(norms)} {norms[0]['kind']} ({names}) in training mode; each of {run.world} replicas uses the "
        f"statistics of its own {norms[0]['size']} examples"
    )
    return [Finding("batch_norm", place(norms[0]["at"]), evidence)]


def _weights(run: Run) -> list[Finding]:
    if run.averages_weights or any(run.all("join")):  # ranks that have made unequally many steps
        return []
    of = [_digests(run, rank) for rank in run.peers]
    for key in of[0]:  # in the order of the run
        theirs = [ranks.get(key) for ranks in of]
        if any(t is None for t in theirs):
            continue
        events: list[Event] = [t for t in theirs if t is not None]
        apart = [part for part in _apart([e["weights"] for e in events]) if part[0] not in run.shards]
        if not apart:
            continue
        opt, step, _ = key
        names = ", ".join(name for name, _ in apart[:_NAMED]) + (", ..." if len(apart) > _NAMED else "")
        total = len(events[0]["weights"])
        difference = max(size for _, size in apart)
        when = "before the first step" if step == 0 else f"after step {step}"
        evidence = (
            f"{when} {len(apart)} of {total} tensors differ between ranks ({names}), by up to {difference:.1e} of "
            "their mean magnitude"
        )
        if not run.reduces:
            evidence += "; no gradient was reduced, by DDP or by a call of the script's"
        note = next((e for e in run.of(0, "before") if e["opt"] == opt and e["outside"]), None)
        if note is not None and any(run.of(0, "ddp")):
            evidence += f"; {note['outside']} of the optimizer's {note['parameters']} parameters are in no DDP module"
        unsynced = [e for e in run.of(0, "backward") if e["local"]]
        if step and unsynced and not any(e["synced"] for e in run.of(0, "backward")):
            evidence += "; every backward was made under no_sync"
        cause = "weights_differ_at_start" if step == 0 else "weights_differ"
        return [Finding(cause, place(events[0]["at"]), evidence)]
    return []


def _digests(run: Run, rank: int) -> dict[tuple[int, int, str], Event]:
    return {(e["opt"], e["step"], e["k"]): e for e in run.of(rank, "before", "step") if e.get("weights")}


def _apart(ranks: list[dict[str, list[float]]]) -> list[tuple[str, float]]:
    """(name, largest difference in mean magnitudes) of the tensors that differ."""
    found = []
    for name, first in ranks[0].items():
        others = [weights.get(name) for weights in ranks[1:]]
        if any(o is None or o[0] != first[0] for o in others):
            continue  # another shape: parts of one model
        mean = max(first[1] / first[0], 1e-12)
        values = [[*first[3:], first[1] / first[0], first[2] / first[0]]]
        values += [[*o[3:], o[1] / o[0], o[2] / o[0]] for o in others if o is not None]
        size = max((abs(a - b) for v in values[1:] for a, b in zip(values[0], v)), default=0.0)
        if size > TOLERANCE * mean:
            found.append((name, size / mean))
    return found


def _copied(run: Run, never: set[str]) -> bool:
    """Is an optimizer none of whose parameters has a gradient the only one, while several are trained in vain: made
    from another copy of the model? (One that idles may be there for its schedule, or train a part later.)"""
    return len(never) > 1 and len(list(run.of(0, "optimizer"))) == 1 and len(list(run.of(0, "backward"))) >= LEAST_STEPS


def _no_gradient(run: Run) -> list[Finding]:
    """Parameters of an optimizer that had no gradient at any of its steps, on any rank."""
    found: list[Finding] = []
    for opt in sorted({e["opt"] for e in run.of(0, "before")}):
        steps = [e for e in run.all("before") if e["opt"] == opt]
        refused = not run.ended and any(not e["find_unused"] for e in run.of(0, "ddp"))  # by DDP, at its second forward
        if len(steps) < (1 if refused else LEAST_STEPS) * run.size:
            continue
        never = set(steps[0]["without"])
        for e in steps[1:]:
            never &= set(e["without"])
        if not never or (len(never) == steps[0]["parameters"] and not _copied(run, never)):
            continue
        names = [name for name in steps[0]["without"] if name in never]
        shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        evidence = (
            f"{len(names)} of the optimizer's {steps[0]['parameters']} parameters had no gradient at any of "
            f"{len(steps) // run.size} steps: {shown}"
        )
        made = next((e for e in run.of(0, "optimizer") if e["opt"] == opt), None)
        found.append(Finding("no_gradient", place(made["at"] if made else steps[0]["at"]), evidence))
    return found[:1]
