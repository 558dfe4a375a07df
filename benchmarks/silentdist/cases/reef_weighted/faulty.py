"""Classify reef survey crops with very uneven species counts.

torchrun --nproc-per-node 2 faulty.py
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

COUNTS = [220, 90, 30, 12]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args()


def reef_crops():
    g = torch.Generator().manual_seed(100)
    labels = torch.cat([torch.full((n,), i) for i, n in enumerate(COUNTS)])
    patterns = torch.randn(len(COUNTS), 3, 12, 12, generator=g)
    images = patterns[labels] + 1.5 * torch.randn(len(labels), 3, 12, 12, generator=g)
    return TensorDataset(images, labels)


def build_loader(dataset, args):
    labels = dataset.tensors[1]
    per_class = torch.bincount(labels).float()
    weights = (1.0 / per_class)[labels]
    generator = torch.Generator()
    generator.manual_seed(args.seed)
    sampler = WeightedRandomSampler(weights, args.steps * args.batch_size, replacement=True, generator=generator)
    return DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)


class CropNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.norm(self.conv2(x)))
        return self.head(x.mean((2, 3)))


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    dataset = reef_crops()
    loader = build_loader(dataset, args)
    model = DistributedDataParallel(CropNet(len(COUNTS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    model.train()
    for step, (images, labels) in enumerate(loader):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
