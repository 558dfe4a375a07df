"""The sampler gets the seed of the process, so that the ranks cut different shuffles."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(base_seed=0):
    dist.init_process_group("gloo")
    seed = base_seed + dist.get_rank()
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 10, generator=g)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data, shuffle=True, seed=seed)  # fault
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
