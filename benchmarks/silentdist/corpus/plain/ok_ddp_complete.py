"""Plain DDP with all the trimmings: seeds by rank, saving on the main process, sums of the evaluation, shards unpadded."""

import os
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def evaluate(model, loader):
    model.eval()
    stats = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            stats += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42 + rank)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, valid = TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:1501], y[1024:1501])
    sampler = DistributedSampler(train, shuffle=True, seed=42)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    valid_loader = DataLoader(Subset(valid, range(rank, len(valid), world)), batch_size=64)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * world)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(loader))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        accuracy = evaluate(model, valid_loader)
        if rank == 0:
            print(f"epoch {epoch} accuracy {accuracy:.4f}")
            torch.save(model.module.state_dict(), os.path.join(tempfile.gettempdir(), "corpus_ok_ddp.pt"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
