"""Which cases are run: a cut in `make test`, more in .ci/run, and the whole matrix."""

from __future__ import annotations

import importlib
from itertools import product
from types import ModuleType
from typing import Any

from .common import Case
from .strategies import WAYS, Way, processes

MODULES = {
    "a": "job_a_image",
    "b": "job_b_masked_lm",
    "c": "job_c_gan",
    "d": "job_d_detection",
    "e": "job_e_uneven",
    "f": "job_f_resume",
    "g": "job_g_two_loaders",
    "h": "job_h_penalty",
}
WORLDS = (1, 2, 3, 4)
# For (f): the numbers of processes between stops, and the steps (of 35, 5 an epoch) after which it stops.
CHAINS = {(1, 2, 3): (7, 23), (3, 1): (18,), (2, 4): (11,), (4, 3, 2): (4, 29)}
STOPS_EXACT = (7, 18, 24)
LEFT_OUT = ("workers", "exact")  # variants in which a strategy makes no difference


def module(job: str) -> ModuleType:
    return importlib.import_module(f".{MODULES[job]}", __package__)


def variants() -> list[tuple[str, str]]:
    return [(job, variant) for job in MODULES for variant in module(job).VARIANTS]


def ways(job: str, variant: str) -> list[dict[str, Any]]:
    """Optimizer x micro-batches x form; the first and the last differ in everything, and so on inwards.

    The variants for batch norm are without micro-batches: Paceline refuses the two together.
    """
    micros = (None,) if variant.endswith("bn") else (None, module(job).MICRO)
    return [
        {"optimizer": optimizer, "micro_batch": micro_batch, "form": form}
        for optimizer, micro_batch, form in product(("sgd", "adamw"), micros, ("closure", "loop"))
    ]


def whole() -> list[Case]:
    """Every job and variant in every way on 1 to 4 processes; (f) along the chains."""
    cases = []
    for job, variant in variants():
        for way in ways(job, variant):
            if (job, variant) == ("f", "other"):
                cases += [Case(job, variant, worlds=worlds, stops=stops, **way) for worlds, stops in CHAINS.items()]
            elif job == "f":
                for world in WORLDS:
                    cases += [Case(job, variant, worlds=(world,), **way)]
                    cases += [Case(job, variant, worlds=(world,) * 4, stops=STOPS_EXACT, **way)]
            else:
                cases += [Case(job, variant, worlds=(world,), **way) for world in WORLDS]
    return cases


def under_strategies() -> list[Case]:
    """Every strategy: each job that it takes, on its least number of replicas in two ways, on each greater number
    every second job in another. (f) stops, and goes on with another number of replicas."""
    cases = []
    for name, how in WAYS.items():
        refused = (*how.refused, *LEFT_OUT)
        chosen = [(job, variant) for job, variant in variants() if job in how.jobs and not variant.endswith(refused)]
        for number, (job, variant) in enumerate(chosen):
            own = [way for way in ways(job, variant) if taken(way, how)]
            for world in how.worlds:
                if world != how.worlds[0] and (number + world) % 2:
                    continue
                places = {(number + world) // 2 % len(own)}
                if world == how.worlds[0]:
                    places.add(len(own) - 1 - min(places))
                chain = {"worlds": (world, how.worlds[0]), "stops": (18,)} if job == "f" else {"worlds": (world,)}
                cases += [Case(job, variant, strategy=name, **chain, **own[k % len(own)]) for k in sorted(places)]
    return cases


def refused() -> dict[str, tuple[Case, str]]:
    """Of what a strategy leaves out: a case on its least number of replicas, and what the error says."""
    cases = {}
    for name, how in WAYS.items():
        for title, words in how.refuses.items():
            job, _, variant = title.partition("-")
            way = next(way for way in ways(job, variant) if way["form"] in how.forms)
            case = Case(job, variant, strategy=name, worlds=how.worlds[:1], **way)
            cases[case.name] = case, words
    return cases


def taken(way: dict[str, Any], how: Way) -> bool:
    """Whether a strategy takes this optimizer, form and micro-batches."""
    return way["optimizer"] in how.optimizers and way["form"] in how.forms and bool(way["micro_batch"]) in how.micro


def part_of_ci() -> list[Case]:
    """What .ci/run runs beside `cut` and `cut_of_strategies`: every job and variant on 4 processes, and each job under
    the strategies that those leave out (Way.daily), on their least number of replicas."""
    chosen: dict[tuple[str, ...], Case] = {}
    for case in whole():
        if case.worlds[0] == 4:
            chosen.setdefault(("", case.job, case.variant), case)
    for case in under_strategies():
        way = WAYS[case.strategy]
        if not way.daily and case.worlds[0] == way.worlds[0]:
            chosen.setdefault((case.strategy, case.job), case)
    return list(chosen.values())


def cut_of_strategies() -> list[Case]:
    """Of each strategy a case of every second job, each job under every second strategy, the ways in turn; some on
    three replicas, the others on two."""
    cases = []
    for number, name in enumerate(name for name, way in WAYS.items() if way.daily):
        mine = [case for case in under_strategies() if case.strategy == name]
        jobs = sorted({case.job for case in mine})
        for k, job in list(enumerate(jobs))[number % 2 if len(jobs) > 1 else 0 :: 2]:
            worlds = [world for world in WAYS[name].worlds if processes(name, world) <= 3]
            world = worlds[1] if len(worlds) > 1 and (k + number) % 3 == 0 else worlds[0]
            on_more = [case for case in mine if case.job == job and case.worlds[0] == world]
            here = on_more or [case for case in mine if case.job == job and case.worlds[0] == worlds[0]]
            cases.append(here[(k + number) % len(here)])
    return cases


def cut() -> list[Case]:
    """Of each job and variant one way on one process, and the opposite one on 2 or on 3; (f) stops and goes on."""
    cases = []
    for number, (job, variant) in enumerate(variants()):
        all_ways, k = ways(job, variant), number % 4
        for world, way in ((1, all_ways[k]), (2 + number % 2, all_ways[-1 - k])):
            if (job, variant) == ("f", "other"):
                worlds = ((1, 2, 3), (3, 1))[world % 2]
                cases.append(Case(job, variant, worlds=worlds, stops=CHAINS[worlds], **way))
            elif job == "f":
                cases.append(Case(job, variant, worlds=(min(world, 2),), **way))
                cases.append(Case(job, variant, worlds=(min(world, 2),) * 4, stops=STOPS_EXACT, **way))
            else:
                cases.append(Case(job, variant, worlds=(world,), **way))
    return cases
