"""Turbine readings with a few broken batches; if one process sees a loss that is not finite, all skip the update."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, ROWS = 24, 12


def readings(step, rank):
    g = torch.Generator().manual_seed(step * 2 + rank)
    x = torch.randn(ROWS, 10, generator=g)
    y = x[:, :5].sum(1, keepdim=True).tanh() + x[:, 5:6] / 2
    if step % 7 == 3 and rank == step % 2:
        x[step % ROWS, 4] = float("nan")
    return x, y


def all_finite(loss):
    ok = torch.isfinite(loss.detach()).int()
    dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    return bool(ok)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(70)
    model = DDP(nn.Sequential(nn.Linear(10, 30), nn.ELU(), nn.Linear(30, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=STEPS)
    skipped = 0
    for step in range(STEPS):
        x, y = readings(step, rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        if not all_finite(loss):
            skipped += 1
            continue
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"rank {rank} skipped {skipped} of {STEPS}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
