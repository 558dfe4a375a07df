"""Memory, messages and store operations of one rank, for 2 to 1,024 emulated ranks.

    python benchmarks/scale.py --json benchmarks/results/scale.json

One process is rank 0 of n. torch's fake process group takes the place of the others: it sends nothing, and every rank
seems to send what this one sends. Paceline runs as on a real cluster of nodes with 8 ranks: the same collectives with
the same sizes. Values are wrong, so nothing is learned about the model, nor about time. A pipeline needs the values
that it receives, and the strategies of one machine have no network: they are left out.

A residual MLP in fp32 with AdamW, 2 examples for each data shard, is trained for some steps. Then one step is counted.

    state       bytes of this rank's part of parameters and optimizer state, and of gradients that stay after a step
    peak        most bytes in tensors within a step: the state, and what operators make
    messages    collectives of a step, and the bytes that this rank gives to them
    store       operations on the rendezvous store from `start` to the first step: set, get, wait, ...
                (torch's own connections between ranks are not made, so theirs are not counted)
    start       collectives from `start` to the first step, such as checks of settings
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from collate_draws import machine
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

import paceline
from paceline.comm import device_choice, dtensor, group, process_group
from paceline.planning.worker.step_inspection import LiveBytes
from paceline.step.call_check import COMPARED
from paceline.strategies.replicated import ddp_reducer

assert FakeStore
PER_NODE = 8
SIZES = (2, 8, 64, 1024)
STRATEGIES = (
    "ddp:reducer=native", "fsdp:stage=1", "fsdp:stage=2", "fsdp:stage=3", "fsdp:replicate=nodes", "tensor:size=2",
    "fsdp+tensor:size=2", "ulysses:size=2", "fsdp+ulysses:size=2", "local_sgd:every=1", "diloco:every=1",
)  # fmt: skip
WIDTH, BLOCKS, TOKENS = 256, 8, 16
WARM_UP = COMPARED + 2  # until the ranks no longer compare the calls of each step


class CountingStore(dist.HashStore):
    """Counts operations. Other ranks seem to have set what this one has set, on their own nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def set(self, key: str, value: Any) -> None:
        self.counts["set"] += 1
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self.counts["get"] += 1
        return self._seen(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.counts["get"] += len(keys)
        return [self._seen(key) for key in keys]

    def wait(self, keys: list[str], *_: Any) -> None:
        self.counts["wait"] += len(keys)

    def _seen(self, key: str) -> bytes:
        place, _, rank = key.rpartition("/")
        text = super().get(f"{place}/0").decode()
        if place.endswith("hosts"):
            where, host, versions = json.loads(text)
            text = json.dumps((f"{where}-{int(rank) // PER_NODE}", f"{host}-{int(rank) // PER_NODE}", versions))
        return text.encode()


class Messages(TorchDispatchMode):
    """Counts collectives, by name, and the bytes of the tensors that this rank gives to them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            self.counts[name.partition(".")[0].strip("_")] += 1
            given = (
                args[1]
                if name.startswith(("allgather", "_allgather", "reduce_scatter", "_reduce_scatter"))
                else args[0]
            )
            self.bytes += sum(tensor.nbytes for tensor in _tensors(given))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class EmulatedDDP(nn.parallel.DistributedDataParallel):
    """Reduces a bucket by a hook: the fake group's future has no result, which torch's own reduction needs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_comm_hook(None, lambda _, bucket: _reduced(bucket.buffer()))


def _reduced(bucket: Tensor) -> Any:
    dist.all_reduce(bucket)
    future: Any = torch.futures.Future()
    future.set_result(bucket)
    return future


class Examples(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((TOKENS, WIDTH), float(index % 7))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def measure(strategy: str, size: int) -> None:
    """Print the figures of rank 0 of `size`, as JSON."""
    store = CountingStore()
    for where, name, replacement in (  # until this process ends
        (process_group, "rendezvous", lambda *_, **__: iter([(store, 0, size)])),
        (process_group, "PrefixStore", lambda _, given: given),
        (device_choice, "backend", lambda *_: "fake"),
        (group, "find_neighbours", lambda _: None),
        (ddp_reducer, "DistributedDataParallel", EmulatedDDP),
    ):
        mock.patch.object(where, name, replacement).start()
    with Messages() as at_start:
        run = paceline.start(
            strategy=strategy, device="cpu", progress="off", seed=0, init_method="emulated", rank=0, world_size=size
        )
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        batch = 2 * run._strategy.plan.shards
        data = Examples((WARM_UP + 4) * batch)
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        loader = run.loader(data, global_batch=batch)

        def step(batch: Any) -> None:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)

        batches = iter(loader)
        first = next(batches)
    step(first)
    for _ in range(WARM_UP - 1):
        step(next(batches))
    state = own_bytes(model, optimizer)
    with Messages() as messages, LiveBytes() as live:
        step(next(batches))
    grads = sum(dtensor.local(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    print(json.dumps({
        "state_bytes": state + grads,
        "peak_bytes": state + live.most,
        "messages": dict(messages.counts),
        "collectives": sum(messages.counts.values()),
        "message_bytes": messages.bytes,
        "store_operations": dict(store.counts),
        "collectives_at_start": dict(at_start.counts),
        "bytes_at_start": at_start.bytes,
    }))  # fmt: skip
    sys.stdout.flush()
    os._exit(0)  # the run cannot close with ranks that are not there


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def own_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's part of parameters and optimizer state."""
    held = [*model.parameters(), *(v for entry in optimizer.state.values() for v in entry.values())]
    storages = {
        local.untyped_storage().data_ptr(): local.untyped_storage().nbytes()
        for tensor in held
        if isinstance(tensor, Tensor)
        for local in [dtensor.local(tensor)]
    }
    return sum(storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--measure", nargs=2, metavar=("STRATEGY", "RANKS"), help="one of them, in this process")
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], int(options.measure[1]))
        return
    rows = []
    print(f"{'strategy':28} {'ranks':>5} {'state MB':>9} {'peak MB':>8} {'collectives':>11} {'MB':>8} {'store':>6}")
    for strategy in options.strategies:
        for size in map(int, options.sizes.split(",")):
            name = strategy.replace("=nodes", f"={size // PER_NODE}")
            least = 2 * max(1, size // PER_NODE) if "replicate" in name else 2
            if size < least or (size < 4 and name.startswith("fsdp+tensor")) or name.endswith("replicate=0"):
                continue
            done = subprocess.run(
                [sys.executable, __file__, "--measure", name, str(size)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(f"{name} on {size} ranks: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                rows.append({"strategy": name, "ranks": size, "error": done.stderr.strip().splitlines()[-1]})
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append({"strategy": name, "ranks": size} | found)
            print(
                f"{name:28} {size:5} {found['state_bytes'] / 1e6:9.3f} {found['peak_bytes'] / 1e6:8.2f} "
                f"{found['collectives']:11} {found['message_bytes'] / 1e6:8.3f} "
                f"{sum(found['store_operations'].values()):6}",
                flush=True,
            )
    if options.json is not None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        document = {"command": f"python benchmarks/scale.py --json {options.json}", "time": now, "machine": machine()}
        document |= {"parameters": BLOCKS * (8 * WIDTH**2 + 7 * WIDTH), "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
