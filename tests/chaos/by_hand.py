"""The same job as people write it for torchrun, with torch.save: what `make chaos` compares with.

As in PyTorch's tutorial on fault tolerance (pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html): a snapshot
of model, optimizer and epoch. This one is written more often, every SAVE_EVERY steps, with the number of the step, and
goes on from that step of the epoch.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.chaos.job import EPOCHS, GLOBAL_BATCH, SAVE_EVERY, STEP_SECONDS, Numbered
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SNAPSHOT = "snapshot.pt"


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    first_epoch = first_step = 0
    ledger: list[list[int]] = []
    if os.path.exists(SNAPSHOT):
        found = torch.load(SNAPSHOT)
        net.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first_epoch, first_step, ledger = found["epoch"], found["step"], found["ledger"]
    model = DistributedDataParallel(net)
    data = Numbered()
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, GLOBAL_BATCH // size, sampler=sampler)
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for step, (x, y, numbers) in enumerate(loader):
            if epoch == first_epoch and step < first_step:
                continue
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            everyone: list[list[int]] = [[]] * size
            dist.all_gather_object(everyone, numbers.tolist())
            ledger.append(sorted(number for part in everyone for number in part))
            if rank == 0:
                Path("began").touch()
                if len(ledger) % SAVE_EVERY == 0:
                    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "ledger": ledger}
                    torch.save({**state, "epoch": epoch, "step": step + 1}, SNAPSHOT)
            time.sleep(STEP_SECONDS)
    if rank == 0:
        weights = b"".join(value.numpy().tobytes() for _, value in sorted(net.state_dict().items()))
        told = {
            "ledger": hashlib.sha256(json.dumps(ledger).encode()).hexdigest()[:16],
            "steps": len(ledger),
            "weights": hashlib.sha256(weights).hexdigest()[:16],
        }
        print("ends", json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
