"""The same job as people write it for torchft: what `make chaos` compares with. Needs torchft-nightly.

    python by_hand_torchft.py lighthouse PORT LEAST
    python by_hand_torchft.py PORT REPLICA REPLICAS LEAST

As in torchft's example of DDP (github.com/meta-pytorch/torchft, train_ddp.py): each replica is a process of its own.
The lighthouse tells the replicas who lives. A replica that was killed and started again is sent model and optimizer by
another. Each replica writes its position in its data after every step, and one of them writes model, optimizer and
manager every SAVE_EVERY steps, as the comments of that example advise. As there, the training ends at a step, and not
after an epoch.

No step is made by fewer than LEAST replicas. The example has 1: the others go on without a replica that is away. With
LEAST = REPLICAS they wait for it, and it takes part in the step in which it comes back (`use_async_quorum=False`).

One setting differs from the example: `init_sync=False`, which torchft's documentation advises where all replicas draw
the same initial weights. With its default all replicas but one are sent the weights in the first step, and the
gradients of their first batches count as zero.

The ledger of a replica tells what it offered to a step, and which steps it committed: replicas.py reads it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.chaos.job import EPOCHS, GLOBAL_BATCH, SAVE_EVERY, STEP_SECONDS, STEPS, Numbered
from torch import nn
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

CHECKPOINT = Path("checkpoint.pt")


def keep_lighthouse(port: int, least: int) -> None:
    """Serve with the options of torchft's README."""
    server = LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=least, quorum_tick_ms=100, join_timeout_ms=10_000)
    Path("lighthouse").write_text(server.address())
    time.sleep(3600)


def replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def train(port: int, replica: int, replicas: int, least: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1)).double()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def state_dict() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    # The replica's own store, which torchrun would keep if a replica had several ranks.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=least,
        use_async_quorum=least < replicas,
        timeout=timedelta(seconds=30),
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    data = Numbered()
    sampler = DistributedSampler(data, replica, replicas, group_rank=0, num_replicas=1, shuffle=True)
    loader = DataLoader(data, GLOBAL_BATCH // replicas, sampler=sampler)
    position, ledger = Path(f"position-{replica}"), Path(f"ledger-{replica}")
    first_epoch, first_batch = json.loads(position.read_text()) if position.exists() else (0, 0)
    if CHECKPOINT.exists():
        found = torch.load(CHECKPOINT)
        load_state_dict(found)
        manager.load_state_dict(found["manager"])

    def note(*entry: object) -> None:
        with ledger.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    # Without this the first replica makes steps alone, before anybody is killed.
    Path(f"ready-{replica}").touch()
    while not all(Path(f"ready-{other}").exists() for other in range(replicas)):
        time.sleep(0.05)

    # The training ends at a step. A replica that has been away is then behind in its data, and others that used up
    # batches in steps that were not committed are ahead: so the epochs have no end.
    for epoch in range(first_epoch, 100 * EPOCHS):
        sampler.set_epoch(epoch)
        for number, (x, y, numbers) in enumerate(loader):
            if epoch == first_epoch and number < first_batch:
                continue
            if manager.current_step() >= STEPS:
                weights = {name: value.contiguous() for name, value in net.state_dict().items()}
                save_file(weights, f"part-{replica}")
                Path(f"part-{replica}").rename(f"end-{replica}")
                os._exit(0)  # the manager's threads need not end
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            manager.wait_quorum()  # backward would do it; the ledger needs to know the quorum before a kill can come
            quorum, step = manager._quorum_id, manager.current_step()
            if manager.is_participating():
                note("offers", quorum, step, numbers.tolist())
            loss.backward()
            optimizer.step()
            if manager.current_step() > step:
                note("commits", quorum, step)
                if manager.participating_rank() == 0 and manager.current_step() % SAVE_EVERY == 0:
                    torch.save({**state_dict(), "manager": manager.state_dict()}, CHECKPOINT.with_suffix(".part"))
                    CHECKPOINT.with_suffix(".part").rename(CHECKPOINT)
            replace(position, json.dumps([epoch, number + 1]))
            Path("began").touch()
            time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        keep_lighthouse(*map(int, sys.argv[2:4]))
    else:
        train(*map(int, sys.argv[1:5]))
