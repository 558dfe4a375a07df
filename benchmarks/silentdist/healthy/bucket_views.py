"""Breast-cancer scores with gradients kept as views of the reduction buckets and a fixed loss scale."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LOSS_SCALE = 1024.0
BATCH = 16
STEPS = 17


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    table = load_breast_cancer()
    x = torch.tensor(table.data).float()
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(table.target).float()
    torch.manual_seed(77)
    order = torch.randperm(len(x))[rank::world]

    net = nn.Sequential(nn.Linear(30, 20), nn.SiLU(), nn.Linear(20, 20), nn.SiLU(), nn.Linear(20, 1))
    model = DDP(net, gradient_as_bucket_view=True, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        rows = order[step * BATCH : (step + 1) * BATCH]
        loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows]).squeeze(1), y[rows])
        (loss * LOSS_SCALE).backward()
        for p in model.parameters():
            p.grad.div_(LOSS_SCALE)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f} norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
