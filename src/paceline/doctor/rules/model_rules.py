"""Rules about the model: batch norm, modes, parameters without gradients, losses that average over unequal counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at, first_of_each, listed
from paceline.doctor.rules.script_lines import Line

T = TypeVar("T")
Divisors = Sequence[Sequence[float]]  # per rank: [count, factor]

MIN_STEPS = 3  # steps without a gradient, or backward passes with unequal counts
UNEQUAL = 1e-3  # relative difference between counts that are not equal
MOSTLY = 0.5  # fraction of the backward passes: the last batch may be smaller on one rank
MIN_UNLIKE = 2  # backward passes with the ranks' models in different modes
_NAMED = 4
# Remedies for parameters without gradients.
_OF_THE_COPY = "Make the optimizer from the parameters of the model that is trained, not of a copy."
_WITH_A_GRAPH = (
    "Gather with torch.distributed.nn.functional.all_gather, which keeps the autograd graph, or put the local tensor "
    "back: gathered[rank] = tensor."
)
_BEFORE_THE_WRAP = (
    "Tie and replace parameters before DDP wraps the model. Then make the optimizer, from all parameters that are used."
)


def findings(run: RecordedRun) -> list[Finding]:
    """no_gradient, batch_norm, modes_differ, loss_mean_of_means."""
    training = (_batch_norm, _modes, _mean_losses) if run.reduces_gradients else ()
    return first_of_each(run, _no_gradient, *training)


def _modes(run: RecordedRun) -> Iterator[Finding]:
    """modes_differ: during the same backward pass, parts of the model are in evaluation mode on some ranks only."""
    per_rank = [_by_backward(run.ranks[rank]) for rank in run.peers]
    passes = list(zip(*per_rank)) if len(set(map(len, per_rank))) == 1 else []
    unlike = [now for now in passes if any(_unlike(now[0], theirs) for theirs in now[1:])]
    if len(unlike) >= MIN_UNLIKE:
        pairs = [(rank, mode) for rank, modes in zip(run.peers, unlike[0]) for mode in modes.values() if mode["count"]]
        rank, mode = max(pairs, key=lambda pair: pair[1]["count"])
        names = ", ".join(filter(None, mode["still"])) + (", ..." if mode["count"] > len(mode["still"]) else "")
        evidence = (
            f"in the forward of {len(unlike)} of {len(passes)} backward passes the ranks' models were in different "
            f"modes: on rank {rank}, {mode['count']} of {mode['of']} modules of {mode['module']} with a training mode "
            f"({names}) were in evaluation mode"
        )
        yield finding_at("modes_differ", mode["at"], evidence)


def averaged_passes(run: RecordedRun) -> list[tuple[Event, ...]]:
    """For each backward pass the peers' "backward" events, if DDP or FSDP averages the gradients. [] if the script
    combines or rescales the gradients, or if ranks end early (Join)."""
    averaged = any(run.events(0, "ddp", "fsdp")) and not run.has("join", "own_reduction")
    passes = run.together("backward") if averaged else []
    hooked = any(now[0]["mean"] != now[0].get("form", now[0]["mean"]) for now in passes)
    return [] if hooked or any(e["rescaled"] for e in run.events(0, "before")) else passes


def differ(values: Sequence[float]) -> bool:
    """Do these numbers differ by more than rounding?"""
    return max(values) - min(values) > UNEQUAL * max(map(abs, values))


def unequal_divisors(passes: Sequence[tuple[T, Divisors]]) -> list[tuple[T, Divisors]]:
    """The backward passes in which the ranks divide by unequal counts. [] if there are fewer than MIN_STEPS, or fewer
    than the fraction MOSTLY. Also [] if each rank multiplies its mean by its share of the total count."""
    counted = [(now, found) for now, found in passes if all(count > 0 for count, _ in found)]
    unequal = [(now, found) for now, found in counted if differ([count for count, _ in found])]
    weighed = any(not differ([factor / count for count, factor in found]) for _, found in unequal)
    habit = len(unequal) >= MIN_STEPS and len(unequal) >= MOSTLY * len(counted)
    return unequal if habit and not weighed else []


def _mean_losses(run: RecordedRun) -> Iterator[Finding]:
    """loss_mean_of_means: each rank divides its loss by a local count, such as its tokens or the nodes of its graphs,
    and the gradients are averaged.

    No finding if each rank multiplies its mean by its share of the total count, or if a hook or the script rescales the
    gradients. No finding for a mean over a padded rectangle, because its width depends on the longest example.
    """
    passes = averaged_passes(run)
    terms = max((len(now[0].get("means") or ()) for now in passes), default=0)
    rows = list(zip(*(_examples(run, rank) for rank in run.peers)))
    for term in (None, *range(terms)) if passes else ():
        found = [(now, read, [_divisor(e, term) for e in now]) for now, read in zip(passes, rows)]
        kept = [(now, own) for now, read, own in found if term is None or not _is_rectangle(own, read)]
        if not (unequal := unequal_divisors(kept)):
            continue
        (first, *_), own = unequal[0]
        counted = sum(all(count > 0 for count, _ in theirs) for _, theirs in kept)
        shown = " and ".join(f"{count:g}" for count, _ in own[:_NAMED])
        what = "its loss" if term is None or terms == 1 else "a term of its loss"
        evidence = (
            f"in {len(unequal)} of {counted} backward passes the ranks divided {what} by different local counts (at "
            f"first {shown}), and the gradients were averaged as if the counts were equal"
        )
        made = _line(first, term)
        beside = first["at"] if made else script_lines.loss_line(first)
        yield finding_at("loss_mean_of_means", made or first["at"], evidence, beside)


def _line(backward: Event, term: int | None) -> Line:
    """The line that divides the loss (term=None), or its term number `term` in "means"; None if unknown."""
    lines = backward.get("lines") or {}
    if term is None:
        return lines.get("count") or None
    means = lines.get("means") or []
    return means[term] or None if term < len(means) else None


def _examples(run: RecordedRun, rank: int) -> list[int]:
    """For each backward pass of a rank: the number of examples in the last batch before it; 0 if unknown."""
    found, read = [], 0
    for e in run.events(rank, "yield", "backward"):
        if e["k"] == "backward":
            found.append(read)
        elif e["loader"] in run.training_loaders:
            read = len(e["idx"] or (e["rows"] or [[]])[0])
    return found


def _is_rectangle(divisors: list[list[float]], examples: Sequence[int]) -> bool:
    """May each rank's mean cover the same number of elements of each example?"""
    return not all(examples) or all(count % each == 0 for (count, _), each in zip(divisors, examples))


def _divisor(backward: Event, term: int | None) -> list[float]:
    """[count, factor] of the loss (term=None), or of its term number `term` in "means"; zeros if unknown."""
    if term is None:
        return backward.get("count") or [0.0, 0.0]
    means = backward.get("means") or []
    return means[term] if term < len(means) else [0.0, 0.0]


def _by_backward(events: list[Event]) -> list[dict[str, Event]]:
    """For each backward pass: a model ("Net 0": its class and number) -> its last "mode" event before the pass."""
    modes: dict[str, Event] = {}
    found = []
    for e in events:
        if e["k"] == "mode":
            modes = {**modes, f"{e['module']} {e['ddp']}": e}
        elif e["k"] == "backward":
            found.append(modes)
    return found


def _unlike(ours: dict[str, Event], theirs: dict[str, Event]) -> bool:
    """Is any model in different modes on two ranks?"""
    return any(name in theirs and e["digest"] != theirs[name]["digest"] for name, e in ours.items())


def _batch_norm(run: RecordedRun) -> Iterator[Finding]:
    """batch_norm: a batch norm of a replicated model computes in training mode."""
    wrapped = any(run.events(0, "ddp"))
    inside = [e for e in run.events(0, "norm") if e["trained"] and (e["ddp"] is not None or not wrapped)]
    norms = list({e["name"]: e for e in reversed(inside)}.values())[::-1]
    if norms:
        evidence = (
            f"{len(norms)} {norms[0]['kind']} ({listed([e['name'] for e in norms])}) in training mode; each of "
            f"{run.world_size} replicas uses the statistics of its {norms[0]['size']} local examples"
        )
        yield finding_at("batch_norm", norms[0]["at"], evidence)


def _is_other_copy(run: RecordedRun, never: set[str]) -> bool:
    """Was the optimizer made from another copy of the model? Yes if it is the script's only optimizer, and none of its
    parameters ever has a gradient. (One idle optimizer of several may exist for its schedule, or train a part later.)
    """
    alone = len(list(run.events(0, "optimizer"))) == 1
    return len(never) > 1 and alone and len(list(run.events(0, "backward"))) >= MIN_STEPS


def _trained_by_others(run: RecordedRun, opt: int) -> set[str]:
    """Names of parameters that have a gradient at a step of another optimizer, such as the heads of earlier tasks."""
    others = (e for e in run.all_events("before") if e["opt"] != opt)
    return {name for e in others for name in e.get("grads") or () if name not in e["without"]}


def _no_gradient(run: RecordedRun) -> Iterator[Finding]:
    """no_gradient: parameters that had no gradient at any of their optimizer's steps, on any rank."""
    # Without find_unused_parameters, DDP refuses the second forward if parameters have no gradient.
    refused = not run.completed and any(not e.get("find_unused") for e in run.events(0, "ddp"))
    for opt in sorted({e["opt"] for e in run.events(0, "before")}):
        steps = list(run.all_events("before", opt=opt))
        never = set.intersection(*(set(e["without"]) for e in steps)) - _trained_by_others(run, opt)
        whole = len(never) == steps[0]["parameters"]
        few = len(steps) < (1 if refused else MIN_STEPS) * run.processes
        if few or not never or (whole and not _is_other_copy(run, never)):
            continue
        names = [name for name in steps[0]["without"] if name in never]
        evidence = (
            f"{len(names)} of the optimizer's {steps[0]['parameters']} parameters had no gradient at any of "
            f"{len(steps) // run.processes} steps: {listed(names)}"
        )
        cut = next((e["at"] for e in run.events(0, "coll") if e.get("cuts")), None)
        replaced = next((e["at"] for e in run.events(0, "replaced") if e["at"]), None)
        fitting = _OF_THE_COPY if whole else ""
        if cut is not None:
            evidence += "; a collective on a tensor with an autograd graph returned a tensor without one"
            fitting = _WITH_A_GRAPH
        elif replaced is not None:
            evidence += "; the script replaced a parameter of the model after DDP had wrapped it"
            fitting = _BEFORE_THE_WRAP
        made = run.line("optimizer", opt=opt) or steps[0]["at"]
        yield finding_at("no_gradient", made, evidence, cut or replaced, fitting)
