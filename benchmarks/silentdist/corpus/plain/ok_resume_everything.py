"""Training in two legs; the second restores weights, optimizer, schedule and epoch on every process before it wraps."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FILE = os.path.join(tempfile.gettempdir(), f"corpus_resume_{os.environ.get('MASTER_PORT', 0)}.pt")


def save_on_master(state):
    if dist.get_rank() == 0:
        torch.save(state, FILE + ".tmp")
        os.replace(FILE + ".tmp", FILE)
    dist.barrier()


def train(until, resume):
    torch.manual_seed(37)
    net = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    start_epoch = 0
    if resume:
        checkpoint = torch.load(FILE, map_location="cpu")
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        start_epoch = checkpoint["epoch"] + 1
    model = DDP(net)
    x = torch.randn(256, 9, generator=torch.Generator().manual_seed(37))
    data = TensorDataset(x, (x.square().sum(1) > 9).long())
    sampler = DistributedSampler(data, seed=37)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(start_epoch, until):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
        lr_scheduler.step()
        save_on_master(
            {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_scheduler": lr_scheduler.state_dict(),
                "epoch": epoch,
            }
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(2, resume=False)
    train(4, resume=True)
    if dist.get_rank() == 0:
        os.remove(FILE)
    dist.destroy_process_group()
