"""Rules about replicas that diverge: the first difference between the ranks shows the cause.

The rules compare four stages of a step: the weights before it, the gradients after the last backward, the gradients
that the optimizer uses, and the weights after it. The cause is at the first stage where the ranks differ, if they
agreed at the previous stage.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import dropwhile, pairwise, takewhile
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.gradient_rules import multiple_of
from paceline.doctor.rules.rate_rules import divides_rate
from paceline.doctor.rules.recorded_run import (
    Event,
    RecordedRun,
    computes_parts,
    finding_at,
    first_of,
    first_of_each,
    listed,
    restored_line,
)

TOLERANCE = 1e-5  # of a tensor's mean magnitude: replicas that apply the same gradients are bitwise equal
SUMMED = 2e-3  # maximum relative deviation from the sum of all ranks' gradients
_NAMED = 4

_HELD_BY_FSDP = (
    "Let fully_shard manage them (no ignored_params; call it on the whole model last, after its blocks), or all_reduce "
    "their gradients before each step and divide by the number of processes."
)

_EVERY_SHARD = "Update every shard that has a gradient. A shard may be empty on some ranks: skip it alone."
_BETWEEN_PARTS = (
    "The gradient of a weight that all ranks hold is the sum over their parts of the model: all_reduce it, in the "
    "backward of the exchange between the parts, or before the step."
)

Samples = dict[str, list[float]]


def findings(run: RecordedRun) -> list[Finding]:
    """Check for weights_differ_at_start, summed_gradients, buffers_differ and DIVERGENCE (rules/__init__.py)."""
    found = first_of(run, _fsdp_sync_off, _differ_when_sharded, _idle_shards)
    if found or run.has("join"):
        return found
    if not (run.reduces_gradients or run.meant_as_replicas):
        return first_of(run, _weights_exchanged, _parts_drift)
    if run.averages_weights:  # the ranks may make different numbers of steps
        return []
    return first_of(run, _steps_differ) or first_of_each(run, _divergence, _summed, _buffers)


def _steps_differ(run: RecordedRun) -> Iterator[Finding]:
    """steps_differ: after the same backward pass, one rank steps and another does not. (Ranks that reduce gradients
    make equal numbers of backward passes.)"""
    passes = [len(events) for events in run.per_peer("backward")]
    if run.cut or not run.reduces_gradients or max(passes) - min(passes) > 1 or not min(passes):
        return
    for opt in sorted({e["opt"] for e in run.all_events("before")}):
        per_rank = run.per_peer("before", opt=opt)
        at = [[e.get("backwards") for e in events] for events in per_rank]
        for other in range(1, len(per_rank)):
            more, less = (0, other) if len(at[0]) >= len(at[other]) else (other, 0)
            missing = next((n for n, b in enumerate(at[more]) if b not in at[less]), None)
            if missing is not None and (len(at[more]) != len(at[less]) or passes[more] == passes[less]):
                evidence = (
                    f"rank {run.peers[more]} made {len(at[more])} optimizer steps and rank {run.peers[less]} made "
                    f"{len(at[less])}, in {passes[more]} and {passes[less]} backward passes; the first step that "
                    f"rank {run.peers[less]} skipped comes after backward pass {at[more][missing]}"
                )
                yield finding_at("steps_differ", per_rank[more][missing]["at"], evidence)


def _fsdp_sync_off(run: RecordedRun) -> Iterator[Finding]:
    """sync_off with FSDP: the last backward before a step does not reduce. (FSDP's weights cannot be compared.)"""
    events = list(run.events(0, "backward", "before")) if any(run.events(0, "fsdp")) else []
    last = [a for a, b in pairwise(events) if a["k"] == "backward" and b["k"] == "before"]
    kept = sum(bool(e.get("unsent")) for e in last)
    if kept >= max(2, 0.9 * len(last)):
        evidence = f"the last backward before {kept} of {len(last)} steps ran with gradient synchronisation turned off"
        yield finding_at("sync_off", run.line("no_sync"), evidence)


def _differ_when_sharded(run: RecordedRun) -> Iterator[Finding]:
    """weights_differ_at_start with fully_shard. It shards each rank's weights without sending any, so if the weights
    differ, the shards belong to different models. Weights count only if their shards are unchanged at the first step.
    """
    whole = [events[0]["whole"] for events in run.per_peer("cut") if events]
    differing = _differing(whole) if len(whole) == len(run.peers) > 1 else []
    if differing:
        line, words = _state_load_line(run)
        seed = script_lines.rank_seed(run)
        evidence = (
            f"when fully_shard sharded the weights, {_describe(differing, whole[0])}, and no weights were sent "
            f"later{words}"
        )
        yield finding_at("weights_differ_at_start", line or seed or run.line("fsdp"), evidence, seed)


def _idle_shards(run: RecordedRun) -> Iterator[Finding]:
    """optimizer_differs with shards: a rank's optimizer leaves shards unchanged that have a gradient, but other ranks'
    optimizers change theirs."""
    steps = run.at_common_steps("step", "shards")
    idle: dict[tuple[int, str], int] = {}
    for events in steps:
        names = {name for e in events for name, moved in e["shards"].items() if moved}
        for rank, e in zip(run.peers, events):
            for name in (name for name in names if e["shards"].get(name) is False):
                idle[rank, name] = idle.get((rank, name), 0) + 1
    left = [key for key, count in idle.items() if count == len(steps) >= 2]
    if left:
        rank = left[0][0]
        evidence = (
            f"at all {len(steps)} compared steps rank {rank}'s shards of {listed([n for r, n in left if r == rank])} "
            "had a gradient and did not change, but other ranks' shards did"
        )
        before = next(run.events(0, "before"))
        line = script_lines.optimizer_skip(run)
        beside = before["at"] if line else run.line("optimizer")
        yield finding_at("optimizer_differs", line or before["at"], evidence, beside, _EVERY_SHARD)


def _state_load_line(run: RecordedRun) -> tuple[Any, str]:
    """(the line where only some ranks load a state before the first step, evidence with the number of these ranks)."""
    begun = [takewhile(lambda e: e["k"] == "loaded", events) for events in run.per_peer("loaded", "before")]
    loads = [[e["at"] for e in events] for events in begun]
    line = next((at for theirs in loads for at in theirs if at and any(at not in others for others in loads)), None)
    words = f"; {sum(line in theirs for theirs in loads)} of {len(loads)} ranks loaded a state at this line"
    return line, words if line is not None else ""


def _weights_exchanged(run: RecordedRun) -> Iterator[Finding]:
    """not_reduced: each rank updates weights with its local gradients, and the ranks then send each other the weights,
    as ZeroRedundancyOptimizer does without DDP.

    Reported only if the gradients differ, and no rank communicates between a backward and the step. Otherwise the
    script may average gradients in a way that doctor does not know.
    """
    if not run.exchanges_weights or any(_communicates_before_steps(run, rank) for rank in run.peers):
        return
    steps = run.at_common_steps("before", "grads")
    alike = [events for events in steps if not _differing([e["weights"] for e in events])]
    unequal = [(events[0], parts) for events in alike if (parts := _differing([e["grads"] for e in events]))]
    if len(unequal) >= 2:
        first, differing = unequal[0]
        evidence = (
            f"at {len(unequal)} of {len(steps)} compared steps {_describe(differing, first['grads'], 'gradients')}, "
            "and nothing was exchanged between the backward and the step: each weight that the ranks exchange "
            "afterwards was trained on one rank's examples"
        )
        yield finding_at("not_reduced", first["at"], evidence)


def _parts_drift(run: RecordedRun) -> Iterator[Finding]:
    """not_reduced: the ranks compute parts of one model, and train weights that all of them hold. The gradients of
    these weights differ, and nothing sums them, so the weights part.

    Weights in a module with shards may start equal by chance, such as the zeros of a bias. They do not count.
    """
    sent = next((e for e in run.events(0, "coll") if "in_forward" in e), None)
    steps = run.at_common_steps("before", "grads")
    other = run.has("p2p") or run.has("coll", of="grad") or run.exchanges_weights or run.averages_weights
    if sent is None or not computes_parts(run) or other or len(steps) < 2 or steps[0][0]["step"] != 0:
        return
    weights = [e["weights"] for e in steps[0]]
    sizes = {name for name, first in weights[0].items() for w in weights[1:] if name not in w or w[name][0] != first[0]}
    shards = {name.rpartition(".")[0] for name in (*sizes, *(name for name, _ in _differing(weights)))}
    held = {name for name in weights[0] if name.rpartition(".")[0] not in shards}
    apart = [[d for d in _differing([e["grads"] for e in events]) if d[0] in held] for events in steps]
    parted = [d for d in _differing([e["weights"] for e in steps[-1]]) if d[0] in held]
    if all(apart) and parted:
        evidence = (
            f"the ranks compute parts of one model, and exchange tensors in its forward; "
            f"{_describe(apart[0], {name: [] for name in held}, 'gradients')}, of weights that all ranks hold, and no "
            "gradient is reduced"
        )
        alone = next((e["at"] for e in run.events(0, "ddp") if len(e["ranks"]) == 1), None)
        silent = script_lines.silent_function(run)
        yield finding_at("not_reduced", alone or silent or sent["at"], evidence, sent["at"], _BETWEEN_PARTS)


def _communicates_before_steps(run: RecordedRun, rank: int) -> bool:
    """Does a rank communicate between a backward and the step after it?"""
    due = False
    for e in run.events(rank, "backward", "coll", "before"):
        if due and e["k"] == "coll" and e["op"] != "barrier":
            return True
        due = e["k"] == "backward" or (due and e["k"] == "coll")
    return False


def _divergence(run: RecordedRun) -> Iterator[Finding]:
    """Find the first difference of the weights at the compared steps, and its cause."""
    per_rank = [
        {(e["opt"], e["step"], e["k"]): e for e in run.events(rank, "before", "step") if e.get("weights")}
        for rank in run.peers
    ]
    alike: dict[int, int] = {}  # optimizer -> the last step after which its weights were equal on all ranks
    for (opt, step, kind), first in per_rank[0].items():  # in the order of the run
        events = [ranks[opt, step, kind] for ranks in per_rank if (opt, step, kind) in ranks]
        before = [ranks[opt, step - 1, "before"] for ranks in per_rank if (opt, step - 1, "before") in ranks]
        differing = _differing([e["weights"] for e in events], run.model_parallel)
        words = _describe(differing, first["weights"]) if differing else ""
        if len(events) < len(per_rank):
            continue
        if not differing:
            alike[opt] = step
        elif kind == "before" and step == 0:
            yield _differ_at_start(run, first, differing, f"before the first step {words}")
        elif kind == "before":
            yield from _written_outside(run, opt, step, alike.get(opt), words)
        elif len(before) == len(per_rank):
            if _left_alone(run, before):
                return
            yield _find_cause(run, before, events, f"after step {step} {words}")
        else:
            yield finding_at("weights_differ", first["at"], f"after step {step} {words}")


def _differ_at_start(run: RecordedRun, first: Event, differing: list[tuple[str, float]], evidence: str) -> Finding:
    """weights_differ_at_start, or unknown_to_ddp if all these parameters were added to a DDP module later.

    Names the first line found of these: only some ranks load a state; weights are initialized; only some ranks write
    weights; the seed depends on the rank. Otherwise names the line that creates the first of the differing weights.
    """
    added = {name for name, (_, how, *_) in (first.get("outside") or {}).items() if "later" in how}
    names = {name for name, _ in differing}
    if names <= added:  # DDP did not broadcast them, and will not reduce them
        return _unknown_to_ddp(run, first, names, f"{evidence}; DDP does not reduce them")
    line, words = _state_load_line(run)
    seed, drawn = script_lines.rank_seed(run), run.line("initialized")
    line = line or drawn or script_lines.weight_write(run, first["at"], by_rank=True) or seed
    line = line or (first.get("made_at") or {}).get(differing[0][0]) or first["at"]
    return finding_at("weights_differ_at_start", line, evidence + words, seed)


def _describe(differing: list[tuple[str, float]], tensors: Samples, what: str = "tensors") -> str:
    """Describe for the evidence how many tensors differ, which ones, and by how much."""
    return (
        f"{len(differing)} of {len(tensors)} {what} differ between ranks ({listed([name for name, _ in differing])}), "
        f"by up to {max(size for _, size in differing):.1e} of their mean magnitude"
    )


def _differing(ranks: list[Samples], without: Collection[str] = ()) -> list[tuple[str, float]]:
    """(name, largest difference / mean magnitude) of each tensor that differs, except those in `without`."""
    found = []
    for name, first in ranks[0].items():
        others = [o for tensors in ranks[1:] if (o := tensors.get(name)) is not None and o[0] == first[0]]
        values = [[*o[3:], o[1] / o[0], o[2] / o[0]] for o in (first, *others)]
        mean = max(max((abs(v[-2]) for v in values if math.isfinite(v[-2])), default=0.0), 1e-12)
        size = max((_distance(a, b) for v in values[1:] for a, b in zip(values[0], v)), default=0.0)
        # Tensors that differ in size between ranks are shards of one model.
        if size > TOLERANCE * mean and len(others) == len(ranks) - 1 and name not in without:
            found.append((name, size / mean))
    return found


def _distance(a: float, b: float) -> float:
    """|a - b|. Two NaN have the distance 0; a NaN and a number have an infinite distance."""
    if a == b or (a != a and b != b):
        return 0.0
    return math.inf if math.isnan(a - b) else abs(a - b)


def _written_outside(run: RecordedRun, opt: int, step: int, alike: int | None, words: str) -> Iterator[Finding]:
    """written_outside: the ranks' weights are equal after one step and differ before a later step, and a recorder saw
    them change in between, outside the optimizer."""
    moved = [
        {e["step"]: e for e in run.events(rank, "moved", opt=opt) if alike is not None and alike <= e["step"] <= step}
        for rank in run.peers
    ]
    first = min((number for m in moved for number in m), default=None)
    if first is not None:
        who = [rank for rank, m in zip(run.peers, moved, strict=True) if first in m]
        owner = f"rank {who[0]}'s" if len(who) == 1 else "the ranks'"
        at = next(m[first]["at"] for m in moved if first in m)
        evidence = (
            f"{owner} weights changed between step {first} and the next, outside the optimizer; before step {step + 1} "
            f"{words}"
        )
        yield finding_at("written_outside", script_lines.weight_write(run, at) or at, evidence)


def _left_alone(run: RecordedRun, before: list[Event]) -> bool:
    """Were gradients reduced at first, but neither for this step nor for any later step of a shortened run?

    Then the ranks may average their weights after the last recorded step (post-local SGD,
    https://arxiv.org/abs/1808.07217). One step alone is the last of an epoch, and no phase of training.

    Args:
        before: the "before" event of each rank at the step.
    """
    if not run.shortened:
        return False
    for rank, e in zip(run.peers, before, strict=True):
        events = run.ranks[rank]
        first = len(_until(events, e)) - len(_since_step(events, e))
        steps = sum(later["k"] == "before" for later in events[first:])
        if steps < 2 or not any(map(_reduces, events[:first])) or any(map(_reduces, events[first:])):
            return False
    return True


def _unseen_averages(run: RecordedRun) -> str:
    """What doctor cannot know of a shortened run whose ranks train alone; "" for a whole run."""
    if not run.shortened:
        return ""
    remedy = "mend the error that ended the script" if run.failed else "give a larger --steps"
    return f". If the ranks average their weights after these {run.steps()} steps (local SGD), {remedy}"


def _reduces(e: Event) -> bool:
    """Does this event reduce gradients over the ranks?"""
    return (e["k"] == "coll" and e.get("of") == "grad") or (e["k"] == "backward" and bool(e["synced"]))


def _find_cause(run: RecordedRun, before: list[Event], after: list[Event], when: str) -> Finding:
    """The cause of weights that differ after a step, although they agreed at the last compared step before it."""
    given: list[Samples] = [e.get("grads") or {} for e in before]
    differing = _differing(given, run.model_parallel)
    at = before[0]["at"]
    if not differing:
        return _optimizer_differs(run, before, after, when)
    when += f"; {_describe(differing, given[0], 'gradients')} at that step"
    if not run.reduces_gradients:
        when += f"; no gradients were reduced, neither by DDP nor by the script{_unseen_averages(run)}"
        return finding_at("not_reduced", at, when, _averaged_copy_line(run, before[0]))
    if any(run.events(0, "ddp")):
        return _under_ddp(run, before, {name for name, _ in differing}, when)
    kept, wrap = _unreduced_names(given, [e.get("own") or {} for e in before]), run.line("fsdp")
    reduction = next(run.events(0, "coll", of="grad"), None)
    if kept and reduction is not None:
        evidence = f"{when}; gradients of {', '.join(kept[:_NAMED])} are not reduced, but others are"
        beside = script_lines.condition_in_loop(reduction["at"])  # it leaves parameters out
        beside = beside or script_lines.frame_in_scope(reduction.get("by") or [], at)
        return finding_at("partly_reduced", reduction["at"], evidence, beside)
    if wrap is not None and reduction is None:
        evidence = f"{when}; FSDP does not manage these parameters, and nothing else reduces their gradients"
        return finding_at("partly_reduced", wrap, evidence, at, _HELD_BY_FSDP)
    left = next((e["unwaited"] for e in before if e.get("unwaited")), None)
    if left is not None:
        when += f", and the script did not wait for {left[0]} of its asynchronous reductions, so they may be unfinished"
        return finding_at("gradients_differ", left[1], when, at)
    if not any(map(_reduces, _since_step(run.ranks[0], before[0]))):
        return finding_at(
            "gradients_differ", at, f"{when}; the script reduced none of them, although it did at other steps"
        )
    line = script_lines.gradient_write(run, at)
    return finding_at("gradients_differ", line or at, f"{when}, although gradients are reduced")


def _averaged_copy_line(run: RecordedRun, before: Event) -> Any:
    """The line that reduces, after the first step, a tensor with the size of one weight or of all weights: probably a
    copy of gradients."""
    sizes = {int(values[0]) for values in before["weights"].values()}
    sizes.add(sum(sizes))
    since = dropwhile(lambda e: e["k"] != "step", run.events(0, "step", "coll"))
    sums = (e for e in since if e["k"] == "coll" and "reduce" in e["op"])
    copy = next((e for e in sums if max(1, e.get("n") or 0) in sizes - {1}), None)
    return None if copy is None else script_lines.frame_in_scope(copy.get("path") or [], before["at"])


def _unreduced_names(given: list[Samples], own: list[Samples]) -> list[str]:
    """The names of the gradients that are not reduced. Gradients that differ between two ranks only by a common factor
    count as reduced, because each rank may have clipped by its local norm."""
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
    """The number c > 0 with theirs = c * ours; None if there is no such number."""
    factor = multiple_of(ours[2:], theirs[2:], TOLERANCE)
    return factor if factor is not None and factor > 0 else None


def _until(events: list[Event], before: Event) -> list[Event]:
    """A rank's events up to the event `before`, without it."""
    return list(takewhile(lambda e: e is not before, events))


def _since_step(events: list[Event], before: Event, opt: int | None = None) -> list[Event]:
    """A rank's events from the last step of an optimizer (None: of any optimizer) to the event `before`."""
    done = _until(events, before)
    steps = (i for i in reversed(range(len(done))) if done[i]["k"] == "step" and opt in (None, done[i]["opt"]))
    return done[next(steps, 0) :]


def _under_ddp(run: RecordedRun, ranks: list[Event], names: set[str], when: str) -> Finding:
    """unknown_to_ddp, sync_off, past_ddp or gradients_differ.

    Args:
        ranks: the "before" event of each rank at the step.
        names: the gradients that differ at the step.
    """
    before = ranks[0]
    window = _since_step(run.ranks[0], before, before["opt"])
    outside = before.get("outside") or {}
    # If one gradient is not reduced, each rank clips by a different norm. Then all gradients differ before the step,
    # but after the backward only the unreduced ones do.
    unreduced = {name for name, _ in _differing([e.get("own") or {} for e in ranks])} or names
    if unreduced <= set(outside):
        those = "them" if unreduced == names else "the gradients of " + ", ".join(sorted(unreduced)[:_NAMED])
        return _unknown_to_ddp(run, before, unreduced, f"{when}; DDP does not reduce {those}")
    passes = [e for e in window if e["k"] == "backward"]
    past = [e for e in window if e["k"] == "past"] or list(run.events(0, "past"))
    if passes and not passes[-1]["synced"] and passes[-1]["local"]:
        line = run.line("no_sync") or script_lines.attribute_use(run, "require_backward_grad_sync")
        usual = run.line("before", opt=before["opt"])
        line = before["at"] if usual != before["at"] else line  # a separate step for the rest of an epoch
        evidence = f"{when}; the last of {len(passes)} backward passes before the step ran under no_sync"
        evidence += _unseen_averages(run)
        return finding_at("sync_off", line or passes[-1]["at"], evidence)
    if any(not e["synced"] and not e["local"] for e in passes):
        line = past[0]["at"] if past else script_lines.attribute_use(run, "module") or passes[-1]["at"]
        evidence = f"{when}; a backward used a forward that bypassed the DDP module"
        return finding_at("past_ddp", line, evidence)
    if past:
        evidence = f"{when}; before that step the script also called the module inside DDP directly"
        return finding_at("past_ddp", past[0]["at"], evidence)
    line = script_lines.gradient_write(run, before["at"])
    return finding_at("gradients_differ", line or before["at"], f"{when}, although DDP reduced gradients")


def _unknown_to_ddp(run: RecordedRun, before: Event, names: set[str], words: str) -> Finding:
    """unknown_to_ddp. Names the line that unfroze or created the parameters. If a function created them, names the call
    of the function in the scope that wraps the model with DDP."""
    at, how, *stack = next(place for name, place in (before.get("outside") or {}).items() if name in names)
    line = (script_lines.unfreeze(run) if "frozen" in how else None) or at or before["at"]
    wrap = run.line("ddp")
    call = script_lines.frame_in_scope(stack[0], wrap) if stack and stack[0] and wrap else None
    return finding_at("unknown_to_ddp", call or line, f"{words}: they were {how}", line if call else wrap)


def _optimizer_differs(run: RecordedRun, before: list[Event], after: list[Event], when: str) -> Finding:
    """optimizer_differs or weights_differ: the gradients are equal, but the updates differ."""
    settings = [e.get("settings") or [] for e in before]
    made, at = run.line("optimizer", opt=before[0]["opt"]), before[0]["at"]
    restored = restored_line(run, before[0])
    for rank, theirs in zip(run.peers[1:], settings[1:]):
        for a, b in zip(settings[0], theirs):
            name = next((k for k in (*a, *b) if a.get(k) != b.get(k)), None)
            if name is not None:
                evidence = (
                    f"{when}, with equal gradients: {name} is {a.get(name)} on rank 0 and {b.get(name)} on rank {rank}"
                )
                return finding_at("optimizer_differs", restored or made or at, evidence, made)
    state = _differing([e.get("state") or {} for e in after])
    if state:
        line = restored or next((e["at"] for e in run.all_events("restored")), None)
        evidence = f"{when}, with equal gradients: {_describe(state, after[0]['state'], 'optimizer state tensors')}"
        return finding_at("optimizer_differs", line or at, evidence)
    return finding_at("weights_differ", at, f"{when}, although the gradients of that step were equal")


def _buffers(run: RecordedRun) -> Iterator[Finding]:
    """buffers_differ: buffers, such as running means of each rank's data, are never sent, or DDP overwrites them with
    rank 0's buffers."""
    steps = run.at_common_steps("buffers") if run.reduces_gradients else []
    for kind, words in (
        ("buffers", "they are never sent between ranks"),
        ("sent", "DDP then overwrites them with rank 0's, and the other ranks' values are lost"),
    ):
        differing = [_differing([e.get(kind) or {} for e in events]) for events in steps]
        if sum(map(bool, differing)) < 2 or not differing[-1]:
            continue
        saves = [e for e in run.all_events("save") if e.get("own_buffers") or e.get("other_buffers")]
        if saves and not any(e["own_buffers"] for e in saves):  # the script combines the ranks' buffers first
            continue
        last, parts = steps[-1][0], differing[-1]
        line = script_lines.buffer_write(run, parts[0][0].rpartition(".")[2])
        if line is not None or kind == "buffers":
            kept = next((e["at"] for e in run.events(0, "ddp") if not e.get("broadcasts", True)), None)
            evidence = f"after step {last['step']} {_describe(parts, last[kind], 'buffers')}; {words}"
            evidence += "; a checkpoint holds those of one rank" if saves else ""
            at, call = line or kept or run.line("step", opt=last["opt"]), script_lines.call_of_scope(run, line)
            yield finding_at("buffers_differ", at, evidence, call)


def _summed(run: RecordedRun) -> Iterator[Finding]:
    """summed_gradients: each rank's loss is a mean, but the optimizer gets the sum of the ranks' gradients."""
    steps = [events for events in run.at_common_steps("before", "own") if all(e.get("grads") for e in events)]
    kinds = {e.get("form", e["mean"]) for events in run.per_peer("backward") for e in events}
    if len(run.peers) < 2 or len(steps) < 2 or kinds != {"mean"} or divides_rate(run):
        return
    hooked = any(e["mean"] != "mean" for e in run.events(0, "backward"))
    for events in steps:
        own = [_reduced_samples(run, rank, e) if hooked else e["own"] for rank, e in zip(run.peers, events)]
        factor = _sum_factor(own, events[0]["grads"])
        if factor is None or abs(factor * events[0].get("scale", 1.0) - 1) > SUMMED:
            return
    evidence = (
        f"at {len(steps)} of {len(steps)} compared steps the optimizer got the sum of the gradients of "
        f"{len(run.peers)} ranks, each from a loss that is a mean, and nothing divided it"
    )
    reduction = next(run.events(0, "coll", of="grad"), steps[0][0])
    yield finding_at("summed_gradients", reduction["at"], evidence)


def _reduced_samples(run: RecordedRun, rank: int, before: Event) -> Samples:
    """Samples of the tensors that a rank passed to the reductions before a step. For scripts with a hook that reduces
    gradients during the backward."""
    if len(list(run.events(rank, "optimizer"))) != 1:
        return {}  # parameters are numbered through all optimizers
    order, events = list(before["weights"]), _since_step(run.ranks[rank], before)
    sent = (e for e in events if e["k"] == "coll" and e.get("of") == "grad" and e.get("given"))
    return {order[n - 1]: e["given"] for e in sent if 0 < (n := e.get("number") or 0) <= len(order)}


def _sum_factor(own: list[Samples], given: Samples) -> float | None:
    """The number c with given = c * (sum of `own` over all ranks); None if there is no such number."""
    sums: list[float] = []
    used: list[float] = []
    for name, values in given.items():
        theirs = [o[name] for o in own if name in o and o[name][0] == values[0]]
        if len(theirs) < len(own):
            return None
        sums += [sum(t[i] for t in theirs) for i in range(2, len(values))]
        used += values[2:]
    return multiple_of(sums, used, SUMMED)
