"""Does Paceline train the same model as a plain loop, on one device?

Compares the difference of the weights, relative to their change in training (`jobs.apart`), with `jobs.limit`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from benchmarks.gpu import jobs
from benchmarks.gpu.check import CheckFault, Place, Steps, check
from benchmarks.gpu.jobs import Job, Way

import paceline

FORMS = ("loop", "closure")


def compare(place: Place, job: Job, ways: list[Way]) -> Steps:
    """Run the job in each way, and in a plain loop."""
    start = job.make()
    yield f"{len(ways)} ways: " + "; ".join(map(str, ways))
    wrong: list[str] = []
    for way in ways:
        try:
            models, order = trained(place, job, way)
            theirs = jobs.plain(job, way, order, place.device)
            apart = jobs.apart(models, theirs, start)
            limit = jobs.limit(way.precision)
            yield {str(way): {"difference": apart, "limit": limit, "the same bits": jobs.same_bits(models, theirs)}}
            if not apart <= limit:
                jobs.check_repeats(job, way, order, place.device, theirs)
                wrong.append(f"{way}: {apart:.1e}")
        except CheckFault:
            raise
        except Exception as error:  # still run the other ways
            wrong.append(f"{way}: {type(error).__name__}: {error}")
    assert not wrong, "differ by more than the limit, or failed: " + "; ".join(wrong)


def trained(place: Place, job: Job, way: Way, **settings: Any) -> tuple[list[Any], jobs.Order]:
    """(models, order) of a separate run on the place's device."""
    given = {"device": str(place.device), "progress": "off", "tf32": False, "precision": way.precision}
    given |= {"channels_last": way.channels_last} | way.settings | settings
    run = paceline.start(**given)  # type: ignore[arg-type]
    try:
        models, order, _ = jobs.ours(run, job, way)
    finally:
        run.close()
    return models, order


@check("right", 120)
def a_perceptron(place: Place) -> Steps:
    ways = [Way(form, micro) for form in FORMS for micro in (None, 3)]
    ways += [Way(form, micro, count=count) for form, micro, count in (("loop", 3, "int"), ("closure", 5, "tensor"))]
    yield from compare(place, jobs.MLP, ways)


@check("right", 120)
def convolutions_with_batch_norm(place: Place) -> Steps:
    ways = [Way(form, channels_last=last) for form in FORMS for last in (False, True)]
    yield from compare(place, jobs.CONV, ways)


@check("right", 120)
def convolutions_in_micro_batches(place: Place) -> Steps:
    yield from compare(place, jobs.CONV_WITHOUT_NORM, [Way(form, 5, channels_last=True) for form in FORMS])


@check("right", 120)
def a_transformer_by_its_tokens(place: Place) -> Steps:
    ways = [Way(form, micro, count=count) for form in FORMS for micro in (None, 3) for count in ("int", "tensor")]
    yield from compare(place, jobs.GPT, ways)


@check("right", 120)
def two_models_with_two_optimizers(place: Place) -> Steps:
    yield from compare(place, jobs.GAN, [Way(form, optimizer=name) for form in FORMS for name in ("sgd", "adamw")])


@check("right", 120)
def kinds_of_optimizers_and_clipping(place: Place) -> Steps:
    names = [name for name in jobs.OPTIMIZERS if name != "adamw-capturable" or place.device.type == "cuda"]
    ways = [Way(optimizer=name, clip=clip) for name in names for clip in (None, 0.05)]
    yield from compare(place, jobs.MLP, ways)


@check("right", 120)
def the_same_bits_twice(place: Place) -> Steps:
    yield "a perceptron, convolutions and a transformer, each twice with deterministic kernels"
    found = {}
    for name, job in (("perceptron", jobs.MLP), ("convolutions", jobs.CONV), ("transformer", jobs.GPT)):
        way = Way(count="tensor" if job is jobs.GPT else "mean", settings={"deterministic": True})
        one, other = (trained(place, job, replace(way, optimizer="adamw"))[0] for _ in range(2))
        found[name] = jobs.same_bits(one, other)
    torch.use_deterministic_algorithms(False)
    yield found
    assert all(found.values()), f"not the same bits in two runs: {[name for name, same in found.items() if not same]}"
