"""A process of a contender that uses torch. measure.py starts it with torchrun's environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.suite.models import BATCHES, MODELS, OPTIMIZERS, Model, loss_fn, started
from benchmarks.suite.talk import Step, serve
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
Batches = Iterator[list[Tensor]]


def plain(model: Model, network: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, _: Any) -> Step:
    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(network, next(batches))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp(model: Model, network: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, job: Any) -> Step:
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True, static_graph=True)
    return plain(model, wrapped, optimizer, batches, job)


def accelerate(model: Model, network: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, _: Any) -> Step:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    assert accelerator.num_processes == SIZE, f"Accelerate sees {accelerator.num_processes} processes"
    network, optimizer = accelerator.prepare(network, optimizer)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(network, next(batches))
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def fabric(model: Model, network: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, _: Any) -> Step:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True, static_graph=True)
    fabric = Fabric(accelerator="cpu", devices=SIZE, strategy=strategy)
    fabric.launch()
    assert fabric.world_size == SIZE, f"Fabric sees {fabric.world_size} processes"
    network, optimizer = fabric.setup(network, optimizer)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(network, next(batches))
        fabric.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def deepspeed(model: Model, network: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, _: Any) -> Step:
    import deepspeed

    deepspeed.init_distributed("gloo")
    network = network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # it takes no other
    config = {
        "train_micro_batch_size_per_gpu": model.global_batch // SIZE,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,  # its default is 1.0
    }
    engine, *_rest = deepspeed.initialize(model=network, optimizer=optimizer, config=config)

    def step() -> Tensor:
        loss = loss_fn(engine, next(batches))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def paceline(model: Model, network: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, job: Any) -> Step:
    import paceline

    run = paceline.start(strategy=job["strategy"], device="cpu", progress="off", batch_norm=job["batch_norm"] or None)
    network, optimizer = run.prepare(network, optimizer)
    inputs, targets = data_of(job)
    size = model.global_batch

    def rows_of(rows: paceline.Rows) -> list[Tensor]:
        first = rows.step % BATCHES * size
        here = slice(first + rows[0], first + rows[-1] + 1) if len(rows) else slice(0, 0)
        return [inputs[here], targets[here]]

    own = iter(run.batches(rows_of, global_batch=size))

    def step() -> Tensor:
        loss = run.forward_backward(loss_fn, network, next(own))
        run.step(optimizer)
        return loss

    return step


KINDS: dict[str, Callable[..., Step]] = {
    "plain": plain,
    "ddp": ddp,
    "accelerate": accelerate,
    "fabric": fabric,
    "deepspeed": deepspeed,
    "paceline": paceline,
}


def data_of(job: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all global batches, from measure.py's file."""
    inputs, targets = torch.load(Path(job["folder"]) / "data.pt", mmap=True, weights_only=True)
    if MODELS[job["model"]].images:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return inputs, targets


def parts(job: dict[str, Any], model: Model) -> Batches:
    """This process's parts of the global batches, in an endless loop."""
    inputs, targets = data_of(job)
    part = model.global_batch // SIZE
    step = 0
    while True:
        first = step % BATCHES * model.global_batch + RANK * part
        yield [inputs[first : first + part], targets[first : first + part]]
        step += 1


def prepare(job: dict[str, Any]) -> tuple[Step, Callable[[], int]]:
    from paceline.compare.worker.resources import traffic

    torch.set_num_threads(job["threads"])
    model = MODELS[job["model"]]
    network = started(model)
    optimizer = OPTIMIZERS[model.optimizer](network)
    step = KINDS[job["kind"]](model, network, optimizer, parts(job, model), job)

    def sent() -> int:
        counted = traffic()
        return 0 if counted is None else counted.sent

    return step, sent


if __name__ == "__main__":
    serve(RANK, prepare)
    os._exit(0)  # a library's exit functions may wait for processes that have exited
