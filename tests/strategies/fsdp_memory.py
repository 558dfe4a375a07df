"""Live bytes per rank under each stage of fsdp, in tests/ranks.py.

Counted twice: by the storages of parameters, gradients and optimizer state; and by torch's profiler, which sees each
allocation of a tensor on the CPU, so that nothing that is kept (a reducer's buckets, a gathered layer) can hide.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tests.strategies.checks import started
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.data import TensorDataset

from paceline.comm import fork_safety

WIDTH, DEPTH = 300, 8
PARAMETERS = DEPTH * WIDTH * WIDTH
STAGES = (1, 2, 3)


def held(tensors: Iterable[Any]) -> int:
    """Bytes of the storages that these tensors lie in, each counted once; of a DTensor that of its local tensor."""
    parts = [getattr(t, "_local_tensor", t) for t in tensors if isinstance(t, Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in (part.untyped_storage() for part in parts)}.values())


def kinds(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "parameters": held(parameters),
        "gradients": held(p.grad for p in parameters),
        "state": held(v for state in optimizer.state.values() for v in state.values()),
    }


def everything() -> int:
    """Bytes of all tensors that Python knows of, without what is kept for gloo until it has let go of it."""
    fork_safety._before_fork()
    fork_safety.keep()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated objects that are only looked at
        return held(t for t in gc.get_objects() if issubclass(type(t), Tensor))


def peak_of(function: Callable[[], object], *external: Any) -> int:
    """The most bytes in tensors at a time while it runs, those of `external` included."""
    tracker = MemTracker()
    tracker.track_external(*external)
    with tracker:
        function()
    snapshot = tracker.get_tracker_snapshot("peak")
    return max(int(sum(v for k, v in kinds.items() if k == "Total")) for kinds in snapshot.values())


def measured(strategy: str, peak: bool) -> dict[str, Any]:
    """Bytes: by kind with the gradients there and after the update, and all that lives then; or the peak of a step.
    Not both: the tracker of the peak lets go of nothing."""
    data = TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0)))
    found: dict[str, Any] = {}
    with started(strategy=strategy, progress="off") as run:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        batches = iter(run.loader(data, global_batch=8))

        def step() -> None:
            run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, next(batches))
            found["with gradients"] = kinds(optimizer)
            run.step(optimizer)

        def start() -> None:
            run.prepare(model, optimizer)
            for _ in range(4):
                step()

        if peak:
            start()
            return {"peak": peak_of(step, model, optimizer)}
        before = everything() - held(model.parameters())
        start()
        found["after the step"] = kinds(optimizer)
        found["all"] = everything() - before + buckets_of(run)
    return found


def buckets_of(run: Any) -> int:
    """DDP's buckets, which only its C++ reducer knows."""
    inner = getattr(run._stepper.strategy, "_inner", run._stepper.strategy)
    reducers = [own._ddp.reducer for own in getattr(inner, "_reducers", {}).values()]
    size = sum(bucket.buffer().nbytes for reducer in reducers for bucket in reducer._get_zeros_like_grad_buckets())
    return 0 if run._stepper.strategy.store.aliased else size  # a view tells Python


def all_stages() -> dict[str, Any]:
    strategies = ("ddp:reducer=native", *(f"fsdp:stage={stage},min_params=1" for stage in STAGES))
    found = {strategy: measured(strategy, False) for strategy in strategies}
    return {strategy: {**found[strategy], **measured(strategy, True)} for strategy in strategies}
