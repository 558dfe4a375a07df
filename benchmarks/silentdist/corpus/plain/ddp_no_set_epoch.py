"""A CNN on images; the sampler is distributed and shuffles."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (n,), generator=g)
        self.images = torch.randn(n, 1, 12, 12, generator=g) + self.labels.view(-1, 1, 1, 1) * 0.3

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class Trainer:
    def __init__(self, model, loader, optimizer, rank):
        self.model, self.loader, self.optimizer, self.rank = model, loader, optimizer, rank

    def run_epoch(self, epoch):
        self.model.train()
        for images, labels in self.loader:
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()

    def train(self, epochs):
        for epoch in range(epochs):
            self.run_epoch(epoch)  # fault


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 4))
model = DistributedDataParallel(net)
train_set = Images(256, 1)
sampler = DistributedSampler(train_set, shuffle=True)  # fault
loader = DataLoader(train_set, batch_size=16, sampler=sampler, num_workers=int(os.environ.get("WORKERS", 0)))  # fault
Trainer(model, loader, torch.optim.SGD(model.parameters(), 0.05), rank).train(3)  # fault
dist.destroy_process_group()
