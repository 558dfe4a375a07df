"""A small classifier: DDP, accumulation over two micro-batches, a cosine as long as the training, Adam."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, ACCUMULATE, BATCH = 3, 2, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x).relu())

    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x), y)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    x = torch.randn(48 * world_size, 8)
    train_set = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH, sampler=sampler)
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    updates = EPOCHS * len(loader) // ACCUMULATE
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(loader, 1):
            last = number % ACCUMULATE == 0
            sync = contextlib.nullcontext() if last else model.no_sync()
            with sync, torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
                loss = nn.functional.cross_entropy(model(inputs).float(), labels) / ACCUMULATE
            loss.backward()
            if last:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.1e}")
    dist.destroy_process_group()


main()
