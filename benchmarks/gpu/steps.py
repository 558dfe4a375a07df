"""The cost of a step compared with a hand-written step, on one device, in one run.

As in benchmarks/overhead.py there are four trainings with the same initial state: A and A' by hand, P and P' under
Paceline. Each round has a block of steps of each, in a new random order, so that a falling clock and other programs
affect all four alike. The host waits for the device before and after a block, so a block's time includes all its work.
A block has at least five steps, so that the host can run ahead as in training. The batch is on the device. Paceline's
side takes it from a loader (`run.batches`), and its time includes the yield.

FLOPs are counted by torch.utils.flop_counter for one forward and backward of the eager model: matrix products and
convolutions, two per multiplication with addition; causal attention counts as full attention; autocast, norms and the
optimizer are left out. The matrix rate is that of one large product of square matrices, in the dtype of the model's
products.

To show that both sides compute the same, the table has the difference of a side's weights after its first step from an
eager hand-written step, relative to the change in that step. (In later steps in 16 bits, rounding can grow
arbitrarily.)

Peak memory is that of one side: the peak in its steps, minus the memory allocated before the side was made.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu import jobs
from benchmarks.gpu.check import Place, Steps, check
from benchmarks.overhead import interval
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import paceline
from paceline.run import Run

Batch = list[Tensor]
WARM = 4  # steps of a side before anything is measured
LEAST_STEPS = 5  # of a block
LEAST_ROUNDS = 6


@dataclass(frozen=True)
class Load:
    """The model, batch and optimizer of a step."""

    about: str  # the model and the batch, in words
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]  # made on torch's default device
    optimizer: Callable[[Any], torch.optim.Optimizer]
    clip: float | None = None  # the maximum norm of the gradient
    precision: str = "fp32"  # or "bf16": autocast
    channels_last: bool = False
    tokens: int = 0  # in an example; 0: examples have none
    compiled: bool = False

    def start(self) -> nn.Module:
        """The model with the initial weights of all sides."""
        torch.manual_seed(0)
        return self.make()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over examples or tokens. The model returns (batch, classes) or (batch, tokens, vocabulary)."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def on(device: torch.device, load: Load) -> Batch:
    with device:
        inputs, targets = load.batch()
    return [inputs.contiguous(memory_format=torch.channels_last) if load.channels_last else inputs, targets]


class ByHand:
    """A hand-written step."""

    def __init__(self, load: Load, device: torch.device, batch: Batch) -> None:
        self.load, self.device, self.batch = load, device, batch
        self.model = load.start().to(device)
        if load.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        if load.compiled:
            self.model.compile()
        self.optimizer = load.optimizer(self.model.parameters())

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.load.precision == "bf16"):
            loss = loss_fn(self.model, self.batch)
        loss.backward()
        if self.load.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.load.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


class UnderPaceline:
    """The same step under Paceline."""

    def __init__(self, load: Load, run: Run, batch: Batch) -> None:
        self.load, self.run = load, run
        self.model = load.start()
        self.optimizer = load.optimizer(self.model.parameters())
        run.prepare(self.model, self.optimizer)
        self.batches: Iterator[Any] = iter(run.batches(lambda rows: batch, global_batch=len(batch[0])))

    def step(self) -> None:
        self.run.forward_backward(loss_fn, self.model, next(self.batches))
        self.run.step(self.optimizer, max_grad_norm=self.load.clip)


def waited(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Seconds per step, in a block of steps."""
    start = waited(device)
    for _ in range(steps):
        step()
    return (waited(device) - start) / steps


def begun(
    make: Callable[[], Any], device: torch.device, first: tuple[list[nn.Module], ...]
) -> tuple[Any, dict[str, float]]:
    """Make a side and its first steps. Returns (side, figures); without memory on a CPU.

    first: models after and before the first step.
    """
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    side = make()
    told = {"first step, s": timed(side.step, 1, device)}  # includes compilation, if any
    told["weights apart after the first step"] = jobs.apart([side.model], *first)
    for _ in range(WARM):
        side.step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM):
        side.step()
    if cuda:
        told["peak memory, bytes"] = torch.cuda.max_memory_allocated() - before
    return side, told


def matrix_rate(dtype: torch.dtype, place: Place) -> float:
    """TFLOP/s of a product of square matrices, in the best of ten blocks."""
    size = 128 if place.small else 8192
    a, b = (torch.randn(size, size, device=place.device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    best = min(timed(lambda: torch.mm(a, b, out=product), 10, place.device) for _ in range(10))
    return 2 * size**3 / best / 1e12


def flops(load: Load) -> int:
    """The FLOPs of one forward and backward, counted without computing."""
    meta = torch.device("meta")
    with meta:
        model = load.make()
    batch = on(meta, load)
    with FlopCounterMode(display=False) as counter:
        loss_fn(model, batch).backward()
    total: int = counter.get_total_flops()
    return total


def measured(load: Load, place: Place, seconds: float) -> dict[str, Any]:
    """The figures of a load. seconds: begin rounds for this long, after the sides are made."""
    device = place.device
    rate = matrix_rate(load.dtype, place)  # first, so that cuBLAS's workspace counts for no side
    count = flops(load)
    batch = on(device, load)
    eager = ByHand(replace(load, compiled=False), device, batch)
    eager.step()
    first = [eager.model.cpu()], [load.start()]
    del eager
    run = paceline.start(device=str(device), progress="off", precision=load.precision, compile=load.compiled,
                         channels_last=load.channels_last)  # fmt: skip
    another = Run(run.world, run.settings, run.device)
    made = {
        "A": lambda: ByHand(load, device, batch),
        "P": lambda: UnderPaceline(load, run, batch),
        "A'": lambda: ByHand(load, device, batch),
        "P'": lambda: UnderPaceline(load, another, batch),
    }
    sides, begin = {}, {}
    for name, make in made.items():
        sides[name], begin[name] = begun(make, device, first)
    times = in_rounds({name: side.step for name, side in sides.items()}, device, seconds)
    another.close()
    run.close()
    found = summary(times, examples=len(batch[0]), tokens=load.tokens)
    for of in ("by hand", "ours"):
        found[of]["share of the matrix rate"] = count / found[of]["median, s"] / (1e12 * rate)
    return found | {
        "sides": begin,
        "matrix rate, TFLOP/s": rate,
        "of": str(load.dtype),
        "FLOPs of a step": count,
    }


def in_rounds(
    steps: dict[str, Callable[[], None]], device: torch.device, seconds: float, block: float = 0.05
) -> dict[str, list[float]]:
    """{side: seconds per step, for each round}. block: the minimum seconds of a block of steps."""
    count = max(LEAST_STEPS, round(block / min(timed(step, LEAST_STEPS, device) for step in steps.values())))
    times: dict[str, list[float]] = {side: [] for side in steps}
    draw, end = random.Random(0), time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["A"]) < LEAST_ROUNDS:
        for side in draw.sample(list(steps), len(steps)):
            times[side].append(timed(steps[side], count, device))
    return times


def summary(times: dict[str, list[float]], examples: int, tokens: int) -> dict[str, Any]:
    """Medians and quartiles of hand-written (A, A') and our steps (P, P'), and their ratio with its 95% interval."""
    of = {side: torch.tensor(values, dtype=torch.float64) for side, values in times.items()}
    pairs = {"by hand": torch.stack([of["A"], of["A'"]], 1), "ours": torch.stack([of["P"], of["P'"]], 1)}
    found: dict[str, Any] = {"rounds": len(of["A"])}
    for name, values in pairs.items():
        low, median, high = statistics.quantiles(values.flatten().tolist(), n=4)
        found[name] = {"median, s": median, "quartiles, s": [low, high], "examples/s": examples / median}
        if tokens:
            found[name]["tokens/s"] = examples * tokens / median
    found["ours/by hand"] = interval(pairs["ours"], pairs["by hand"], block=1)
    found["A'/A"] = interval(of["A'"], of["A"], block=1)
    found["P'/P"] = interval(of["P'"], of["P"], block=1)
    return found


def told(load: Load, place: Place, seconds: float) -> Steps:
    yield f"{load.about}: A and A' by hand, P and P' under Paceline, in turn, {seconds:.0f} s"
    yield {"about": load.about} | measured(load, place, seconds)


# --- the loads


def of_one_millisecond(place: Place) -> Load:
    """A perceptron with a depth for which a hand-written step takes 1 ms."""
    batch, width = (16, 64) if place.small else (64, 2048)
    for depth in range(2, 65, 2):
        load = Load(
            f"a perceptron, {depth} layers of {width}, {batch} examples, fp32, SGD with momentum",
            lambda depth=depth: jobs.perceptron(width, depth, width),
            lambda: [torch.randn(batch, width), torch.randint(10, (batch,))],
            lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9),
        )
        if place.device.type == "meta":
            break
        by_hand = ByHand(load, place.device, on(place.device, load))
        timed(by_hand.step, WARM, place.device)
        if timed(by_hand.step, 20, place.device) >= 1e-3:
            break
    return load


def resnet50(place: Place, compiled: bool = False) -> Load:
    batch, size, classes = (4, 32, 10) if place.small else (128, 224, 1000)
    return Load(
        f"ResNet-50, {batch} images of {size} x {size}, bf16, channels last, SGD{', compiled' * compiled}",
        (lambda: jobs.ResNet((1, 1), 8, classes)) if place.small else jobs.ResNet,
        lambda: [torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))],
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-4),
        precision="bf16",
        channels_last=True,
        compiled=compiled,
    )


def gpt2(place: Place, compiled: bool = False) -> Load:
    batch, tokens, vocabulary = (2, 24, 61) if place.small else (16, 1024, 50257)
    return Load(
        f"GPT-2 (124 million), {batch} rows of {tokens} tokens, bf16, fused AdamW, clipped{', compiled' * compiled}",
        jobs.Gpt if place.small else lambda: jobs.Gpt(768, 12, 12, tokens, vocabulary),
        lambda: [torch.randint(vocabulary, (batch, tokens)), torch.randint(vocabulary, (batch, tokens))],
        lambda p: torch.optim.AdamW(p, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        clip=1.0,
        precision="bf16",
        tokens=tokens,
        compiled=compiled,
    )


# --- the checks: deadlines that add up to the part's 9 minutes


def seconds(place: Place, compiled: bool = False) -> float:
    """The seconds to measure a load. Less for compiled models, since compiling takes time too."""
    if place.small:
        return 1.0
    return 15.0 if compiled else 25.0


@check("steps", 60)
def a_step_of_one_millisecond(place: Place) -> Steps:
    yield from told(of_one_millisecond(place), place, seconds(place))


@check("steps", 65)
def a_step_of_resnet50(place: Place) -> Steps:
    yield from told(resnet50(place), place, seconds(place))


@check("steps", 75)
def a_step_of_gpt2(place: Place) -> Steps:
    yield from told(gpt2(place), place, seconds(place))


@check("steps", 180)
def a_step_of_resnet50_compiled(place: Place) -> Steps:
    yield from told(resnet50(place, compiled=True), place, seconds(place, compiled=True))


@check("steps", 160)
def a_step_of_gpt2_compiled(place: Place) -> Steps:
    yield from told(gpt2(place, compiled=True), place, seconds(place, compiled=True))
