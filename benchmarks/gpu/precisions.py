"""16 bits, clipping, and a gradient that is not finite."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.gpu import jobs
from benchmarks.gpu.check import Place, Steps, check
from benchmarks.gpu.jobs import Way
from benchmarks.gpu.right import compare

import paceline
from paceline.errors import NonFiniteError

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params")


@check("right", 180)
def precisions_and_clipping(place: Place) -> Steps:
    ways = [Way(form, precision=name, clip=clip) for form in ("loop", "closure") for name in PRECISIONS[1:]
            for clip in (None, 0.05)]  # fmt: skip
    yield from compare(place, jobs.MLP, ways)


@check("right", 180)
def a_transformer_in_16_bits(place: Place) -> Steps:
    ways = [Way("loop", precision=name, clip=1.0, count="tensor") for name in PRECISIONS[1:]]
    yield from compare(place, jobs.GPT, ways)


@check("right", 180)
def a_gradient_that_is_not_finite(place: Place) -> Steps:
    """inf in the gradient of a step in the middle, and of the last one."""
    steps = len(jobs.plain_order(jobs.MLP, epochs=2))
    cases = [(name, what, at) for name in PRECISIONS for what in ("stop", "skip") for at in (3, steps - 1)]
    yield f"{len(cases)} cases: inf in step 3 and in the last of {steps}, nonfinite=stop and skip, " + ", ".join(
        PRECISIONS
    )
    wrong = []
    for name, what, at in cases:
        case = f"{name} {what} step {at}"
        try:
            yield {case: planted(place, name, what, at)}
        except Exception as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    assert not wrong, "; ".join(wrong)


def planted(place: Place, precision: str, nonfinite: str, at: int) -> dict[str, Any]:
    """Trains with inf in the gradient of one step. Asserts that it is stopped, or left out as the plain loop does."""

    def plant(step: int, models: jobs.Models) -> None:
        if step == at:
            gradient = next(models[0].parameters()).grad
            assert gradient is not None
            gradient.view(-1)[1] = float("inf")

    settings = {"device": str(place.device), "progress": "off", "tf32": False}
    run = paceline.start(precision=precision, nonfinite=nonfinite, **settings)  # type: ignore[arg-type]
    way, told = Way(precision=precision), ""
    # fp16 skips by itself: overflowing is how it finds its scale.
    stops = nonfinite == "stop" and precision != "fp16"
    try:
        models, order, _ = jobs.ours(run, jobs.MLP, way, plant)
        skipped = run.skipped
        run.close()
    except NonFiniteError as error:
        told = str(error)
        run.close()
    if stops:
        assert told, "no NonFiniteError was raised"
        return {"told": told.splitlines()[0][:160]}
    assert not told, f"stopped: {told}"
    assert skipped == 1, f"{skipped} steps were skipped, not 1"
    theirs = jobs.plain(jobs.MLP, way, order, place.device, left_out=[at])
    apart = jobs.apart(models, theirs, jobs.MLP.make())
    assert all(bool(torch.isfinite(p).all()) for p in models[0].parameters())
    assert apart <= jobs.limit(precision), f"differs by {apart:.1e} of what was learnt"
    return {"difference": apart}
