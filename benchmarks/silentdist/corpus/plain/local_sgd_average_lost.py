"""Local SGD by hand: every four steps the weights are averaged - in a state_dict that is copied first."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EVERY = 4


def average_weights(model):
    state = copy.deepcopy(model.state_dict())
    for value in state.values():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return state


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(320, 8, generator=g)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                average_weights(model)  # fault
    dist.destroy_process_group()


main()
