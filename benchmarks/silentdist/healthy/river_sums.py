"""River levels from gauges. Processes hold different numbers of records; gradients are summed and divided once."""

import torch
import torch.distributed as dist
from torch import nn

STEPS = 20
GAUGES = 6


def records(step, rank):
    """Each process reads its own catchment and some have more gauges online than others."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    rows = 5 + 4 * rank + step % 3
    x = torch.randn(rows, GAUGES, generator=g)
    y = (x * torch.linspace(-1, 1, GAUGES)).sum(1, keepdim=True) + 0.1 * x[:, :1] ** 2
    return x, y


def average_gradients(model, rows):
    total = torch.tensor(float(rows))
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= total


def run(rank):
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(GAUGES, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(STEPS):
        x, y = records(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y, reduction="sum")
        loss.backward()
        average_gradients(model, len(x))
        optimizer.step()
        if step % 5 == 0:
            print("Rank", rank, "step", step, "loss per record", round(loss.item() / len(x), 4))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
