"""fully_shard on an encoder that restores masked numbers: accumulation, dropout, a Stateful for torch's checkpoints."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

ACCUMULATE, BATCH, EPOCHS, LENGTH = 2, 4, 2, 10


class App(Stateful):
    """Model, optimizer, schedule and position."""

    def __init__(self, model, optimizer, schedule):
        self.model, self.optimizer, self.schedule, self.update = model, optimizer, schedule, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        rest = {"schedule": self.schedule.state_dict(), "update": self.update}
        rng = {str(dist.get_rank()): torch.get_rng_state()}
        return {"model": model, "optimizer": optimizer, "rest": rest, "rng": rng}

    def load_state_dict(self, state):
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments)
        self.schedule.load_state_dict(state["rest"]["schedule"])
        self.update = state["rest"]["update"]
        torch.set_rng_state(state["rng"][str(dist.get_rank())])


class Slices:
    """This rank's batches from a given one on, in an order that depends on the epoch alone."""

    def __init__(self, size):
        self.size, self.epoch, self.first = size, 0, 0

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(77 + self.epoch))
        mine = order[dist.get_rank() :: dist.get_world_size()].tolist()
        return iter(list(BatchSampler(mine, BATCH, drop_last=True))[self.first :])


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--resume-from", type=Path)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(8)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
layers = [nn.TransformerEncoderLayer(24, 4, 48, dropout=0.2, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Unflatten(1, (LENGTH, 1)), nn.Linear(1, 24), *layers, nn.Linear(24, 1), nn.Flatten())
for layer in layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
app = App(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=8))
waves = torch.sin(torch.linspace(0, 6, LENGTH) + torch.arange(176)[:, None] * 0.37)
slices = Slices(len(waves))
loader = DataLoader(TensorDataset(waves), batch_sampler=slices, generator=torch.Generator())
torch.manual_seed(1000 + dist.get_rank())
if args.resume_from:
    dcp.load({"app": app}, checkpoint_id=args.resume_from)
per_epoch = len(waves) // dist.get_world_size() // BATCH // ACCUMULATE
for slices.epoch in range(app.update // per_epoch, EPOCHS):
    slices.first = (app.update - slices.epoch * per_epoch) * ACCUMULATE
    for micro, (wave,) in enumerate(loader, 1):
        model.set_requires_gradient_sync(micro % ACCUMULATE == 0)
        hidden = torch.rand_like(wave) < 0.3
        loss = (model(wave.masked_fill(hidden, 0.0)) - wave)[hidden].square().mean()
        (loss / ACCUMULATE).backward()
        if micro % ACCUMULATE:
            continue
        optimizer.step()
        optimizer.zero_grad()
        app.schedule.step()
        app.update += 1
        print(f"[{dist.get_rank()}] update {app.update} loss {loss.item():.4f}", flush=True)
        if app.update % 3 == 0:
            dcp.save({"app": app}, checkpoint_id=args.out / ".unfinished")
            if dist.get_rank() == 0:
                os.rename(args.out / ".unfinished", args.out / f"update{app.update}")
            dist.barrier()
weights = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
if "FINAL" in os.environ and dist.get_rank() == 0:
    torch.save(weights, os.environ["FINAL"])
dist.destroy_process_group()
