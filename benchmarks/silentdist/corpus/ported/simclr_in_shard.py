"""SimCLR's NT-Xent loss over the examples at hand."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class Augmented(Dataset):
    def __init__(self, n=192):
        self.images = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return len(self.images)

    def augment(self, x):
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
        return x * (0.6 + 0.8 * torch.rand(())) + 0.05 * torch.randn_like(x)

    def __getitem__(self, i):
        return self.augment(self.images[i]), self.augment(self.images[i])


def nt_xent(a, b, temperature=0.5):
    z = F.normalize(torch.cat([a, b]), dim=1)
    n = len(a)
    similarity = z @ z.T / temperature
    similarity = similarity.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similarity, target)  # fault


def loss_fn(model, batch):
    a, b = batch
    return nt_xent(model(a), model(b))  # fault


run = paceline.start(seed=7)
encoder = nn.Sequential(nn.Flatten(1), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
encoder, optimizer = run.prepare(encoder, optimizer)
loader = run.loader(Augmented(), global_batch=32, shuffle=True, drop_last=True)
for epoch in run.epochs(2):
    for batch in loader:
        run.forward_backward(loss_fn, encoder, batch)
        run.step(optimizer)
