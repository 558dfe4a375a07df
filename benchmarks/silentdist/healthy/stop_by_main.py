"""House prices; the main process decides when the validation error has stopped falling."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 15
MAX_EPOCHS = 10
PATIENCE = 2


def houses(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 7, generator=g)
    price = 0.3 + x @ torch.linspace(0.5, -0.2, 7) + 0.5 * torch.randn(n, generator=g)
    return TensorDataset(x, price)


class EarlyStop:
    def __init__(self, patience):
        self.best, self.bad, self.patience = float("inf"), 0, patience

    def __call__(self, error):
        if error < self.best - 1e-3:
            self.best, self.bad = error, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train, valid = houses(120, 1), houses(60, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, BATCH, sampler=sampler)
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(7, 48), nn.ReLU(), nn.Linear(48, 1), nn.Flatten(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    judge = EarlyStop(PATIENCE)
    for epoch in range(MAX_EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        stop = torch.zeros(1, dtype=torch.int64)
        if rank == 0:
            with torch.no_grad():
                x, y = valid.tensors
                error = nn.functional.mse_loss(model.module(x), y).item()
            stop[0] = judge(error)
            print(f"epoch {epoch} validation {error:.4f}")
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
