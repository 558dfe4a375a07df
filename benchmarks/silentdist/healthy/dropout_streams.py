"""Digits with dropout; every process draws its own masks."""

import random

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 20
DROP = 0.3


def random_seed(seed=42, rank=0):
    torch.manual_seed(seed + rank)
    np.random.seed(seed + rank)
    random.seed(seed + rank)


def create_model():
    return nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(DROP),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Dropout(DROP),
        nn.Linear(32, 10),
    )


def train_one_epoch(epoch, model, loader, optimizer, loss_fn):
    model.train()
    for batch_idx, (x, target) in enumerate(loader):
        loss = loss_fn(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and batch_idx % 8 == 0:
            print(f"Train: {epoch} [{batch_idx:>3d}/{len(loader)}] Loss: {loss.item():.3f}")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random_seed(42, 0)
    model = DDP(create_model())
    random_seed(42, rank)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data[:640]).float() / 16, torch.tensor(digits.target[:640]))
    sampler = DistributedSampler(data, seed=42)
    loader = DataLoader(data, BATCH, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, loader, optimizer, nn.CrossEntropyLoss(label_smoothing=0.05))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
