"""Wide autoencoder; the Adam state is split over the processes by ZeroRedundancyOptimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 18


def signals(step, rank, rows=10):
    g = torch.Generator().manual_seed(300 + 2 * step + rank)
    shift = torch.rand(rows, 1, generator=g) * 6
    return torch.sin(torch.linspace(0, 9, 40) + shift) * (1 + torch.rand(rows, 1, generator=g))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(40, 64), nn.Softplus(), nn.Linear(64, 4), nn.Linear(4, 64), nn.Softplus(), nn.Linear(64, 40)
    )
    ddp_model = DDP(net)
    optimizer = ZeroRedundancyOptimizer(
        ddp_model.parameters(), optimizer_class=torch.optim.Adam, lr=2e-3, eps=1e-6, parameters_as_bucket_view=False
    )
    for step in range(STEPS):
        x = signals(step, rank)
        loss = nn.functional.mse_loss(ddp_model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"process {rank} step {step} reconstruction {loss.item():.4f}")
    owned = sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
    print(f"process {rank} kept the state of {owned} weights")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
