"""Rare machine faults: class weights from the counts of all processes, and a weighted mean over all of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CLASSES, ROWS, STEPS = 4, 200, 20
BATCH = 20


def plant(rank):
    """Every process owns the records of one plant; the plants have different faults."""
    g = torch.Generator().manual_seed(80 + rank)
    share = torch.tensor([[0.7, 0.2, 0.08, 0.02], [0.5, 0.05, 0.1, 0.35]])[rank % 2]
    y = torch.multinomial(share, ROWS, replacement=True, generator=g)
    x = torch.randn(ROWS, 8, generator=g) + nn.functional.one_hot(y, 8) * 1.5
    return x, y


def global_class_weights(y):
    counts = torch.bincount(y, minlength=CLASSES)
    dist.all_reduce(counts)
    return counts.sum() / (CLASSES * counts.clamp(min=1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = plant(rank)
    weight = global_class_weights(y)
    torch.manual_seed(81)
    model = DDP(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % ROWS
        summed = nn.functional.cross_entropy(model(x[rows]), y[rows], weight=weight, reduction="sum")
        norm = weight[y[rows]].sum()
        dist.all_reduce(norm)
        loss = world * summed / norm
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f} class weights {[round(w, 2) for w in weight.tolist()]}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
