"""Measure textbook claims about the algorithms: bytes, spread of the loss, memory, precision.

    python benchmarks/algorithms.py --json benchmarks/results/algorithms.json     # the tables of docs/figures.md
    python benchmarks/algorithms.py --part bytes --json FILE                      # one part; the file's others stay

bytes       The bytes that each process sends in a step, on n = 2 to 8 replicas, with a ring, reduce-to-one and a
            server. The kernel counts them per connection of a process (TCP_INFO); the formula is shown beside them.
staleness   The held-out loss of one job over 5 seeds, with a parameter server: sync, async, and async with gradients
            at most 0, 2 or 8 updates old.
memory      Bytes that the forward allocated and each device still holds when the backward begins: with the loss on the
            replicas (strategy data_parallel), and with the loss on the first device, as with nn.DataParallel.
            nn.DataParallel does not run on several CPUs, so its order is written out here.
bf16        The distance of the weights under data_parallel and mirrored in bf16 from hand-written torch.autocast.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import statistics
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import paceline
from paceline.compare.worker.resources import traffic
from paceline.torch_private.core import TorchDispatchMode
from paceline.world import processor

Row = dict[str, Any]

# --- bytes

SIDE = 1000  # the model is one matrix of SIDE x SIDE
GRADIENT_BYTES = SIDE * SIDE * 4
WARM_UP, COUNTED_STEPS = 3, 5
WAYS = {  # name -> strategy, servers
    "ring": ("ddp:reducer=ring", 0),
    "reduce_to_one": ("ddp:reducer=reduce_to_one", 0),
    "server": ("parameter_server", 1),
}


def sent_by_formula(way: str, n: int) -> dict[str, float]:
    """Bytes that a process sends in a step of n replicas: {"first": ..., "others": mean of ...}.

    "first" is process 0, or the server. "others" are all other processes, or the workers. Gradients and weights have
    G bytes each.
    """
    g = GRADIENT_BYTES
    if way == "ring":
        each = 2 * (n - 1) / n * g
        return {"first": each, "others": each}
    if way == "reduce_to_one":  # by binomial trees: one message to and one from each process but the first
        first = math.ceil(math.log2(n)) * g
        return {"first": first, "others": (2 * (n - 1) * g - first) / (n - 1)}
    # To each worker the sum and the weights; from each worker its gradients, and its share of the sum as it left it.
    return {"first": n * 2 * g, "others": (1 + 1 / n) * g}


def count_bytes(folder: str, with_server: bool) -> float | None:
    """The bytes that this process sends in a step. Servers write theirs to the folder."""
    torch.set_num_threads(1)
    run = paceline.start(seed=0, progress="off", device="cpu")
    marks = Path(folder)
    model = nn.Linear(SIDE, SIDE, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if with_server and run.world.rank == run.world.size - 1:
        threading.Thread(target=_watch_server, args=(marks,), daemon=True).start()
    run.prepare(model, optimizer)  # a server serves here until the end
    data = torch.utils.data.TensorDataset(torch.randn(640, SIDE, generator=torch.Generator().manual_seed(0)))
    counted = 0
    for step, (x,) in enumerate(run.loader(data, global_batch=32)):
        if step in (WARM_UP, WARM_UP + COUNTED_STEPS):
            run.sum(0)  # all processes have ended the last step, so the kernel has sent all its data
            counted = _sent() - counted
            if with_server and run.main:
                _mark(marks, "began" if step == WARM_UP else "ended")
            if step > WARM_UP:
                break
            run.sum(0)
            counted = _sent()
        run.backward(model(x).square().mean())
        run.step(optimizer)
    run.sum(0)
    run.close()
    return counted / COUNTED_STEPS


def _sent() -> int:
    told = traffic()
    assert told is not None, "this kernel does not count the bytes of connections"
    return told.sent


def _mark(marks: Path, name: str) -> None:
    """Make the server record its number of sent bytes so far."""
    (marks / name).touch()
    while not (marks / f"{name}.sent").exists():
        time.sleep(0.01)


def _watch_server(marks: Path) -> None:
    for name in ("began", "ended"):
        while not (marks / name).exists():
            time.sleep(0.01)
        part = marks / f"{name}.part"
        part.write_text(str(_sent()))
        part.rename(marks / f"{name}.sent")


def measure_bytes(sizes: range = range(2, 9)) -> Iterator[Row]:
    for n in sizes:
        for way, (strategy, servers) in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                told = paceline.launch(
                    count_bytes, folder, servers > 0, nproc=n + servers, strategy=strategy, timeout=300
                )
                sent = [count for count in told if count is not None]
                if servers:
                    before, after = (int((Path(folder) / f"{name}.sent").read_text()) for name in ("began", "ended"))
                    sent.insert(0, (after - before) / COUNTED_STEPS)
            row = {"way": way, "replicas": n, "sent": sent, "first": sent[0], "others": statistics.fmean(sent[1:])}
            yield {**row, "formula": sent_by_formula(way, n)}


# --- staleness

MODES = {
    "sync": "parameter_server",
    "async": "parameter_server:mode=async",
    **{f"staleness {s}": f"parameter_server:mode=async,staleness={s}" for s in (0, 2, 8)},
}
WORKERS, BATCH, EPOCHS, SEEDS, TRAIN = 4, 64, 5, 5, 1500


def train_digits(seed: int) -> Row | None:
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images = (images / 16).float()
    run = paceline.start(seed=seed, progress="off", device="cpu")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
    data = torch.utils.data.TensorDataset(images[:TRAIN], labels[:TRAIN])
    loader = run.loader(data, global_batch=BATCH, shuffle=True)
    computed = 0
    for _ in run.epochs(EPOCHS):
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
            computed += 1
    logits = torch.as_tensor(run.predict(model, images[TRAIN:], global_batch=100))
    loss = F.cross_entropy(logits, labels[TRAIN:])
    right = (logits.argmax(1) == labels[TRAIN:]).double().mean()
    batches = sum(run.gather([computed]))
    run.close()
    return {"loss": float(loss), "accuracy": float(right), "gradients": batches}


def measure_staleness(seeds: int = SEEDS) -> Iterator[Row]:
    parts = EPOCHS * -(-TRAIN // BATCH) * WORKERS  # of global batches, one for each worker
    for name, strategy in MODES.items():
        found = []
        for seed in range(seeds):
            told = paceline.launch(train_digits, seed, nproc=WORKERS + 1, strategy=strategy, timeout=300)
            found.append(told[0])
        losses = [one["loss"] for one in found]
        yield {
            "mode": name,
            "losses": losses,
            "mean": statistics.fmean(losses),
            "least": min(losses),
            "most": max(losses),
            "variance": statistics.variance(losses) if seeds > 1 else 0.0,
            "accuracy": statistics.fmean(one["accuracy"] for one in found),
            "gradients": [one["gradients"] for one in found],
            "dropped": statistics.fmean(one["gradients"] / parts - 1 for one in found),
        }


# --- memory

EXAMPLES, INPUTS, HIDDEN, CLASSES = 256, 128, 512, 8192


class Held:
    """The live storages, by the device that made them; None for weights and examples."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[Any], int | None, int]] = {}  # id -> reference, device, bytes

    def note(self, tensor: Tensor, device: int | None) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            gone = weakref.ref(storage, lambda _: self._alive.pop(key, None))
            self._alive[key] = (gone, device, storage.nbytes())

    def bytes(self) -> dict[int, int]:
        total: dict[int, int] = defaultdict(int)
        for _, device, count in list(self._alive.values()):
            if device is not None:
                total[device] += count
        return total


class MadeOn(TorchDispatchMode):
    """A context: tensors made within it belong to a device."""

    def __init__(self, held: Held, device: int) -> None:
        super().__init__()
        self._held, self._device = held, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), None)  # unknown tensors existed before
        made = func(*args, **(kwargs or {}))
        self._note(made, self._device)
        return made

    def _note(self, tree: Any, device: int | None) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor):
                self._held.note(tensor, device)


def watch(loss: Tensor, held: Held, told: list[dict[int, int]]) -> None:
    """Record the devices' memory when the loss's backward begins."""

    def begins(_: Tensor) -> None:
        told.append(held.bytes())

    loss.register_hook(begins)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(EXAMPLES, INPUTS, generator=generator), torch.arange(EXAMPLES) % CLASSES


def loss_on_replicas(devices: int) -> dict[int, int]:
    """Bytes by device under data_parallel, where each replica's closure computes outputs and loss."""
    held, told = Held(), []  # type: tuple[Held, list[dict[int, int]]]
    order = iter(range(devices))  # replicas take turns, the first one first; all forwards before the first backward
    run = paceline.start(progress="off", device="cpu", strategy="data_parallel:devices=" + ",".join(["cpu"] * devices))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with MadeOn(held, next(order)):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        watch(loss, held, told)
        return loss

    try:
        model, optimizer = run.prepare(model := classifier(), torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.loader(torch.utils.data.TensorDataset(*examples()), global_batch=EXAMPLES):
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
    finally:
        run.close()
    return told[0]


def loss_on_first(devices: int) -> dict[int, int]:
    """The same in nn.DataParallel's order: replicate, apply, gather the outputs and compute the loss on one device."""
    held, told = Held(), []  # type: tuple[Held, list[dict[int, int]]]
    first = classifier()
    replicas = [first] + [copy.deepcopy(first) for _ in range(devices - 1)]
    x, y = examples()

    def step() -> Tensor:
        outputs = []
        for device, (replica, shard) in enumerate(zip(replicas, x.tensor_split(devices), strict=True)):
            with MadeOn(held, device):
                outputs.append(replica(shard))
        with MadeOn(held, 0):
            return F.cross_entropy(torch.cat(outputs), y)

    loss = step()
    watch(loss, held, told)
    loss.backward()
    return told[0]


def held_by_formula(loss_on: str, devices: int) -> dict[str, float]:
    """Bytes kept for the backward, in float32.

    For each example: HIDDEN activations on the device that computed them, and CLASSES log-probabilities on the device
    of its loss. Outputs are freed when no longer referenced.
    """
    hidden, outputs = EXAMPLES / devices * HIDDEN * 4, EXAMPLES * CLASSES * 4
    if loss_on == "replicas":
        return {"first": hidden + outputs / devices, "others": hidden + outputs / devices}
    return {"first": hidden + outputs, "others": hidden}


def measure_memory(sizes: tuple[int, ...] = (2, 4, 8)) -> Iterator[Row]:
    for n in sizes:
        for name, way in {"first device": loss_on_first, "replicas": loss_on_replicas}.items():
            held = way(n)
            others = statistics.fmean(held[device] for device in range(1, n))
            formula = held_by_formula(name, n)
            yield {"loss_on": name, "devices": n, "first": held[0], "others": others, "formula": formula}


# --- bf16


def trained_by_hand(devices: int, steps: int, precision: str) -> nn.Module:
    """Train shards in sequence under torch.autocast, and add their gradients, weighted by their examples."""
    model, data = small(), small_data(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(*(part.chunk(steps) for part in data), strict=True):
        sums: list[Tensor] = []
        for shard, labels in zip(x.tensor_split(devices), y.tensor_split(devices), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                outputs = model(shard)
            loss = F.cross_entropy(outputs.float(), labels)
            own = torch.autograd.grad(loss, list(model.parameters()), torch.tensor(len(shard) / len(x)))
            sums = [a + b for a, b in zip(sums, own, strict=True)] if sums else list(own)
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total
        optimizer.step()
    return model


def trained(strategy: str, devices: int, steps: int, precision: str) -> nn.Module:
    run = paceline.start(
        progress="off",
        device="cpu",
        precision=precision,
        strategy=f"{strategy}:devices=" + ",".join(["cpu"] * devices),
    )
    try:
        model = small()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        data = torch.utils.data.TensorDataset(*small_data(steps))
        for batch in run.loader(data, global_batch=SMALL_BATCH):
            run.forward_backward(lambda m, b: F.cross_entropy(m(b[0]), b[1]), model, batch)
            run.step(optimizer)
    finally:
        run.close()
    return model


SMALL_BATCH = 30


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def small_data(steps: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(steps * SMALL_BATCH, 32, generator=generator),
        torch.randint(10, (steps * SMALL_BATCH,), generator=generator),
    )


def difference(one: nn.Module, other: nn.Module) -> float:
    """||one - other|| / ||other|| over all weights."""
    own, its = (torch.cat([p.detach().double().flatten() for p in model.parameters()]) for model in (one, other))
    return float((own - its).norm() / its.norm())


def measure_bf16(steps: int = 20) -> Iterator[Row]:
    for strategy in ("data_parallel", "mirrored"):
        for devices in (2, 3):
            by_hand = trained_by_hand(devices, steps, "bf16")
            yield {
                "strategy": strategy,
                "devices": devices,
                "steps": steps,
                "from_autocast_by_hand": difference(trained(strategy, devices, steps, "bf16"), by_hand),
                "fp32_from_autocast_by_hand": difference(trained(strategy, devices, steps, "fp32"), by_hand),
            }


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "bytes": measure_bytes,
    "staleness": measure_staleness,
    "memory": measure_memory,
    "bf16": measure_bf16,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="all if not given")
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    arguments = parser.parse_args()
    document: Row = {}
    if arguments.json is not None and arguments.json.exists():
        document = json.loads(arguments.json.read_text())
    document |= {
        "command": "python benchmarks/algorithms.py --json benchmarks/results/algorithms.json",
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "accelerators": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }
    for name in [arguments.part] if arguments.part else PARTS:
        document[name] = []
        for row in PARTS[name]():
            print(name, row, flush=True)
            document[name].append(row)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
