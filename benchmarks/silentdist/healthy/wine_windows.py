"""Wine classification with gradient accumulation; the last window of an epoch is shorter."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
ACCUMULATE = 4
EPOCHS = 4


def load_train_objs():
    wine = load_wine()
    x = torch.tensor(StandardScaler().fit_transform(wine.data), dtype=torch.float32)
    train_set = TensorDataset(x[:176], torch.tensor(wine.target[:176]))
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(13, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train_set, model, optimizer


class Trainer:
    def __init__(self, model, loader, optimizer):
        self.rank = int(os.environ["RANK"])
        self.model = DistributedDataParallel(model)
        self.loader = loader
        self.optimizer = optimizer

    def _window_size(self, i):
        left = len(self.loader) - (i // ACCUMULATE) * ACCUMULATE
        return min(ACCUMULATE, left)

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        total = 0.0
        for i, (x, y) in enumerate(self.loader):
            last = (i + 1) % ACCUMULATE == 0 or i + 1 == len(self.loader)
            self.model.require_backward_grad_sync = last
            loss = nn.functional.cross_entropy(self.model(x), y) / self._window_size(i)
            loss.backward()
            total += loss.item()
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()
        print(f"[rank {self.rank}] epoch {epoch} sum of window losses {total:.3f}")

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train_set, model, optimizer = load_train_objs()
    sampler = DistributedSampler(train_set)
    Trainer(model, DataLoader(train_set, BATCH, sampler=sampler), optimizer).train(EPOCHS)
    dist.destroy_process_group()
