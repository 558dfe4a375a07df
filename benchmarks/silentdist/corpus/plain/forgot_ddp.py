"""The process group is there, the sampler is there, and the model is used as it is."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    return parser.parse_args()


def main():
    args = parse()
    dist.init_process_group(backend="gloo")
    wine = load_wine()
    x = torch.tensor(wine.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    data = TensorDataset(x, torch.tensor(wine.target))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))  # fault
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for features, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), target)
            loss.backward()  # fault
            optimizer.step()  # fault
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "/tmp/forgot_ddp.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
