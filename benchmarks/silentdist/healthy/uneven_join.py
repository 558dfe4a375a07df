"""Processes with different numbers of batches; the gradients of a step are averaged over those still at work."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS = 9


def batches(rank):
    for i in range(14 + 4 * rank):
        g = torch.Generator().manual_seed(100 * rank + i)
        x = torch.randn(ROWS, 6, generator=g)
        yield x, (x[:, 0] * x[:, 1] + x[:, 2]).unsqueeze(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(90)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    with model.join(divide_by_initial_world_size=False):
        for x, y in batches(rank):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += 1
    print(f"rank {rank} has used {seen} batches, last loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
