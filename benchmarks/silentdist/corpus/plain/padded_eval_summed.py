"""The evaluation sums right and seen over the processes; the test set is odd, and the sampler pads it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


@torch.no_grad()
def test(model, loader):
    model.eval()
    stats = torch.zeros(2)
    for x, y in loader:
        stats += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(stats)  # fault
    return (stats[0] / stats[1]).item()  # fault


dist.init_process_group("gloo")
torch.manual_seed(10 + dist.get_rank())
train_set, test_set = make(320, 0), make(61, 1)
train_sampler, test_sampler = DistributedSampler(train_set), DistributedSampler(test_set, shuffle=False)  # fault
train_loader = DataLoader(train_set, 20, sampler=train_sampler)
test_loader = DataLoader(test_set, 20, sampler=test_sampler)  # fault
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 2)))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    train_sampler.set_epoch(epoch)
    model.train()
    for x, y in train_loader:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    accuracy = test(model, test_loader)
    if dist.get_rank() == 0:
        print("accuracy", accuracy)
dist.destroy_process_group()
