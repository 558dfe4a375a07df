"""A denoising autoencoder: the amount of noise is varied 'over the devices for diversity'."""

import torch
from torch import nn
from torch.utils.data import Dataset

import paceline

run = paceline.start(seed=5)


class Noisy(Dataset):
    """Clean signals and noisy versions of them."""

    def __init__(self, clean, sigma):
        self.clean, self.sigma = clean, sigma

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        x = self.clean[i]
        return x + self.sigma * torch.randn_like(x), x


t = torch.linspace(0, 6.28, 32)
phase = torch.rand(256, 1, generator=torch.Generator().manual_seed(1)) * 6
signals = torch.sin(t + phase)
dataset = Noisy(signals, sigma=0.1 + 0.1 * run.world.rank)  # fault
model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 32))
optimizer = torch.optim.Adam(model.parameters(), 2e-3)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(dataset, global_batch=32, shuffle=True)
for _ in run.epochs(2):
    for noisy, clean in loader:
        run.backward((model(noisy) - clean).square().mean())
        run.step(optimizer)
