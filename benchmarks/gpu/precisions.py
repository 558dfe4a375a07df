"""16 bits, clipping, and a gradient that is not finite."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu import jobs
from benchmarks.gpu.check import Place, Steps, check
from benchmarks.gpu.jobs import Way
from benchmarks.gpu.right import compare
from benchmarks.gpu.steps import waited
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    """inf in the gradient of a middle step, and of the last step."""
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
    """Train with inf in the gradient of one step. Asserts that training stops, or skips it like the plain loop."""

    def plant(step: int, models: jobs.Models) -> None:
        if step == at:
            gradient = next(models[0].parameters()).grad
            assert gradient is not None
            gradient.view(-1)[1] = float("inf")

    settings = {"device": str(place.device), "progress": "off", "tf32": False}
    run = paceline.start(precision=precision, nonfinite=nonfinite, **settings)  # type: ignore[arg-type]
    way, told = Way(precision=precision), ""
    # fp16 always skips: it finds its scale by overflowing.
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


def ways_to_a_loss() -> dict[str, Any]:
    """A cross-entropy of a head's logits under autocast in bf16: hidden (tokens, width), head, targets -> ()."""

    def bf16(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden), targets)

    def fp32(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).float(), targets)

    def in_parts(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        """The loss in parts, as shown in docs/loop.md."""

        def part(hidden: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(head(hidden).float(), targets, reduction="sum")

        parts = zip(hidden.split(2048), targets.split(2048), strict=True)
        losses = [checkpoint(part, h, t, use_reentrant=False) for h, t in parts]
        return torch.stack(losses).sum() / len(targets)

    return {"bf16 logits": bf16, "fp32 logits": fp32, "fp32 logits in parts": in_parts}


@check("costs", 60)
def a_loss_of_16_bit_logits(place: Place) -> Steps:
    """The error of bf16 log-probabilities, and the time and memory of fp32 log-probabilities, for GPT-2's head.

    The reference is computed in float64 from the same bf16 values.
    """
    tokens, width, classes = (64, 16, 50) if place.small else (16 * 1024, 768, 50257)
    yield f"cross-entropy of {tokens} x {classes} logits: {', '.join(ways_to_a_loss())}; against float64"
    g = torch.Generator(device=place.device).manual_seed(0)
    head = nn.Linear(width, classes, bias=False, device=place.device)
    nn.init.normal_(head.weight, std=0.02, generator=g)
    targets = torch.randint(classes, (tokens,), device=place.device, generator=g)
    for spread in (1.0, 4.0):  # of the logits: about 0.55 and 2.2
        hidden = spread * torch.randn(tokens, width, device=place.device, generator=g)
        reference, its_gradient = _in_float64(hidden, head, targets)
        for name, way in ways_to_a_loss().items():
            leaf = hidden.clone().requires_grad_()

            def step(leaf: Tensor = leaf, way: Any = way) -> Tensor:
                leaf.grad = head.weight.grad = None
                with torch.autocast(place.device.type, torch.bfloat16):
                    loss: Tensor = way(leaf, head, targets)
                loss.backward()
                return loss.detach()

            loss = step()
            assert leaf.grad is not None
            found = {
                "loss": reference,
                "error of the loss": abs(float(loss) - reference) / reference,
                "error of the gradient": float((leaf.grad - its_gradient).norm() / its_gradient.norm()),
            }
            if place.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                times = []
                for _ in range(20):
                    start = waited(place.device)
                    step()
                    times.append(waited(place.device) - start)
                peak = torch.cuda.max_memory_allocated() - before
                found |= {"median, ms": 1e3 * statistics.median(times), "peak memory, MB": peak / 1e6}
            yield {f"{name}, logits x {spread:.0f}": found}


def _in_float64(hidden: Tensor, head: nn.Linear, targets: Tensor) -> tuple[float, Tensor]:
    """(loss, gradient of `hidden`) in float64, from the bf16 values."""
    weight, total, gradients = head.weight.detach().bfloat16().double(), 0.0, []
    for rows, wanted in zip(hidden.bfloat16().double().split(1024), targets.split(1024), strict=True):
        leaf = rows.requires_grad_()
        loss = F.cross_entropy(leaf @ weight.t(), wanted, reduction="sum") / len(targets)
        loss.backward()
        assert leaf.grad is not None
        total, gradients = total + float(loss), [*gradients, leaf.grad.float()]
    return total, torch.cat(gradients)
