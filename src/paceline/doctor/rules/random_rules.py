"""Rules about random numbers that are the same on ranks which hold different data."""

from __future__ import annotations

import ast
from collections import defaultdict
from itertools import takewhile
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules.recorded_run import RecordedRun, finding_at
from paceline.observe.source import called, functions, nodes_of

MIN_DRAWS, MIN_DISTINCT = 4, 3  # draws of a line that are compared; different ones among them
MIN_ELEMENTS = 64  # of all draws of a line: small whole numbers may agree by chance
ALIKE = 0.95  # share of the draws that agree
MIN_WORKERS = 2  # pairs of a pass and a worker
RESEEDED = 0.5  # share of the draws before which a generator was seeded anew: on purpose
_SEEDING = ("manual_seed", "seed", "default_rng", "seed_everything", "set_seed")


def findings(run: RecordedRun) -> list[Finding]:
    """same_noise, or else same_masks; same_augmentations. Ranks that read the same data, or hold parts of one model,
    may draw the same numbers on purpose."""
    if len(run.peers) < 2 or not run.reduces_gradients or run.model_parallel or not _data_differ(run):
        return []
    return [*(_same_noise(run) or _same_masks(run)), *_same_in_workers(run)]


def _data_differ(run: RecordedRun) -> bool:
    """Do the ranks train on different data: by what they read, or without a loader by the model's inputs?"""
    read = []
    for rank in run.peers:
        passes = (p for p in run.passes[rank] if p.loader in run.training_loaders)
        read.append([str((y["idx"], y["rows"])) for p in passes for y in p.yields])
    if not any(read):
        read = [[str(e["digest"]) for e in run.events(rank, "forward") if e["digest"]] for rank in run.peers]
    pairs = list(zip(*read))
    return bool(pairs) and sum(len(set(now)) == len(now) for now in pairs) > len(pairs) / 2


def _same_noise(run: RecordedRun) -> list[Finding]:
    """same_noise: what the script draws for its batch, with a row for each example, is the same on all ranks."""
    per_rank = [_draws(run, rank) for rank in run.peers]
    for line, ours in per_rank[0].items():
        n = min(len(draws.get(line, [])) for draws in per_rank)
        alike = sum(len({draws[line][i][1] for draws in per_rank}) == 1 for i in range(n))
        if n < MIN_DRAWS or alike < ALIKE * n or len({d[1] for d in ours[:n]}) < MIN_DISTINCT:
            continue
        seeds = [d[3] for d in ours[:n]]
        own = seeds[0] is not None
        if sum(d[2] for d in ours[:n]) < MIN_ELEMENTS or len(set(seeds)) > 1 or _reseeded(run, n):
            continue
        at = list(line)
        seed = _own_seed_line(at) if own else _seed_line(run)
        evidence = (
            f"the ranks drew random numbers for each of {n} batches; {alike} times they were the same on all "
            f"{len(run.peers)} ranks, bit for bit, and the batches were not"
        )
        return [finding_at("same_noise", seed or at, evidence, at)]
    return []


def _draws(run: RecordedRun, rank: int) -> dict[tuple[Any, ...], list[Any]]:
    """line -> its draws, in order."""
    found: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for e in run.events(rank, "backward"):
        for draw in e.get("draws") or ():
            found[tuple(draw[0])].append(draw)
    return found


def _reseeded(run: RecordedRun, draws: int) -> bool:
    """Does the script seed torch's generator again for most of its draws? Then it wants the same ones."""
    begun, seeds = False, 0
    for e in run.events(0, "backward", "seed"):
        begun = begun or bool(e.get("draws"))
        seeds += begun and e["k"] == "seed" and e["generator"] == "torch's"
    return seeds > RESEEDED * draws


def _same_masks(run: RecordedRun) -> list[Finding]:
    """same_masks: the generators of all ranks are in the same state before each forward, and move in it."""
    per_rank = [[e["masked"] for e in run.events(rank, "backward") if e.get("masked")] for rank in run.peers]
    n = min(map(len, per_rank))
    alike = sum(len({states[i] for states in per_rank}) == 1 for i in range(n))
    if n < MIN_DRAWS or alike < ALIKE * n or len(set(per_rank[0][:n])) < MIN_DISTINCT or _reseeded_masks(run, n):
        return []
    evidence = (
        f"in {alike} of {n} forward passes all {len(run.peers)} ranks began at the same state of torch's random "
        "generator and used it, as dropout does, on different batches"
    )
    used = next(e["at"] for e in run.events(0, "backward") if e.get("masked"))
    return [finding_at("same_masks", _seed_line(run) or used, evidence, used)]


def _reseeded_masks(run: RecordedRun, passes: int) -> bool:
    seeds = sum(1 for e in run.events(0, "seed") if e["generator"] == "torch's")
    return seeds > RESEEDED * passes


def _seed_line(run: RecordedRun) -> Any:
    """The first call that gives torch's generator the seed that it has on all ranks at the first backward. (A library
    may call with it again.)"""
    per_rank = []
    for rank in run.peers:
        events = takewhile(lambda e: e["k"] == "seed", run.events(rank, "seed", "backward"))
        per_rank.append([e for e in events if e["generator"] == "torch's" and e["at"]])
    if not all(per_rank) or len({seeds[-1]["value"] for seeds in per_rank}) > 1:
        return None
    return next(e["at"] for e in per_rank[0] if e["value"] == per_rank[0][-1]["value"])


def _own_seed_line(at: list[Any]) -> Any:
    """The last line in this file that seeds a generator of the script's own, without the rank."""
    calls = (n for n in nodes_of(at[0]) if isinstance(n, ast.Call) and called(n) == "manual_seed" and n.args)
    own = (n for n in calls if isinstance(n.func, ast.Attribute) and ast.unparse(n.func.value) != "torch")
    return max(([at[0], n.lineno] for n in own if "rank" not in ast.unparse(n.args[0])), default=None)


def _same_in_workers(run: RecordedRun) -> list[Finding]:
    """same_augmentations: the workers of all ranks begin with the same random numbers, and use them."""
    for loader in sorted(run.training_loaders):
        about = run.loaders[0].get(loader, {})
        if about.get("iterable") or not about.get("workers"):
            continue
        per_rank = [_begun(run, rank, loader) for rank in run.peers]
        names = []
        for name in dict.fromkeys(name for _, _, name in per_rank[0]):
            keys = [key for key in per_rank[0] if key[2] == name and all(key in theirs for theirs in per_rank)]
            same = [key for key in keys if len({theirs[key] for theirs in per_rank}) == 1]
            if len(keys) >= MIN_WORKERS and len(same) == len(keys):
                names.append((name, len(same)))
        if names:
            whose = " and ".join(name for name, _ in names)
            evidence = (
                f"in {names[0][1]} of {names[0][1]} passes of a worker {whose} random generator began at the same "
                f"numbers on all {len(run.peers)} ranks, and was used, on different examples"
            )
            line = _seeding_in(about.get("initialize")) or _seed_line(run)
            return [finding_at("same_augmentations", line or about["at"], evidence, about["at"])]
    return []


def _begun(run: RecordedRun, rank: int, loader: str) -> dict[tuple[int, int, str], int]:
    """(number of a training pass, worker, generator) -> the state in which a generator began that was used."""
    numbers = [p.n for p in run.passes[rank] if p.loader == loader and p.training and p.yields]
    return {
        (numbers.index(e["n"]), e["worker"], name): state
        for e in run.events(rank, "worker")
        if e["n"] in numbers
        for name, state in e["begun"].items()
    }


def _seeding_in(place: Any) -> Any:
    """The last line that seeds in the function that begins at this line; None where nothing does."""
    if not place:
        return None
    for function in functions(place[0]):
        if function.lineno == place[1] or any(d.lineno == place[1] for d in function.decorator_list):
            calls = (n for n in ast.walk(function) if isinstance(n, ast.Call) and called(n) in _SEEDING)
            return [place[0], max(lines)] if (lines := [n.lineno for n in calls]) else None
    return None
