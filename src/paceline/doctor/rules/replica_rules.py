"""Rules about replicas of one model that come to differ: the place of the first difference tells the cause.

A step has four places: the weights before it, the gradients after the last backward, the gradients that the optimizer
is given, and the weights after it. The cause lies at the first place where ranks differ, if they agreed at the one
before.
"""

from __future__ import annotations

import math
from itertools import takewhile
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.lr_scaling_rules import divides_rate
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at

TOLERANCE = 1e-5  # of a tensor's mean magnitude: replicas that apply the same gradients have the same bits
SUMMED = 2e-3  # relative deviation from the sum of all ranks' gradients
_NAMED = 4

_HELD_BY_FSDP = (
    "Let fully_shard hold them (no ignored_params; call it on the whole model last, after its blocks), or all_reduce "
    "their gradients before each step, divided by the number of processes."
)

Samples = dict[str, list[float]]


def findings(run: RecordedRun) -> list[Finding]:
    """sync_off, weights_differ_at_start and all of DIVERGENCE (rules/__init__.py); summed_gradients, buffers_differ."""
    unsent = _fsdp_sync_off(run)
    if unsent:
        return unsent
    cut = _differ_when_sharded(run)
    if cut or any(run.all_events("join")):
        return cut
    if not (run.reduces_gradients or run.meant_as_replicas):
        return _weights_exchanged(run)
    if run.averages_weights:  # ranks that have made unequally many steps
        return []
    return _steps_differ(run) or [*_divergence(run), *_summed(run), *_buffers(run)]


def _steps_differ(run: RecordedRun) -> list[Finding]:
    """steps_differ: a rank does not step after a backward pass after which another one does. Ranks that reduce
    gradients make the same backward passes."""
    passes = [sum(1 for _ in run.events(rank, "backward")) for rank in run.peers]
    if run.cut or not run.reduces_gradients or max(passes) - min(passes) > 1 or not min(passes):
        return []
    for opt in sorted({e["opt"] for e in run.all_events("before")}):
        per_rank = [[e for e in run.events(rank, "before") if e["opt"] == opt] for rank in run.peers]
        at = [[e.get("backwards") for e in events] for events in per_rank]
        for other in range(1, len(per_rank)):
            more, less = (0, other) if len(at[0]) >= len(at[other]) else (other, 0)
            missing = next((n for n, b in enumerate(at[more]) if b not in at[less]), None)
            if missing is None or (len(at[more]) == len(at[less]) and passes[more] != passes[less]):
                continue
            evidence = (
                f"rank {run.peers[more]} made {len(at[more])} steps of the optimizer and rank {run.peers[less]} "
                f"{len(at[less])}, in {passes[more]} and {passes[less]} backward passes; the first that rank "
                f"{run.peers[less]} lacks comes after backward pass {at[more][missing]}"
            )
            return [finding_at("steps_differ", per_rank[more][missing]["at"], evidence)]
    return []


def _fsdp_sync_off(run: RecordedRun) -> list[Finding]:
    """sync_off, with FSDP (whose weights cannot be compared): the last backward before a step does not reduce."""
    if not any(run.events(0, "fsdp")):
        return []
    steps = kept = 0
    last = None
    for e in run.ranks[0]:
        if e["k"] == "backward":
            last = e
        elif e["k"] == "before" and last is not None:
            steps, kept, last = steps + 1, kept + bool(last.get("unsent")), None
    if kept < 2 or kept < 0.9 * steps:
        return []
    line = next((e["at"] for e in run.events(0, "no_sync")), None)
    evidence = f"the last backward before {kept} of {steps} steps was made with gradient synchronisation turned off"
    return [finding_at("sync_off", line, evidence)]


def _differ_when_sharded(run: RecordedRun) -> list[Finding]:
    """weights_differ_at_start, with fully_shard, which shards what each rank has and sends nothing: weights that differ
    become shards of different models. Only weights whose shards are unchanged at the first step count."""
    per_rank = [next(run.events(rank, "cut"), None) for rank in run.peers]
    if len(per_rank) < 2 or any(e is None for e in per_rank):
        return []
    events = [e for e in per_rank if e is not None]
    differing = _differing([e["whole"] for e in events])
    if not differing:
        return []
    line, words = _state_load_line(run)
    seed = script_lines.rank_seed(run)
    line = line or seed or next((e["at"] for e in run.events(0, "fsdp")), None)
    evidence = (
        f"when fully_shard cut the weights {_describe(differing, events[0]['whole'])}, and nothing has sent them since"
    )
    return [finding_at("weights_differ_at_start", line, evidence + words, seed)]


def _state_load_line(run: RecordedRun) -> tuple[Any, str]:
    """The line where some ranks alone load a state before the first step, and words for how many do."""
    begun = [list(run.events(rank, "loaded", "before")) for rank in run.peers]
    loads = [[e["at"] for e in takewhile(lambda e: e["k"] == "loaded", events)] for events in begun]
    line = next((at for theirs in loads for at in theirs if at and any(at not in others for others in loads)), None)
    words = f"; {sum(line in theirs for theirs in loads)} of {len(loads)} ranks loaded a state there"
    return line, words if line is not None else ""


def _weights_exchanged(run: RecordedRun) -> list[Finding]:
    """not_reduced: ranks send each other weights that each of them has stepped by its own gradients, as
    ZeroRedundancyOptimizer does without DDP. All ranks must step, with different gradients, and communicate nothing
    between a backward and the step, since a script may average in more ways than doctor knows."""
    if not run.exchanges_weights or any(_communicates_before_steps(run, rank) for rank in run.peers):
        return []
    steps = run.at_common_steps("before", "grads")
    unequal = []
    for events in steps:
        if not _differing([e["weights"] for e in events]):
            differing = _differing([e["grads"] for e in events])
            unequal += [(events[0], differing)] if differing else []
    if len(unequal) < 2:
        return []
    first, differing = unequal[0]
    evidence = (
        f"at {len(unequal)} of {len(steps)} steps that were compared "
        f"{_describe(differing, first['grads'], 'gradients')}, and nothing was exchanged between the backward and the "
        "step: the weights, which the ranks send each other afterwards, follow the examples of one rank each"
    )
    return [finding_at("not_reduced", first["at"], evidence)]


def _communicates_before_steps(run: RecordedRun, rank: int) -> bool:
    """Does a rank communicate between a backward and the step after it?"""
    due = False
    for e in run.events(rank, "backward", "coll", "before"):
        if due and e["k"] == "coll" and e["op"] != "barrier":
            return True
        due = e["k"] == "backward" or (due and e["k"] == "coll")
    return False


def _divergence(run: RecordedRun) -> list[Finding]:
    """The first difference of the weights at the steps that were compared, and its cause."""
    per_rank = [
        {(e["opt"], e["step"], e["k"]): e for e in run.events(rank, "before", "step") if e.get("weights")}
        for rank in run.peers
    ]
    alike: dict[int, int] = {}  # optimizer -> the last step after which its weights were equal
    for key, first in per_rank[0].items():  # in the order of the run
        opt, step, kind = key
        events = [ranks[key] for ranks in per_rank if key in ranks]
        if len(events) < len(per_rank):
            continue
        differing = [part for part in _differing([e["weights"] for e in events]) if part[0] not in run.model_parallel]
        if not differing:
            alike[opt] = step
        elif kind == "before" and step == 0:
            added = {name for name, (_, how, *_) in (first.get("outside") or {}).items() if "later" in how}
            names = {name for name, _ in differing}
            if names <= added:  # DDP has not sent them, and will not reduce them
                words = f"before the first step {_describe(differing, first['weights'])}; DDP does not reduce them"
                return [_unknown_to_ddp(run, first, names, words)]
            return [_differ_at_start(run, first, differing)]
        elif kind == "before":
            written = _written_outside(run, opt, step, alike.get(opt), _describe(differing, first["weights"]))
            if written:
                return written
        else:
            before = [ranks[opt, step - 1, "before"] for ranks in per_rank if (opt, step - 1, "before") in ranks]
            when = f"after step {step} {_describe(differing, first['weights'])}"
            if len(before) == len(per_rank):
                return [_find_cause(run, before, events, when)]
            return [finding_at("weights_differ", first["at"], when)]
    return []


def _differ_at_start(run: RecordedRun, first: Event, differing: list[tuple[str, float]]) -> Finding:
    """weights_differ_at_start: at the line where some ranks load a state, or write weights by rank, or seed by rank; or
    else where the first of these weights is made."""
    evidence = f"before the first step {_describe(differing, first['weights'])}"
    line, words = _state_load_line(run)
    evidence += words
    seed, drawn = script_lines.rank_seed(run), next((e["at"] for e in run.events(0, "initialized")), None)
    line = line or drawn or script_lines.weight_write(run, first["at"], by_rank=True) or seed
    line = line or (first.get("made_at") or {}).get(differing[0][0]) or first["at"]
    return finding_at("weights_differ_at_start", line, evidence, seed)


def _describe(differing: list[tuple[str, float]], tensors: Samples, what: str = "tensors") -> str:
    """How many tensors differ, which ones, and by how much."""
    return (
        f"{len(differing)} of {len(tensors)} {what} differ between ranks ({_names(differing)}), by up to "
        f"{max(size for _, size in differing):.1e} of their mean magnitude"
    )


def _names(differing: list[tuple[str, float]]) -> str:
    return ", ".join(name for name, _ in differing[:_NAMED]) + (", ..." if len(differing) > _NAMED else "")


def _differing(ranks: list[Samples]) -> list[tuple[str, float]]:
    """(name, largest difference by mean magnitude) of tensors of one shape that differ."""
    found = []
    for name, first in ranks[0].items():
        others = [o for tensors in ranks[1:] if (o := tensors.get(name)) is not None and o[0] == first[0]]
        if len(others) < len(ranks) - 1:
            continue  # another shape: parts of one model
        values = [[*o[3:], o[1] / o[0], o[2] / o[0]] for o in (first, *others)]
        mean = max(max((abs(v[-2]) for v in values if math.isfinite(v[-2])), default=0.0), 1e-12)
        size = max((_distance(a, b) for v in values[1:] for a, b in zip(values[0], v)), default=0.0)
        if size > TOLERANCE * mean:
            found.append((name, size / mean))
    return found


def _distance(a: float, b: float) -> float:
    """|a - b|; 0 between two NaN, and infinite between a NaN and a number."""
    if a == b or (a != a and b != b):
        return 0.0
    return math.inf if math.isnan(a - b) else abs(a - b)


def _written_outside(run: RecordedRun, opt: int, step: int, alike: int | None, words: str) -> list[Finding]:
    """written_outside: equal after one step, unequal before a later one, and a rank saw its weights change."""
    if alike is None:
        return []
    moved = [
        {e["step"]: e for e in run.events(rank, "moved") if e["opt"] == opt and alike <= e["step"] <= step}
        for rank in run.peers
    ]
    first = min((number for m in moved for number in m), default=None)
    if first is None:
        return []
    who = [rank for rank, m in zip(run.peers, moved, strict=True) if first in m]
    whose = f"rank {who[0]}'s" if len(who) == 1 else "the ranks'"
    evidence = (
        f"{whose} weights changed between step {first} and the next, by no optimizer; before step {step + 1} {words}"
    )
    at = next(m[first]["at"] for m in moved if first in m)
    return [finding_at("written_outside", script_lines.weight_write(run, at) or at, evidence)]


def _find_cause(run: RecordedRun, before: list[Event], after: list[Event], when: str) -> Finding:
    """The cause where weights agreed before a step, or the steps since they last agreed were not compared."""
    given: list[Samples] = [e.get("grads") or {} for e in before]
    differing = [part for part in _differing(given) if part[0] not in run.model_parallel]
    at = before[0]["at"]
    if not differing:
        return _optimizer_differs(run, before, after, when)
    when += f"; {_describe(differing, given[0], 'gradients')} at that step"
    names = {name for name, _ in differing}
    if not run.reduces_gradients:
        when += "; no gradient was reduced, by DDP or by a call of the script's"
        return finding_at("not_reduced", at, when, _averaged_copy_line(run, before[0]))
    if any(run.events(0, "ddp")):
        return _under_ddp(run, before, names, when)
    kept = _unreduced_names(given, [e.get("own") or {} for e in before])
    calls = [e for e in run.events(0, "coll") if e.get("of") == "grad"]
    if kept and calls:
        listed = ", ".join(kept[:_NAMED])
        evidence = f"{when}; those of {listed} are each rank's own still, where gradients are reduced"
        beside = script_lines.frame_in_scope(calls[0].get("by") or [], at)
        return finding_at("partly_reduced", calls[0]["at"], evidence, beside)
    wrap = next((e["at"] for e in run.events(0, "fsdp")), None)
    if wrap is not None and not calls:
        evidence = f"{when}; FSDP does not hold these parameters, and nothing else reduces their gradients"
        return finding_at("partly_reduced", wrap, evidence, at, _HELD_BY_FSDP)
    left = next((e["unwaited"] for e in before if e.get("unwaited")), None)
    if left is not None:
        when += f", and nobody had waited for {left[0]} of its asynchronous reductions: they may not have ended"
        return finding_at("gradients_differ", left[1], when, at)
    line = script_lines.gradient_write(run, at)
    return finding_at("gradients_differ", line or at, f"{when}, though gradients are reduced")


def _averaged_copy_line(run: RecordedRun, before: Event) -> Any:
    """The line that reduces, after the first step, something of the size of a weight or of all: a copy."""
    sizes = {int(values[0]) for values in before["weights"].values()}
    sizes.add(sum(sizes))
    stepped = False
    for e in run.events(0, "step", "coll"):
        stepped = stepped or e["k"] == "step"
        if stepped and e["k"] == "coll" and "reduce" in e["op"] and max(1, e.get("n") or 0) in sizes - {1}:
            return script_lines.frame_in_scope(e.get("path") or [], before["at"])
    return None


def _unreduced_names(given: list[Samples], own: list[Samples]) -> list[str]:
    """The gradients that are each rank's own, where others are reduced. One common factor per rank is allowed for,
    since each rank may have clipped by its own norm."""
    kept: set[str] = set()
    reduced: set[str] = set()
    for theirs in given[1:]:
        fits = [(values[0], _multiple(values, theirs[name])) for name, values in given[0].items() if name in theirs]
        factors = [(size, factor) for size, factor in fits if size > 1 and factor is not None]
        if not factors:
            return []
        common = max(factors)[1]
        for name, values in given[0].items():
            scaled = [[*values[:1], *(common * v for v in values[1:])], theirs.get(name, values)]
            (kept if _differing([{name: one} for one in scaled]) else reduced).add(name)
    plain = [n for n in kept if all(n in o and o[n] == g[n] for o, g in zip(own, given))]
    return sorted(plain or (kept if reduced else ()))


def _multiple(ours: list[float], theirs: list[float]) -> float | None:
    """c where `theirs` are c times `ours`; None where they are not."""
    square = sum(v * v for v in ours[2:])
    factor = sum(a * b for a, b in zip(ours[2:], theirs[2:])) / square if square else 0.0
    rest = sum((b - factor * a) ** 2 for a, b in zip(ours[2:], theirs[2:]))
    return factor if factor > 0 and rest <= TOLERANCE**2 * sum(b * b for b in theirs[2:]) else None


def _events_since_step(run: RecordedRun, before: Event) -> list[Event]:
    """Rank 0's events between the optimizer's last step and this one."""
    events = run.ranks[0]
    end = next(i for i, e in enumerate(events) if e is before)
    steps = (i for i in range(end - 1, -1, -1) if events[i]["k"] == "step" and events[i]["opt"] == before["opt"])
    return events[next(steps, 0) : end]


def _under_ddp(run: RecordedRun, ranks: list[Event], names: set[str], when: str) -> Finding:
    """unknown_to_ddp, sync_off, past_ddp or gradients_differ. ranks: the step's "before" event of each rank; names: of
    the gradients that differ there."""
    before = ranks[0]
    window = _events_since_step(run, before)
    outside = before.get("outside") or {}
    # Each rank clips by a norm of its own when one gradient is its own: then all of them differ before the step, and
    # only those that DDP does not reduce after the backward.
    unreduced = {name for name, _ in _differing([e.get("own") or {} for e in ranks])} or names
    if unreduced <= set(outside):
        whose = "them" if unreduced == names else "those of " + ", ".join(sorted(unreduced)[:_NAMED])
        return _unknown_to_ddp(run, before, unreduced, f"{when}; DDP does not reduce {whose}")
    passes = [e for e in window if e["k"] == "backward"]
    past = [e for e in window if e["k"] == "past"] or list(run.events(0, "past"))
    if passes and not passes[-1]["synced"] and passes[-1]["local"]:
        line = next((e["at"] for e in run.events(0, "no_sync")), None) or script_lines.attribute_use(
            run, "require_backward_grad_sync"
        )
        usual = next((e["at"] for e in run.events(0, "before") if e["opt"] == before["opt"]), None)
        line = before["at"] if usual != before["at"] else line  # a step of its own, for what is left
        evidence = f"{when}; the last backward before the step, of {len(passes)}, was made under no_sync"
        return finding_at("sync_off", line or passes[-1]["at"], evidence)
    if any(not e["synced"] and not e["local"] for e in passes):
        line = past[0]["at"] if past else script_lines.attribute_use(run, "module") or passes[-1]["at"]
        evidence = f"{when}; a backward was made of a forward that did not go through the DDP module"
        return finding_at("past_ddp", line, evidence)
    if past:
        evidence = f"{when}; the module inside DDP was called too, past DDP, before that step"
        return finding_at("past_ddp", past[0]["at"], evidence)
    line = script_lines.gradient_write(run, before["at"])
    return finding_at("gradients_differ", line or before["at"], f"{when}, though DDP reduced gradients")


def _unknown_to_ddp(run: RecordedRun, before: Event, names: set[str], words: str) -> Finding:
    """unknown_to_ddp: where the parameters were unfrozen or made. Where a function makes them, at its call beside the
    one that wraps the model."""
    at, how, *stack = next(place for name, place in (before.get("outside") or {}).items() if name in names)
    line = (script_lines.unfreeze(run) if "frozen" in how else None) or at or before["at"]
    wrap = next((e["at"] for e in run.events(0, "ddp")), None)
    call = script_lines.frame_in_scope(stack[0], wrap) if stack and stack[0] and wrap else None
    return finding_at("unknown_to_ddp", call or line, f"{words}: they were {how}", line if call else None)


def _optimizer_differs(run: RecordedRun, before: list[Event], after: list[Event], when: str) -> Finding:
    """optimizer_differs, or weights_differ: the gradients are equal, and the update is not."""
    settings = [e.get("settings") or [] for e in before]
    made = next((e["at"] for e in run.events(0, "optimizer") if e["opt"] == before[0]["opt"]), None)
    for rank, theirs in zip(run.peers[1:], settings[1:]):
        for a, b in zip(settings[0], theirs):
            name = next((k for k in (*a, *b) if a.get(k) != b.get(k)), None)
            if name is not None:
                evidence = (
                    f"{when}, by the same gradients: {name} is {a.get(name)} on rank 0 and {b.get(name)} on {rank}"
                )
                line = restored_line(run, before[0]) or made or before[0]["at"]
                return finding_at("optimizer_differs", line, evidence, made)
    state = _differing([e.get("state") or {} for e in after])
    if state:
        line = restored_line(run, before[0]) or next((e["at"] for e in run.all_events("restored")), None)
        evidence = f"{when}, by the same gradients: {_describe(state, after[0]['state'], 'tensors of its state')}"
        return finding_at("optimizer_differs", line or before[0]["at"], evidence)
    return finding_at("weights_differ", before[0]["at"], f"{when}, though the gradients of that step were the same")


def restored_line(run: RecordedRun, before: Event) -> Any:
    """The line where some ranks alone load the state of an optimizer, or of its scheduler, before this step of it; or
    None."""

    def earlier(e: Event) -> bool:
        return e["k"] == "restored" or e["opt"] != before["opt"] or e["step"] < before["step"]

    begun = [takewhile(earlier, run.events(rank, "restored", "before")) for rank in run.peers]
    per_rank = [[e["at"] for e in events if e["k"] == "restored" and e["at"]] for events in begun]
    return next((at for mine in per_rank for at in mine if any(mine.count(at) != o.count(at) for o in per_rank)), None)


def _buffers(run: RecordedRun) -> list[Finding]:
    """buffers_differ: nothing sends the buffers, as running means of each rank's data; or DDP overwrites what the
    script writes on each rank with rank 0's."""
    if not run.reduces_gradients:
        return []
    return _unlike_buffers(run, "buffers", "nothing sends them") or _unlike_buffers(
        run, "sent", "DDP then gives every rank those of rank 0, and what the others wrote is lost"
    )


def _unlike_buffers(run: RecordedRun, kind: str, words: str) -> list[Finding]:
    steps = run.at_common_steps("buffers")
    differing = [_differing([e.get(kind) or {} for e in events]) for events in steps]
    if sum(map(bool, differing)) < 2 or not differing[-1]:
        return []
    last, parts = steps[-1][0], differing[-1]
    evidence = f"after step {last['step']} {_describe(parts, last[kind], 'buffers')}; {words}"
    kept = next((e["at"] for e in run.events(0, "ddp") if not e.get("broadcasts", True)), None)
    line = script_lines.buffer_write(run, parts[0][0].rpartition(".")[2])
    if line is None and kind == "sent":
        return []
    line = line or kept
    if line is None:
        line = next((e["at"] for e in run.events(0, "step") if e["opt"] == last["opt"]), None)
    return [finding_at("buffers_differ", line, evidence)]


def _summed(run: RecordedRun) -> list[Finding]:
    """summed_gradients: each rank's loss is a mean, and the optimizer is given the sum of the ranks' gradients."""
    steps = [events for events in run.at_common_steps("before", "own") if all(e.get("grads") for e in events)]
    kinds = {e.get("form", e["mean"]) for rank in run.peers for e in run.events(rank, "backward")}
    if len(run.peers) < 2 or len(steps) < 2 or kinds != {"mean"} or divides_rate(run):
        return []
    hooked = any(e["mean"] != "mean" for e in run.events(0, "backward"))
    for events in steps:
        own = [_reduced_samples(run, rank, e) if hooked else e["own"] for rank, e in zip(run.peers, events)]
        factor = _sum_factor(own, events[0]["grads"])
        if factor is None or abs(factor * events[0].get("scale", 1.0) - 1) > SUMMED:
            return []
    calls = [e for e in run.events(0, "coll") if e.get("of") == "grad"]
    evidence = (
        f"at {len(steps)} of {len(steps)} steps that were compared the optimizer was given the sum of the gradients of "
        f"{len(run.peers)} ranks, each of a loss that is a mean: nothing divided it"
    )
    return [finding_at("summed_gradients", calls[0]["at"] if calls else steps[0][0]["at"], evidence)]


def _reduced_samples(run: RecordedRun, rank: int, before: Event) -> Samples:
    """What a rank gave to the reductions before a step, for gradients that a hook reduces during the backward."""
    events = run.ranks[rank]
    end = next(i for i, e in enumerate(events) if e is before)
    begin = next((i for i in range(end - 1, -1, -1) if events[i]["k"] == "step"), 0)
    if len(list(run.events(rank, "optimizer"))) != 1:
        return {}  # parameters are numbered through all of them
    order = list(before["weights"])
    sent = (e for e in events[begin:end] if e["k"] == "coll" and e.get("of") == "grad" and e.get("given"))
    return {order[n - 1]: e["given"] for e in sent if 0 < (n := e.get("number") or 0) <= len(order)}


def _sum_factor(own: list[Samples], given: Samples) -> float | None:
    """c where the gradients that an optimizer was given are c times the sum of all ranks'; None where they are not."""
    sums: list[float] = []
    gifts: list[float] = []
    for name, values in given.items():
        theirs = [o[name] for o in own if name in o and o[name][0] == values[0]]
        if len(theirs) < len(own):
            return None
        sums += [sum(t[i] for t in theirs) for i in range(2, len(values))]
        gifts += values[2:]
    square = sum(s * s for s in sums)
    if not square:
        return None
    factor = sum(s * g for s, g in zip(sums, gifts)) / square
    rest = sum((g - factor * s) ** 2 for s, g in zip(sums, gifts))
    return factor if rest <= SUMMED**2 * sum(g * g for g in gifts) else None
