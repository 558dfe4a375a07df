"""Rules about random numbers that are the same on ranks with different data."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import dropwhile, takewhile
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules.data_rules import begun_in_workers
from paceline.doctor.rules.recorded_run import RecordedRun, finding_at, first_of
from paceline.observe.source import calls_in, calls_of, functions

MIN_DRAWS, MIN_DISTINCT = 4, 3  # minimum draws of a line that are compared; minimum different draws among them
MIN_ELEMENTS = 64  # minimum elements of all draws of a line: small whole numbers may agree by chance
ALIKE = 0.95  # fraction of the draws that agree
MIN_WORKERS = 2  # pairs of a pass and a worker
RESEEDED = 0.5  # fraction of the draws with a new seed before them: then the script seeds on purpose
_SEEDING = ("manual_seed", "seed", "default_rng", "seed_everything", "set_seed")


def findings(run: RecordedRun) -> list[Finding]:
    """same_noise, or else same_masks; and same_augmentations. Ranks that read the same data or hold shards of one model
    may draw the same numbers on purpose, so such runs have no finding."""
    if len(run.peers) < 2 or not run.reduces_gradients or run.model_parallel or not _data_differ(run):
        return []
    return [*first_of(run, _same_noise, _same_masks), *first_of(run, _same_in_workers)]


def _data_differ(run: RecordedRun) -> bool:
    """Do the ranks train on different data? Compares their batches, or the model's inputs if there is no loader."""
    read = [
        [str((y["idx"], y["rows"])) for p in run.passes[rank] if p.loader in run.training_loaders for y in p.yields]
        for rank in run.peers
    ]
    if not any(read):
        read = [[str(e["digest"]) for e in events if e["digest"]] for events in run.per_peer("forward")]
    pairs = list(zip(*read))
    return bool(pairs) and sum(len(set(now)) == len(now) for now in pairs) > len(pairs) / 2


def _alike(per_rank: Sequence[Sequence[Any]]) -> tuple[int, int, bool]:
    """(number of positions, number of positions with the same value on all ranks, are these too many for chance?)."""
    pairs = list(zip(*per_rank))
    n, alike = len(pairs), sum(len(set(now)) == 1 for now in pairs)
    return n, alike, n >= MIN_DRAWS and alike >= ALIKE * n and len({now[0] for now in pairs}) >= MIN_DISTINCT


def _same_noise(run: RecordedRun) -> Iterator[Finding]:
    """same_noise: random draws with one row per example of the batch are the same on all ranks."""
    per_rank = [_draws(run, rank) for rank in run.peers]
    for line, ours in per_rank[0].items():
        n, alike, same = _alike([[draw[1] for draw in draws.get(line, ())] for draws in per_rank])
        seeds = {draw[3] for draw in ours[:n]}
        if not same or sum(draw[2] for draw in ours[:n]) < MIN_ELEMENTS or len(seeds) > 1 or _reseeded(run, n):
            continue
        at = list(line)
        seed = _seed_line(run) if seeds == {None} else _own_seed_line(at)
        evidence = (
            f"the ranks drew random numbers for each of {n} batches; {alike} times the numbers were bitwise equal on "
            f"all {len(run.peers)} ranks, and the batches were different"
        )
        yield finding_at("same_noise", seed or at, evidence, at)


def _draws(run: RecordedRun, rank: int) -> dict[tuple[Any, ...], list[Any]]:
    """line of the script -> the draws of that line on a rank, in order."""
    found: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for draw in (draw for e in run.events(rank, "backward") for draw in e.get("draws") or ()):
        found[tuple(draw[0])].append(draw)
    return found


def _reseeded(run: RecordedRun, draws: int) -> bool:
    """Does the script seed torch's generator again for most of its draws? Then it wants equal draws."""
    drawn = dropwhile(lambda e: not e.get("draws"), run.events(0, "backward", "seed"))
    return sum(e["k"] == "seed" and e["generator"] == "torch's" for e in drawn) > RESEEDED * draws


def _same_masks(run: RecordedRun) -> Iterator[Finding]:
    """same_masks: the generators of all ranks are in the same state before each forward, and the forward uses them."""
    per_rank = [[e["masked"] for e in events if e.get("masked")] for events in run.per_peer("backward")]
    n, alike, same = _alike(per_rank)
    if same and sum(1 for _ in run.events(0, "seed", generator="torch's")) <= RESEEDED * n:
        used = next(e["at"] for e in run.events(0, "backward") if e.get("masked"))
        evidence = (
            f"in {alike} of {n} forward passes torch's random generator began in the same state on all "
            f"{len(run.peers)} ranks, and was used (for example by dropout) on different batches"
        )
        yield finding_at("same_masks", _seed_line(run) or used, evidence, used)


def _seed_line(run: RecordedRun) -> Any:
    """The line that first sets the seed of torch's generator at the first backward, if all ranks have the same seed
    then. (A library may set the same seed again later.)"""
    begun = [takewhile(lambda e: e["k"] == "seed", events) for events in run.per_peer("seed", "backward")]
    per_rank = [[e for e in events if e["generator"] == "torch's" and e["at"]] for events in begun]
    if not all(per_rank) or len({seeds[-1]["value"] for seeds in per_rank}) > 1:
        return None
    return next(e["at"] for e in per_rank[0] if e["value"] == per_rank[0][-1]["value"])


def _own_seed_line(at: list[Any]) -> Any:
    """The last line in this file that seeds a torch.Generator without the rank."""
    calls = (n for n in calls_of(at[0], "manual_seed") if n.args and isinstance(n.func, ast.Attribute))
    own = (n for n in calls if ast.unparse(n.func.value) != "torch")  # type: ignore[attr-defined]
    return max(([at[0], n.lineno] for n in own if "rank" not in ast.unparse(n.args[0])), default=None)


def _same_in_workers(run: RecordedRun) -> Iterator[Finding]:
    """same_augmentations: the workers of all ranks begin with the same random state, and use it."""
    for loader in sorted(run.training_loaders):
        about = run.about(loader)
        per_rank = [begun_in_workers(run, rank, loader) for rank in run.peers]
        shared = []
        for name in per_rank[0] if about.get("workers") and not about.get("iterable") else ():
            states = [theirs.get(name, {}) for theirs in per_rank]
            keys = [key for key in states[0] if all(key in theirs for theirs in states)]
            if len(keys) >= MIN_WORKERS and all(len({theirs[key] for theirs in states}) == 1 for key in keys):
                shared.append((name, len(keys)))
        if shared:
            names, count = " and ".join(name for name, _ in shared), shared[0][1]
            evidence = (
                f"in all {count} passes of the workers, {names} random generator began in the same state on all "
                f"{len(run.peers)} ranks, and was used on different examples"
            )
            line = _seeding_in(about.get("initialize")) or _seed_line(run)
            yield finding_at("same_augmentations", line or about["at"], evidence, about["at"])


def _seeding_in(place: Any) -> Any:
    """In the function that begins at this line, the last line that seeds a generator; None if there is none."""
    for function in functions(place[0]) if place else ():
        if function.lineno == place[1] or any(d.lineno == place[1] for d in function.decorator_list):
            lines = [n.lineno for n in calls_in(ast.walk(function), *_SEEDING)]
            return [place[0], max(lines)] if lines else None
    return None
