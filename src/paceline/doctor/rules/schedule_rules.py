"""Rules about learning rates, schedulers and accumulation."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby, product
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.recorded_run import (
    Event,
    RecordedRun,
    finding_at,
    first_of,
    first_of_each,
    restored_line,
)
from paceline.observe.expressions import (
    WORLD,
    accumulates,
    call_arguments,
    call_at,
    call_line,
    divided_by,
    pieces,
    text_of,
)

OVER = 1e-5  # a schedule is over when its rate is at most this fraction of the highest rate
OVER_SHARE = 0.2  # minimum fraction of the steps after the schedule is over, for a finding
# Fraction of the highest rate to which a schedule in epochs may fall: in a whole run, in one epoch.
FELL, FELL_EPOCH = 0.05, 0.8
# Fractions of the highest rate, for a rate that falls too early: it falls below LOW, and rises again above BACK.
LOW, BACK = 0.02, 0.5
MANY = 5  # minimum number of drops in a run, for a rate that should drop once in many epochs
MIN_BATCHES = 4  # minimum number of batches in an epoch: with fewer, an epoch looks like a step
MIN_UPDATES = 6  # minimum number of updates, to compare it with the length of a schedule
_WHOLE = (
    "CosineAnnealingLR",
    "OneCycleLR",
    "PolynomialLR",
    "LambdaLR",
)  # schedules that should be as long as the training
_OF_A_SET = re.compile(r"len\(([\w.]*\.dataset|(?![\w.]*(load|_dl\b))[\w.]*(data|set|train|x)\w*)\)", re.IGNORECASE)
_BY_BATCH = re.compile(r"/\s*\(?[\w.]*batch_?size\b", re.IGNORECASE)  # a number of examples, divided by a batch size
_OF_A_LOADER = re.compile(r"len\([\w.]*(load\w*|_dl)\)", re.IGNORECASE)
_WITH_LINES = ("optimizer", "sched", "sched_made", "loader", "backward", "pass", "ddp")
_BATCH_SIZE = re.compile(r"batch_?size|\b(batch|bs)\b", re.IGNORECASE)
# A number that is not yet divided by the number of processes.
_NO_SHARE = re.compile(f"{_OF_A_SET.pattern}|{_BATCH_SIZE.pattern}", re.IGNORECASE)
_WORLD_ALONE = re.compile(r"^\W*(int\()?[\w.]*(environ[\w.]*\W+)?world_size\W*$")  # nothing but the number of processes
_PARTS = re.compile(r"accum|micro", re.IGNORECASE)
_LOAD_ON_EVERY_RANK = "Load the same state of the optimizer and of the scheduler on every rank."
MIN_REPEATS = 3  # minimum number of repetitions: fewer may be an accident


def findings(run: RecordedRun) -> list[Finding]:
    """Check for lr_differs, schedule_length or scheduler_steps, accumulation and left_over."""
    return [
        *first_of(run, _lr_differs, _metrics_differ),
        *first_of(run, _schedule_length, _scheduler_steps),
        *first_of_each(run, _accumulation, _left_over),
    ]


def _lr_differs(run: RecordedRun) -> Iterator[Finding]:
    """lr_differs: at the same step of an optimizer, the ranks have different learning rates."""
    if not run.reduces_gradients or run.has("join"):
        return
    per_rank = [{(e["opt"], e["step"]): e for e in run.events(rank, "before")} for rank in range(run.processes)]
    for ((opt, step), ours), rank in product(per_rank[0].items(), run.peers[1:]):
        theirs = per_rank[rank].get((opt, step), ours)
        pairs = [(a, b) for a, b in zip(ours["lr"], theirs["lr"]) if a is not None and b is not None]
        alike = all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in pairs)
        if alike or len(theirs["lr"]) != len(ours["lr"]):
            continue
        stepped = [sum(1 for _ in run.events(r, "sched", opt=opt)) for r in (0, rank)]
        evidence = (
            f"at step {step + 1} lr is {ours['lr'][0]:.4g} on rank 0 and {theirs['lr'][0]:.4g} on rank {rank}; "
            f"they stepped the scheduler {stepped[0]} and {stepped[1]} times"
        )
        sched, made = next(run.all_events("sched"), None), run.line("optimizer", opt=opt)
        if restored := restored_line(run, ours):
            yield finding_at("lr_differs", restored, evidence, made, _LOAD_ON_EVERY_RANK)
        line = sched["at"] if sched and max(stepped) else script_lines.lr_assignment(run) or made or ours["at"]
        beside = made if not max(stepped) and step == 0 else None
        if sched and sched["type"] == "ReduceLROnPlateau":
            beside = script_lines.unsynced_log(run) or beside
        yield finding_at("lr_differs", line, evidence, beside)


def _metrics_differ(run: RecordedRun) -> Iterator[Finding]:
    """lr_differs: ReduceLROnPlateau gets another metric on each rank, so the ranks will lower their rates apart."""
    together = run.together("sched") if run.reduces_gradients and len(run.peers) > 1 else []
    given = [now for now in together if all(e.get("metric") is not None for e in now)]
    unlike = [now for now in given if any(not math.isclose(now[0]["metric"], e["metric"], rel_tol=1e-6) for e in now)]
    if len(unlike) >= 2:
        shown = " and ".join(f"{e['metric']:.6g}" for e in unlike[0][:2])
        evidence = (
            f"ReduceLROnPlateau got different metrics on the ranks in {len(unlike)} of {len(given)} steps (at first "
            f"{shown}), so they will lower their learning rates at different times"
        )
        yield finding_at("lr_differs", unlike[0][0]["at"], evidence, script_lines.unsynced_log(run))


def _schedulers(run: RecordedRun) -> dict[int, list[Event]]:
    """Scheduler number -> the scheduler's steps on rank 0."""
    by: dict[int, list[Event]] = defaultdict(list)
    for e in run.events(0, "sched", "sched_error"):
        by[e["sched"]].append(e)
    return by


def _updates(run: RecordedRun, sched: Event) -> list[Event]:
    """Rank 0's steps of the scheduler's optimizer; of all optimizers if the scheduler's is unknown."""
    opt = sched.get("opt")
    return [e for e in run.events(0, "before") if opt is None or e["opt"] == opt]


def _scheduler_steps(run: RecordedRun) -> Iterator[Finding]:
    """scheduler_steps: the scheduler steps once per process, or too often for its length."""
    for number, steps in _schedulers(run).items():
        evidence = _once_per_process(run, number) or _too_early(run, steps)
        if evidence:
            yield finding_at("scheduler_steps", steps[-1]["at"], evidence, run.line("sched_made", sched=number))


def _schedule_length(run: RecordedRun) -> Iterator[Finding]:
    """schedule_length: a schedule is too short or too long by a factor that is the number of processes or of
    micro-batches. The source must show the error too, because a run may be shorter than planned."""
    k, size = accumulated(run), run.world_size
    epochs = sum(p.loader in run.training_loaders and p.training for p in run.passes[0])
    for steps in _schedulers(run).values():
        last, count = steps[-1], len(steps)
        horizon, updates = last["horizon"], _updates(run, last)
        rates = [e["lr"][0] for e in updates if e["lr"] and e["lr"][0]]
        whole = last["type"] in _WHOLE and horizon and run.completed and not run.shortened and rates and size > 1
        if not whole or count < MIN_UPDATES or abs(count - len(updates)) > 1:
            continue
        lines, text, twice = _length_in_text(run, last)
        of_all_data = (_OF_A_SET.search(text) or _BY_BATCH.search(text)) and not WORLD.search(text)
        of_batches = k > 1 and _OF_A_LOADER.search(text) and not _PARTS.search(text)
        why = ""
        if _is_multiple(horizon, size, count, epochs) and twice:
            why = (
                f"the length was divided by the number of processes ({size}) twice: len() of a loader already counts "
                "only the rank's batches"
            )
        elif _is_multiple(count, size, horizon, epochs) and of_all_data:
            why = f"the length counts all data, but each of {size} processes reads only its shard"
        elif _is_multiple(count, k, horizon, epochs) and of_batches:
            why = f"the length counts micro-batches, {k} per update"
        if why:
            evidence = (
                f"its {last['name']} is {horizon}, and it was stepped {count} times, at every update: {why}; the "
                f"learning rate was {rates[-1]:.1e} at the end and {max(rates):.1e} at most"
            )
            yield finding_at("schedule_length", lines[0], evidence, lines[1])


def _length_in_text(run: RecordedRun, last: Event) -> tuple[tuple[Any, Any], str, bool]:
    """Read a schedule's length in the source.

    Returns (lines, text, twice). lines: the line that creates the schedule, and the line that divides its length by the
    number of processes or counts all data. text: the source of the length. twice: does the source divide a length that
    is already a rank's share by the number of processes again?
    """
    made = run.line("sched_made", sched=last["sched"])
    call = call_at(made)
    if made is None or call is None:
        lines = [e["at"] for e in run.events(0, "optimizer", "sched") if e["at"]]
        text = call_arguments(last["type"], *lines)
        return (call_line(last["type"], *lines) or last["at"], None), text, bool(WORLD.search(text))
    found = pieces(run.files(*_WITH_LINES), made[0], [*call.args[1:], *(k.value for k in call.keywords)])
    text = text_of(found)
    # The length of a loader is already a rank's share. An unknown name may be one too. The length of a data set is not.
    pattern = WORLD if _OF_A_LOADER.search(text) else _WORLD_ALONE
    divides = next((piece for piece in found if divided_by(piece, pattern, unless=_NO_SHARE)), None)
    whole = next((piece for piece in found if _OF_A_SET.search(piece.text) or _BY_BATCH.search(piece.text)), None)
    line = next((piece.line for piece in (divides, whole) if piece is not None), None)
    # Ignore a batch size that is divided by the number of processes, and the number of processes alone: neither is a
    # length.
    batches = [p for p in found if divided_by(p, WORLD) and not divided_by(p, WORLD, unless=_BATCH_SIZE)]
    rest = [p for p in found if p not in batches and not _WORLD_ALONE.search(p.text)]
    return (made, line), text_of(rest), divides is not None


def _is_multiple(part: int, factor: int, whole: int, epochs: int) -> bool:
    """Does part * factor equal the whole, except for rounding? The part may have been rounded up in each epoch."""
    return abs(part * factor - whole) <= max(factor, 0.05 * whole, min(factor * epochs, 0.15 * whole))


def _once_per_process(run: RecordedRun, number: int) -> str:
    """Evidence that the scheduler steps several times in a row, once per process; "" otherwise."""
    # Skip Accelerate's steps: its schedules allow for one step per process.
    steps = [e for e in run.events(0, "sched", sched=number) if not e.get("library")]
    own = set(map(id, (*steps, *run.events(0, "yield", "backward", "step", "before"))))
    both = [e for e in run.ranks[0] if id(e) in own]
    rows = [len(list(some)) for is_step, some in groupby(both, lambda e: e["k"] == "sched") if is_step]
    size = run.world_size
    if len(rows) >= 2 and size > 1 and set(rows) == {size} and steps[-1]["at"]:
        return f"it was stepped {size} times in a row, on {len(rows)} occasions: once per process"
    return ""


def _too_early(run: RecordedRun, steps: list[Event]) -> str:
    """Evidence that the scheduler ends too early: it steps per batch with a length in epochs, or per micro-batch."""
    updates = _updates(run, steps[-1])
    passes = [p for p in run.passes[0] if p.loader in run.training_loaders and p.training]
    often = _per_batch(steps, len(updates), len(passes))
    if not often:
        return ""
    error = next((e for e in steps if e["k"] == "sched_error"), None)
    if error is not None:
        return f"{often}; it raised: {error['text'].splitlines()[0][:120]}"
    epochs, each = len(passes), max((len(p.yields) for p in passes), default=0)
    meant = _meant_for_epochs(steps, epochs, each) or _meant_for_updates(steps, len(updates))
    if meant and len(steps) > 1.1 * steps[-1]["horizon"] + 1:
        return f"{often}; {meant}"
    rates = [e["lr"][0] for e in updates if e["lr"] and e["lr"][0] is not None]
    if not rates or max(rates) <= 0:
        return ""
    first = rates[: max(each, 1)]
    if steps[-1]["type"] == "ExponentialLR" and each >= MIN_BATCHES:
        if first[-1] < 0.1 * max(rates):
            return f"{often}; the rate fell from {first[0]:.1e} to {first[-1]:.1e} within the first epoch"
        if epochs > 1 and first[-1] < FELL_EPOCH * max(rates) and rates[-1] < FELL * max(rates):
            return f"{often}; the rate fell from {first[0]:.1e} to {rates[-1]:.1e} within {epochs} epochs"
    top = rates.index(max(rates))
    over = sum(1 for r in rates[top:] if r <= OVER * max(rates))
    if over >= max(2, OVER_SHARE * len(rates)):
        return (
            f"{often}; the rate was {rates[-1]:.1e}, at most {OVER:g} of the highest, for {over} of {len(rates)} steps"
        )
    return _comes_back(run, steps, rates, often)


def _comes_back(run: RecordedRun, steps: list[Event], rates: list[float], often: str) -> str:
    """Evidence that a library steps the scheduler once per process, but the scheduler's length does not allow for that.
    The rate then reaches its low point after 1/(number of processes) of the steps, and slowly rises again."""
    if not steps[-1].get("library") or run.world_size < 2 or len(steps) < run.world_size * (len(rates) - 1):
        return ""
    low = min(range(rates.index(max(rates)), len(rates)), key=rates.__getitem__)  # after a warm-up
    near = abs((low + 1) * run.world_size - len(rates)) <= 0.1 * len(rates) + run.world_size
    slowly = low + 1 < len(rates) and rates[low + 1] < BACK * max(rates)
    if near and slowly and rates[low] < LOW * max(rates) and rates[-1] > BACK * max(rates):
        return (
            f"{often}, {run.world_size} per update, for {run.world_size} processes; the rate fell to "
            f"{rates[low]:.1e} at step {low + 1} of {len(rates)}, and was {rates[-1]:.1e} at the end"
        )
    return ""


def _meant_for_epochs(steps: list[Event], epochs: int, each: int) -> str:
    """Evidence that the scheduler's length counts epochs; "" if it may count batches. (A cosine may rise and fall in
    each epoch on purpose, and a script may step a scheduler every ten batches.)

    each: the number of batches in an epoch.
    """
    last = steps[-1]
    horizon, kind = last["horizon"], last["type"]
    if not horizon or not epochs or each < MIN_BATCHES:
        return ""
    evidence = f"its {last['name']} is {horizon}, but an epoch has {each} batches"
    fell = last["lr"][0] / last["base"] if last["base"] and last["lr"] and last["lr"][0] is not None else 1.0
    shorter = horizon < each / 2 or (horizon < each and each % horizon != 0)
    if kind == "CosineAnnealingLR" and horizon % each != 0 and (horizon == epochs or shorter):
        return evidence
    counts = last["count"] is not None and last["count"] >= 0.9 * len(steps)  # not stepped by fractions of an epoch
    if kind == "CosineAnnealingWarmRestarts" and counts and horizon <= epochs and horizon < each / 2:
        return evidence
    if kind == "MultiStepLR" and horizon <= epochs and (fell <= 0.1 or (horizon < each / 2 and fell < 1)):
        return f"{evidence}, and the rate fell to {last['lr'][0]:.1e}"
    often = horizon < each / 2 and len(steps) >= MANY * horizon and fell <= FELL
    if kind == "StepLR" and ((horizon <= epochs and fell <= 0.1) or often):
        return f"{evidence}, and the rate fell to {last['lr'][0]:.1e}"
    return ""


def _meant_for_updates(steps: list[Event], updates: int) -> str:
    """Evidence that the scheduler's length counts optimizer steps: it is a cosine of about that length, and was stepped
    far more often. Otherwise ""."""
    last = steps[-1]
    horizon = last["horizon"]
    if last["type"] != "CosineAnnealingLR" or not horizon or abs(horizon - updates) > 0.1 * updates:
        return ""
    return f"its {last['name']} is {horizon}, for {updates} optimizer steps" if len(steps) > 1.5 * horizon else ""


def _per_batch(steps: list[Event], updates: int, epochs: int) -> str:
    """Describe how often the scheduler stepped, if it stepped more than once per epoch; otherwise ""."""
    count = len(steps)
    if updates < MIN_REPEATS or count < 2 or (epochs and count <= epochs + 1):
        return ""
    if count > 1.5 * updates:
        return f"it was stepped {count} times in {updates} optimizer steps"
    if epochs and count > 1.5 * epochs and count >= 0.5 * updates:
        return f"it was stepped at every batch, {count} times in {epochs} epoch{'s' if epochs > 1 else ''}"
    return ""


def micro_batches(run: RecordedRun) -> list[tuple[list[Event], Event]]:
    """(backward passes, the "before" event after them) for each optimizer step of rank 0.

    Several passes belong to one step if each pass has a separate batch, or if they are in a loop that names
    micro-batches. Otherwise only the first pass counts.
    """
    found = []
    backwards: list[Event] = []
    since = 0  # number of yields since the last backward
    single = True  # does each backward have a separate batch?
    read = 0  # number of yields since the last step
    loaders: set[str] = set()
    for e in run.ranks[0]:
        if e["k"] == "yield" and e["loader"] in run.training_loaders:
            since, read = since + 1, read + 1
            loaders.add(e["loader"])
        elif e["k"] == "backward":
            single = single and since >= 1
            since = 0
            backwards.append(e)
        elif e["k"] == "before":
            one_line = len({tuple(b["at"]) for b in backwards}) == 1
            in_loop = one_line and bool(backwards[0]["at"]) and accumulates(*backwards[0]["at"])
            window = one_line and read >= len(backwards)  # the batches are read first, then used one by one
            if len(backwards) > 1 and (((single or window) and len(loaders) == 1) or in_loop):
                found.append((backwards, e))
            elif backwards:
                found.append((backwards[:1], e))
            backwards, single, read, loaders = [], True, 0, set()
    return found


def accumulated(run: RecordedRun) -> int:
    """The most common number of backward passes per optimizer step; 1 if there are none."""
    sizes = Counter(len(backwards) for backwards, _ in micro_batches(run)).most_common(1)
    return sizes[0][0] if sizes else 1


def _accumulation(run: RecordedRun) -> Iterator[Finding]:
    """accumulation: each micro-batch's loss is a mean, and nothing divides by the number of micro-batches."""
    steps = micro_batches(run)
    several = [b for b, _ in steps if len(b) > 1]
    calls = [b for backwards in several for b in backwards]
    habit = len({e["opt"] for _, e in steps}) == 1 and len(several) >= 2 and len(several) * 2 >= len(steps)
    dropped = 2 * len(list(run.events(0, "dropped"))) >= len(several)  # then the gradients were not accumulated
    rescaled = any(e.get("rescaled") for e in run.events(0, "before", "step"))
    if habit and not dropped and not rescaled and all(b["mean"] == "mean" for b in calls):
        k = Counter(map(len, several)).most_common(1)[0][0]
        synced = any(b["synced"] for backwards in several for b in backwards[:-1])
        evidence = (
            f"{k} backward passes per optimizer step, each with a loss that is a mean and was not divided by {k}"
            f"{'; without no_sync, so each pass reduced its gradients' if synced else ''}"
        )
        at = calls[0]["at"]
        beside = script_lines.loss_return(at) if calls[0].get("library") else None
        yield finding_at("accumulation", at, evidence, beside)


def _left_over(run: RecordedRun) -> Iterator[Finding]:
    """left_over: the last micro-batches of an epoch make no step, and the first step of the next epoch has their
    gradients too."""
    usual, epoch = accumulated(run), 0
    held: list[int] = []  # the epoch of each backward since the last step
    windows: list[tuple[list[int], Event]] = []
    for e in run.ranks[0]:
        if e["k"] == "pass" and e["loader"] in run.training_loaders:
            epoch += 1
        elif e["k"] == "backward":
            held.append(epoch)
        elif e["k"] == "dropped":
            held = []
        elif e["k"] == "before":
            windows.append((held, e))
            held = []
    mixed = [(held, e) for held, e in windows if len(set(held)) == 2 and len(held) > usual]
    others = {len(held) for held, e in windows if (held, e) not in mixed}
    if usual > 1 and mixed and others == {usual} and len({e["opt"] for _, e in windows}) == 1:
        held, step = mixed[0]
        evidence = (
            f"step {step['step'] + 1} has the gradients of {len(held)} micro-batches, and other steps of {usual}: "
            f"{held.count(held[0])} are left over from the epoch before"
        )
        yield finding_at("left_over", script_lines.condition_of(step["at"]) or step["at"], evidence, step["at"])
