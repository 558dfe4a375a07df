"""Count the launches, copies and waits of a Paceline step in excess of the plain loop.

There are two counts of waits, since neither is complete: torch's warnings (`torch.cuda.set_sync_debug_mode`), which
cover its allocator and its copies; and waiting CUDA calls in the profiler's trace. The aim for a steady step: no waits
beyond the plain loop's, and at most 12 more launches. fp16 and nonfinite="skip" may wait once, since they must know the
result before the update.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu import jobs
from benchmarks.gpu.check import Place, Steps, check
from benchmarks.gpu.jobs import Job, Way
from torch.profiler import ProfilerActivity, profile

import paceline

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamWaitValue")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
COPIES = ("cudaMemcpyAsync", "cudaMemcpy", "cudaMemsetAsync")
WARM, COUNTED = 6, 8  # steps
MOST_LAUNCHES = 12

# (job, way, allowed waits per step beyond the plain loop's)
CASES: dict[str, tuple[Job, Way, int]] = {
    "loop": (jobs.MLP, Way("loop"), 0),
    "closure": (jobs.MLP, Way("closure"), 0),
    "closure in micro-batches": (jobs.MLP, Way("closure", 4), 0),
    "clipped": (jobs.MLP, Way("loop", clip=1.0), 0),
    "AdamW": (jobs.MLP, Way("loop", optimizer="adamw-foreach"), 0),
    "fused AdamW, clipped": (jobs.MLP, Way("loop", optimizer="adamw-fused", clip=1.0), 0),
    "bf16": (jobs.MLP, Way("loop", precision="bf16"), 0),
    "bf16-params": (jobs.MLP, Way("loop", precision="bf16-params"), 0),
    "fp16": (jobs.MLP, Way("loop", precision="fp16"), 1),
    "nonfinite=skip": (jobs.MLP, Way("loop", settings={"nonfinite": "skip"}), 1),
    "batch norm": (jobs.CONV, Way("loop"), 0),
    "a count that is a tensor": (jobs.GPT, Way("loop", count="tensor"), 0),
    "two optimizers": (jobs.GAN, Way("loop"), 0),
}
STRATEGIES = {
    "ddp, one rank": {"strategy": "ddp"},
}


def plain_step(job: Job, way: Way, device: torch.device) -> Callable[[], None]:
    """One hand-written step that never reads the loss."""
    loop = jobs.Plainly(job, way, device)
    batch = [column[: job.batch].to(device) for column in job.data().tensors]
    parts = [batch]
    if way.micro_batch:
        parts = [list(part) for part in zip(*(column.split(way.micro_batch) for column in batch), strict=True)]

    def step() -> None:
        for which, loss_fn in enumerate(job.losses):
            for part in parts:
                with loop.autocast():
                    total, count = loss_fn(loop.models, part)
                loop.scaler.scale(total / count / len(parts)).backward()
            loop.update(which)
            loop.optimizers[which].zero_grad()
        loop.scaler.update()

    return step


class UnderPaceline:
    """The same step under Paceline, including the loader's yield.

    The yield copies a batch to the device, while the plain loop's batch is already there. So copies are counted
    separately, without a limit.
    """

    def __init__(self, job: Job, way: Way, place: Place) -> None:
        given: dict[str, Any] = {"device": str(place.device), "progress": "off", "precision": way.precision}
        self.run = paceline.start(**given | way.settings)
        self.job, self.way = job, way
        self.models = job.make()
        self.optimizers = [jobs.OPTIMIZERS[way.optimizer](model.parameters()) for model in self.models]
        self.run.prepare(*self.models, *self.optimizers)
        self.loader = self.run.loader(job.data(), global_batch=job.batch, micro_batch=way.micro_batch, drop_last=True)
        self.batches: Any = iter(())

    def yields(self) -> Any:
        """The next yield of an endless loader."""
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        return batch

    def step(self) -> None:
        acted = False
        while not acted:
            batch = self.yields()
            for loss_fn, optimizer in zip(self.job.losses, self.optimizers, strict=True):
                only = {"optimizer": optimizer} if len(self.optimizers) > 1 else {}
                jobs.backward(self.run, loss_fn, self.models, batch, self.way, only)
                acted = self.run.step(optimizer, max_grad_norm=self.way.clip)


def counted(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Waits, launches and copies of a steady step."""
    for _ in range(WARM):
        step()
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(COUNTED):
            step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    warned = sum("synchronizing" in str(each.message) for each in told)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(COUNTED):
            step()
    # The profiler itself waits for the device once, when it stops.
    names = Counter(event.name for event in trace.events())
    return {
        "waits that torch tells of": warned / COUNTED,
        "waits in the trace": sum(names[name] for name in WAITS) / COUNTED,
        "launches": sum(names[name] for name in LAUNCHES) / COUNTED,
        "copies": sum(names[name] for name in COPIES) / COUNTED,
    }


@check("costs", 300)
def synchronisations_and_launches(place: Place) -> Steps:
    yield "steady steps, ours less a plain loop's: " + ", ".join([*CASES, *STRATEGIES])
    cases = {name: (*case, {}) for name, case in CASES.items()}
    cases |= {name: (jobs.MLP, Way("closure"), 0, given) for name, given in STRATEGIES.items()}
    wrong = []
    for name, (job, way, allowed, settings) in cases.items():
        if place.small and way.precision == "fp16":
            continue
        by_hand = counted(plain_step(job, way, place.device), place.device)
        try:
            own = UnderPaceline(job, jobs.replace(way, settings=way.settings | settings), place)
            ours = counted(own.step, place.device)
            own.run.close()
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            continue
        more = {what: ours[what] - by_hand[what] for what in ours}
        yield {name: {"ours": ours, "by hand": by_hand}}  # on a CPU nothing is counted
        waits = max((more[what] for what in more if what.startswith("waits")), default=0)
        # the end of a profile counts as one wait on each side, which belongs to no step
        wrong += [f"{name}: {waits:.1f} waits a step more"] * (waits > allowed + 0.5)
        launches = more.get("launches", 0)
        wrong += [f"{name}: {launches:.1f} launches a step more"] * (launches > MOST_LAUNCHES)
    assert not wrong, "; ".join(wrong)


@check("costs", 120)
def a_loader_that_does_not_wait(place: Place) -> Steps:
    """An epoch with pinned batches: torch's warnings of waits, compared with a DataLoader and non_blocking copies."""
    yield "an epoch over rows on the host, with two workers and without"
    found = {}
    for workers in (0, 2):
        run = paceline.start(device=str(place.device), progress="off")
        loader = run.loader(jobs.mlp_data(), global_batch=16, shuffle=True, num_workers=workers)
        for batch in loader:
            batch[0].sum()
        if place.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for batch in loader:
                batch[0].sum()
        if place.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        found[f"{workers} workers"] = sum("synchronizing" in str(each.message) for each in told)
        run.close()
    yield found
    assert not any(found.values()), f"waits in an epoch: {found}"
