"""Which cases are run: a cut for every day, and the whole matrix."""

from __future__ import annotations

import importlib
from itertools import product
from types import ModuleType
from typing import Any

from .common import Case

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


def cut() -> list[Case]:
    """On 1, 2 and 3 processes: of each job and variant two opposite ways, others on each number of processes."""
    cases = []
    for number, (job, variant) in enumerate(variants()):
        for world in (1, 2, 3):
            all_ways, k = ways(job, variant), (number + world) % 4
            for way in (all_ways[k], all_ways[-1 - k]):
                if (job, variant) == ("f", "other"):
                    worlds = ((1, 2, 3), (3, 1))[world % 2]
                    if world < 3:
                        cases += [Case(job, variant, worlds=worlds, stops=CHAINS[worlds], **way)]
                elif job == "f":
                    if world < 3:
                        cases += [Case(job, variant, worlds=(world,), **way)]
                        cases += [Case(job, variant, worlds=(world,) * 4, stops=STOPS_EXACT, **way)]
                else:
                    cases += [Case(job, variant, worlds=(world,), **way)]
    return cases
