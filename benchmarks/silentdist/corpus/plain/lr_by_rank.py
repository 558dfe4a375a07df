"""Layer-wise learning rates, in which the rank was taken for the layer's number."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 3)))
    groups = [{"params": [p], "lr": 0.1 * 0.9**rank} for layer, p in enumerate(model.parameters())]  # fault
    optimizer = torch.optim.SGD(groups, lr=0.1)  # fault
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 9, generator=g)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
