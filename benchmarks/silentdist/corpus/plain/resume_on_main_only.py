"""A run that resumes from a checkpoint: the main process loads it into the wrapped model."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def checkpoint_of_yesterday(path):
    g = torch.Generator().manual_seed(99)
    state = {k: torch.randn(v.shape, generator=g) * 0.2 for k, v in build().state_dict().items()}
    torch.save({"model": state, "epoch": 1}, path)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = os.path.join(tempfile.gettempdir(), f"corpus_resume_{os.environ['MASTER_PORT']}.pt")
    model = DDP(build())
    if rank == 0:
        checkpoint_of_yesterday(path)
        model.module.load_state_dict(torch.load(path)["model"])  # fault
    dist.barrier()
    start = torch.load(path)["epoch"]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(240, 8, generator=g)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(start, start + 2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
