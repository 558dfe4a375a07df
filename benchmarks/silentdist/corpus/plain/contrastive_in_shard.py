"""SupCon over the examples of the process: DDP averages losses over pairs that never met."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def supcon(z, y, t=0.2):
    z = F.normalize(z, dim=1)
    logits = (z @ z.T / t).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)  # fault
    same = (y[:, None] == y[None]) & ~torch.eye(len(z), dtype=torch.bool)
    log_p = logits.log_softmax(1)
    return -(log_p * same).sum() / same.sum().clamp(min=1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 5, (320,), generator=g)
    data = TensorDataset(torch.randn(320, 12, generator=g) + F.one_hot(y, 12) * 2, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            supcon(model(a), b).backward()  # fault
            optimizer.step()
    dist.destroy_process_group()


main()
