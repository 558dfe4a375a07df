"""Train a finding classifier on study vectors, then report the holdout accuracy.

torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Studies(Dataset):
    def __init__(self, split, n):
        g = torch.Generator().manual_seed({"train": 1, "holdout": 2}[split])
        direction = torch.linspace(-1, 1, 18)
        self.x = torch.randn(n, 18, generator=g)
        self.y = ((self.x @ direction + 2.5 * torch.randn(n, generator=g)) > 1).float()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


def loader_for(dataset, shuffle, batch_size=7):
    sampler = DistributedSampler(dataset, shuffle=shuffle)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler), sampler


@torch.no_grad()
def accuracy(model, loader):
    """Share of studies with the right answer, over all ranks."""
    model.eval()
    local = []
    for index, x, y in loader:
        flagged = model(x).squeeze(1) > -0.5
        local += list(zip(index.tolist(), flagged.tolist(), y.tolist()))
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    rows = {row[0]: row for part in parts for row in part}.values()
    right = [flagged == bool(y) for _, flagged, y in rows]
    model.train()
    return sum(right) / len(right)


def fit(model, loader, sampler, epochs=3):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loss_fn = nn.BCEWithLogitsLoss()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _, x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x).squeeze(1), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: bce {loss.item():.4f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    model = DDP(nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1)))
    train, sampler = loader_for(Studies("train", 70), shuffle=True)
    holdout, _ = loader_for(Studies("holdout", 21), shuffle=False)
    fit(model, train, sampler)
    result = accuracy(model, holdout)
    if dist.get_rank() == 0:
        print(f"holdout accuracy {result:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
