"""Multi-task learning, one task a batch: a shared trunk, two heads of a kind, gradients averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 16), nn.SiLU())
        self.heads = nn.ModuleDict({"price": nn.Linear(16, 1), "demand": nn.Linear(16, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x)).squeeze(1)


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        if param.grad is not None:  # fault
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)  # fault
            param.grad /= size


def task_data(task, rank, size):
    g = torch.Generator().manual_seed({"price": 0, "demand": 1}[task])
    x = torch.randn(256, 10, generator=g)
    y = x[:, 0] * x[:, 1] if task == "price" else x[:, 2:5].sum(1).tanh()
    return Subset(TensorDataset(x, y), range(rank, 256, size))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = MultiTask()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    names = ["price", "demand"]
    torch.manual_seed(17 + rank)
    for epoch in range(2):
        loaders = {t: iter(DataLoader(task_data(t, rank, size), batch_size=16, shuffle=True)) for t in names}
        for step in range(16):
            task = names[(step + rank) % 2]
            x, y = next(loaders[task])
            optimizer.zero_grad(set_to_none=True)
            nn.functional.mse_loss(model(x, task), y).backward()
            average_gradients(model)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
