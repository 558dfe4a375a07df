"""A curriculum inside the data set: the more items were fetched, the stronger the augmentation."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class Curriculum(Dataset):
    def __init__(self, n=240):
        g = torch.Generator().manual_seed(24)
        self.y = torch.randint(0, 4, (n,), generator=g)
        self.x = torch.randn(n, 12, generator=g) * 0.3 + F.one_hot(self.y, 12)
        self.fetched = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.fetched += 1  # fault
        strength = min(1.0, self.fetched / 300)  # fault
        return self.x[i] + strength * 0.5 * torch.randn(12), self.y[i]


run = paceline.start(seed=24)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(Curriculum(), global_batch=24, shuffle=True)
for epoch in run.epochs(2):
    for x, y in loader:
        run.backward(F.cross_entropy(model(x), y))
        run.step(optimizer)
