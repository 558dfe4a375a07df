"""Rules about the model: batch norm, modes, parameters without gradients, losses that are means over unequal counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at, first_of_each, listed

T = TypeVar("T")
Divisors = Sequence[Sequence[float]]  # of each rank: [count, factor]

MIN_STEPS = 3  # steps without a gradient, or backward passes of unequal counts
UNEQUAL = 1e-3  # relative difference of counts that are not equal
MOSTLY = 0.5  # share of the backward passes: the last batch may be smaller on one rank
MIN_UNLIKE = 2  # backward passes before which ranks' models were in different modes
_NAMED = 4
# What to do where parameters have no gradient.
_OF_THE_COPY = "Make the optimizer from the parameters of the model that is trained, not of a copy."
_WITH_A_GRAPH = (
    "Gather with torch.distributed.nn.functional.all_gather, whose results have a graph, or put this rank's own tensor "
    "back among what was gathered."
)
_BEFORE_THE_WRAP = (
    "Tie and replace parameters before DDP wraps the model, and make the optimizer after that, from all parameters "
    "that are used."
)


def findings(run: RecordedRun) -> list[Finding]:
    """no_gradient, batch_norm, modes_differ, loss_mean_of_means."""
    training = (_batch_norm, _modes, _mean_losses) if run.reduces_gradients else ()
    return first_of_each(run, _no_gradient, *training)


def _modes(run: RecordedRun) -> Iterator[Finding]:
    """modes_differ: before the same backward pass, parts of the model are in evaluation mode on some ranks only."""
    per_rank = [_by_backward(run.ranks[rank]) for rank in run.peers]
    passes = list(zip(*per_rank)) if len(set(map(len, per_rank))) == 1 else []
    unlike = [now for now in passes if any(_unlike(now[0], theirs) for theirs in now[1:])]
    if len(unlike) >= MIN_UNLIKE:
        pairs = [(rank, mode) for rank, modes in zip(run.peers, unlike[0]) for mode in modes.values() if mode["count"]]
        rank, mode = max(pairs, key=lambda pair: pair[1]["count"])
        names = ", ".join(filter(None, mode["still"])) + (", ..." if mode["count"] > len(mode["still"]) else "")
        evidence = (
            f"in the forward of {len(unlike)} of {len(passes)} backward passes the ranks' models were not in the same "
            f"mode: rank {rank} had {mode['count']} of {mode['of']} parts of {mode['module']} that compute by their "
            f"mode ({names}) in evaluation mode"
        )
        yield finding_at("modes_differ", mode["at"], evidence)


def averaged_passes(run: RecordedRun) -> list[tuple[Event, ...]]:
    """The peers' "backward" events of each backward pass, where DDP or FSDP averages what these leave; [] where a hook
    or the script rescales the gradients, or ranks end early (Join)."""
    passes = run.together("backward") if any(run.events(0, "ddp", "fsdp")) and not run.has("join") else []
    hooked = any(now[0]["mean"] != now[0].get("form", now[0]["mean"]) for now in passes)
    return [] if hooked or any(e["rescaled"] for e in run.events(0, "before")) else passes


def differ(values: Sequence[float]) -> bool:
    """Are these numbers not equal, within rounding?"""
    return max(values) - min(values) > UNEQUAL * max(map(abs, values))


def unequal_divisors(passes: Sequence[tuple[T, Divisors]]) -> list[tuple[T, Divisors]]:
    """The passes in which ranks divide by unequal counts, where these are most, and no rank weighs its mean by its
    share of all counts; or else []."""
    counted = [(now, found) for now, found in passes if all(count > 0 for count, _ in found)]
    unequal = [(now, found) for now, found in counted if differ([count for count, _ in found])]
    weighed = any(not differ([factor / count for count, factor in found]) for _, found in unequal)
    habit = len(unequal) >= MIN_STEPS and len(unequal) >= MOSTLY * len(counted)
    return unequal if habit and not weighed else []


def _mean_losses(run: RecordedRun) -> Iterator[Finding]:
    """loss_mean_of_means: each rank divides its loss by a count of its own, such as its tokens or the nodes of its
    graphs, and the gradients are averaged. Not where a rank multiplies its mean by its share of all counts, or a hook
    or the script rescales the gradients; nor of a mean over a padded rectangle, whose width is the longest example's.
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
            f"in {len(unequal)} of {counted} backward passes each rank divided {what} by a number of its own, "
            f"first by {shown}, and the gradients were averaged as if these were equal"
        )
        yield finding_at("loss_mean_of_means", first["at"], evidence, script_lines.loss_line(first))


def _examples(run: RecordedRun, rank: int) -> list[int]:
    """For each backward pass of a rank: the number of examples in the batch before it; 0: not known."""
    found, read = [], 0
    for e in run.events(rank, "yield", "backward"):
        if e["k"] == "backward":
            found.append(read)
        elif e["loader"] in run.training_loaders:
            read = len(e["idx"] or (e["rows"] or [[]])[0])
    return found


def _is_rectangle(divisors: list[list[float]], examples: Sequence[int]) -> bool:
    """May each rank's mean be over a number of elements that is the same for each of its examples?"""
    return not all(examples) or all(count % each == 0 for (count, _), each in zip(divisors, examples))


def _divisor(backward: Event, term: int | None) -> list[float]:
    """[count, factor] of a loss (None) or of one of its terms that are means of elements; zeros where it has none."""
    if term is None:
        return backward.get("count") or [0.0, 0.0]
    means = backward.get("means") or []
    return means[term] if term < len(means) else [0.0, 0.0]


def _by_backward(events: list[Event]) -> list[dict[str, Event]]:
    """For each backward pass: "class number" of a model -> its last "mode" event before that pass."""
    modes: dict[str, Event] = {}
    found = []
    for e in events:
        if e["k"] == "mode":
            modes = {**modes, f"{e['module']} {e['ddp']}": e}
        elif e["k"] == "backward":
            found.append(modes)
    return found


def _unlike(ours: dict[str, Event], theirs: dict[str, Event]) -> bool:
    """Is any model in another mode there?"""
    return any(name in theirs and e["digest"] != theirs[name]["digest"] for name, e in ours.items())


def _batch_norm(run: RecordedRun) -> Iterator[Finding]:
    """batch_norm: a batch norm of a model with replicas computes in training mode."""
    wrapped = any(run.events(0, "ddp"))
    inside = [e for e in run.events(0, "norm") if e["trained"] and (e["ddp"] is not None or not wrapped)]
    norms = list({e["name"]: e for e in reversed(inside)}.values())[::-1]
    if norms:
        evidence = (
            f"{len(norms)} {norms[0]['kind']} ({listed([e['name'] for e in norms])}) in training mode; each of "
            f"{run.world_size} replicas uses the statistics of its own {norms[0]['size']} examples"
        )
        yield finding_at("batch_norm", norms[0]["at"], evidence)


def _is_other_copy(run: RecordedRun, never: set[str]) -> bool:
    """Was the optimizer made from another copy of the model? It is the script's only one, and none of its several
    parameters ever has a gradient. (An idle optimizer beside others may be there for its schedule, or train a part
    later.)"""
    alone = len(list(run.events(0, "optimizer"))) == 1
    return len(never) > 1 and alone and len(list(run.events(0, "backward"))) >= MIN_STEPS


def _no_gradient(run: RecordedRun) -> Iterator[Finding]:
    """no_gradient: parameters that had no gradient at any of their optimizer's steps, on any rank."""
    # DDP refuses its second forward where parameters have no gradient, unless it is told to search for them.
    refused = not run.completed and any(not e.get("find_unused") for e in run.events(0, "ddp"))
    for opt in sorted({e["opt"] for e in run.events(0, "before")}):
        steps = list(run.all_events("before", opt=opt))
        never = set.intersection(*(set(e["without"]) for e in steps))
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
            evidence += "; what a collective gathered of a tensor with a graph has no graph of its own"
            fitting = _WITH_A_GRAPH
        elif replaced is not None:
            evidence += "; after DDP had wrapped the model, a parameter of it was replaced by another one"
            fitting = _BEFORE_THE_WRAP
        made = run.line("optimizer", opt=opt) or steps[0]["at"]
        yield finding_at("no_gradient", made, evidence, cut or replaced, fitting)
