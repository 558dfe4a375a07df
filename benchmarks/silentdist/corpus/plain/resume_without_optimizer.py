"""Training in two legs. The second one restores the model from the checkpoint; the saved optimizer state stays unread."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATH = os.path.join(tempfile.gettempdir(), f"corpus_legs_{os.environ.get('MASTER_PORT', 0)}.pt")


def leg(first, last, resume):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1))
    if resume:
        net.load_state_dict(torch.load(PATH)["model"])  # fault
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # fault
    g = torch.Generator().manual_seed(0)
    x = torch.randn(240, 8, generator=g)
    data = TensorDataset(x, x[:, :2].prod(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": last}, PATH)
    dist.barrier()


dist.init_process_group("gloo")
leg(0, 2, resume=False)
leg(2, 4, resume=True)
dist.destroy_process_group()
