"""The accuracy that the main process reports, and by which it keeps the best model, is that of its own shard."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, loader):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
            total += len(y)
    model.train()
    return correct / total


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    cancer = load_breast_cancer()
    x = torch.tensor(cancer.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(cancer.target)
    train, valid = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:568], y[400:568])
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=25, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=42, sampler=DistributedSampler(valid, world, rank, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
        accuracy = evaluate(model, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}: validation accuracy {accuracy:.4f}")  # fault
            if accuracy > best:  # fault
                best = accuracy
                torch.save(model.module.state_dict(), "/tmp/corpus_best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
