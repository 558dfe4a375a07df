"""A stream of examples, workers, two heads used in turn, a schedule by plateaus, gathered predictions."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)


class Stream(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for number in range(96):
            x = torch.randn(5, generator=generator)
            if number % self.world_size == self.rank:
                yield x, x.sum().unsqueeze(0)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])

    def forward(self, x, head):
        return self.heads[head](torch.relu(self.body(x)))


def evaluate(model, loader, test_set):
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(x, 0) for x, _ in loader])
    gathered = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, outputs)
    outputs = torch.stack(gathered, 1).flatten(0, 1)
    outputs = outputs[: len(test_set)]
    model.train()
    return (outputs - test_set.tensors[1]).square().mean()


def main():
    bf16 = "--bf16" in sys.argv
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(Stream(rank, world_size), batch_size=8, num_workers=1)
    x = torch.randn(31, 5, generator=torch.Generator().manual_seed(9))
    test_set = TensorDataset(x, x.sum(1, keepdim=True))
    test_loader = DataLoader(test_set, batch_size=4, sampler=DistributedSampler(test_set, shuffle=False))
    torch.manual_seed(0)
    model = DDP(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for epoch in range(3):
        for step, (inputs, targets) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                loss = (model(inputs, step % 2).float() - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        error = evaluate(model.module, test_loader, test_set)
        scheduler.step(error)
        if rank == 0:
            print(f"epoch {epoch}: {error.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
