"""Digits in Horovod's idiom, of which one line has changed: `import horovod.torch as hvd`. horovod_after.py is the same
job with paceline.start.

    paceline run --nproc 2 examples/migrate/horovod_before.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline.horovod as hvd

GLOBAL_BATCH = 60  # divides by 1, 2, 3, 4, 5 and 6 processes, and the 1,500 training examples by it


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: the 1,797 grey 8 x 8 images that come with scikit-learn."""
    source = load_digits()
    images, labels = torch.tensor(source.images.tolist()).unsqueeze(1) / 16, torch.tensor(source.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip


def main() -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    train_set, test_set = digits()
    sampler: DistributedSampler[object] = DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True
    )
    train_loader = DataLoader(train_set, batch_size=GLOBAL_BATCH // hvd.size(), sampler=sampler)
    test_sampler: DistributedSampler[object] = DistributedSampler(
        test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    test_loader = DataLoader(test_set, batch_size=256, sampler=test_sampler)

    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().cpu() for x, y in test_loader)
        accuracy = hvd.allreduce(right / len(test_sampler), name="accuracy")  # examples of the padding count twice
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}  test accuracy {accuracy:.4f}")
    return model


if __name__ == "__main__":
    main()
