"""Runs cases, many in the same processes, and compares what they end with.

All cases of one number of processes run in the same ones (tests/ranks.py), one after the other. A case with several
`worlds` is run part by part, each part in the next processes that are of the right number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tests.ranks import run_ranks
from torch import Tensor

from . import strategies
from .common import Case, Result
from .matrix import module
from .record import Step, merge

LAUNCH_SECONDS = 1200


@dataclass
class Outcome:
    """What a case gave: the results of all processes after its last part, and the steps of all parts; or errors."""

    case: Case
    results: list[Result] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    error: str = ""


def run_cases(cases: list[Case], folder: Path) -> dict[str, Outcome]:
    """Runs all cases, with checkpoints and results under `folder`. Outcomes by the cases' names."""
    cases = [replace(case, folder=str(folder / "checkpoints" / case.name)) for case in cases]
    waiting = [(case, part) for case in cases for part in range(len(case.worlds))]
    done: set[tuple[str, int]] = set()
    while waiting:
        for world in sorted({processes(case, part) for case, part in waiting}):
            ready: list[tuple[Case, int]] = []
            for case, part in waiting:
                before = part == 0 or (case.name, part - 1) in done or (case, part - 1) in ready
                if processes(case, part) == world and before:
                    ready.append((case, part))
            launch_until_done(world, ready, folder)
            done |= {(case.name, part) for case, part in ready}
            waiting = [item for item in waiting if item not in ready]
    return {case.name: collect(case, folder) for case in cases}


def launch_until_done(world: int, items: list[tuple[Case, int]], folder: Path) -> None:
    """Runs them; if the processes end early, takes new ones for what comes after the case that ended them."""
    while items:
        plan = folder / f"plan.{world}.pt"
        torch.save([(part_name(case, part), case, case.worlds[part]) for case, part in items], plan)
        log = ""
        try:
            run_ranks(world, "walkthrough.worker:main", str(plan), str(folder / "results"), deadline=LAUNCH_SECONDS)
        except AssertionError as error:  # with what every rank did, and its last output
            log = str(error)
        left = []
        for case, part in items:
            at = folder / "results" / part_name(case, part)
            if not at.exists():
                left.append((case, part))
            elif not (at / "result.0").exists():
                torch.save(f"ended the launch, or hung.\n{log[-8000:]}", at / "result.0")
        if len(left) == len(items):  # nothing even started
            for case, part in left:
                at = folder / "results" / part_name(case, part)
                at.mkdir(parents=True)
                torch.save(f"the launch failed.\n{log[-8000:]}", at / "result.0")
            return
        items = left


def processes(case: Case, part: int) -> int:
    return strategies.processes(case.strategy, case.worlds[part])


def part_name(case: Case, part: int) -> str:
    return f"{case.name}.{part}"


def collect(case: Case, folder: Path) -> Outcome:
    """Reads what the processes saved, part by part."""
    outcome = Outcome(case)
    for part in range(len(case.worlds)):
        world = processes(case, part)
        at = folder / "results" / part_name(case, part)
        loaded = [
            torch.load(f, weights_only=False) if (f := at / f"result.{rank}").exists() else "no result"
            for rank in range(world)
        ]
        errors = [f"part {part}, rank {r} of {world}: {text}" for r, text in enumerate(loaded) if isinstance(text, str)]
        results = [result for result in loaded if isinstance(result, Result)]  # a server has none
        if errors:
            outcome.error = "\n".join(errors)
            return outcome
        outcome.results = results
        outcome.steps += merge([result.record for result in results])
        if results[0].finished != (part == len(case.worlds) - 1):
            outcome.error = f"part {part} ended with finished={results[0].finished}"
            return outcome
    return outcome


@contextmanager
def float64() -> Iterator[None]:
    """The surroundings of a plain job: float64, one thread, generators put back afterwards."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def plain(case: Case, steps: list[Step]) -> Result:
    """The same job without Paceline, with the order and the draws of the record, if these are legal."""
    with float64():
        return module(case.job).plain_job(case, steps)


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """||ours - theirs|| / ||theirs||, over all tensors together."""
    assert ours.keys() == theirs.keys(), f"names differ: {sorted(ours.keys() ^ theirs.keys())}"
    apart = sum((ours[name] - theirs[name]).square().sum().item() for name in theirs)
    return float((apart / (sum(theirs[name].square().sum().item() for name in theirs) or 1.0)) ** 0.5)


def problems(case: Case, ours: Result, losses: list[dict[str, float]], theirs: Result) -> list[str]:
    """What is not the same, in words; nothing if the two are the same model."""
    tolerance, found = strategies.tolerance(case.strategy, case.optimizer), []
    for what in ("parameters", "buffers", "state"):
        mine, reference = getattr(ours, what), getattr(theirs, what)
        assert all(t.dtype in (torch.float64, torch.long) for t in mine.values()), f"{what} are not in float64"
        counts = {name for name, tensor in reference.items() if not tensor.is_floating_point()}
        found += [
            f"{name} is {mine.get(name)}, not {reference[name]}" for name in counts if mine.get(name) != reference[name]
        ]
        floats = [{k: v for k, v in side.items() if k not in counts} for side in (mine, reference)]
        apart = difference(*floats)
        if not apart <= tolerance:
            found.append(f"{what} differ by {apart:.1e} of their norm, more than {tolerance:.0e}")
    if ours.metrics != theirs.metrics:
        found.append(f"counts are {ours.metrics}, not {theirs.metrics}")
    pairs = [
        (f"step {k} {name}", mine[name], reference[name])
        for k, (mine, reference) in enumerate(zip(losses, theirs.losses, strict=True))
        for name in mine
    ]
    if ours.values.keys() != theirs.values.keys():
        found.append(f"means are given of {sorted(ours.values)}, not of {sorted(theirs.values)}")
    pairs += [(name, ours.values[name], value) for name, value in theirs.values.items() if name in ours.values]
    wrong = [
        (name, mine, value)
        for name, mine, value in pairs
        if not abs(mine - value) <= 10 * tolerance * max(1, abs(value))
    ]
    if wrong:
        found.append(f"{len(wrong)} of {len(pairs)} losses and means differ; first: {wrong[0]}")
    return found
