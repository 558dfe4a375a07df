"""A small diffusion model; the times of a batch are spread evenly from one random start (Kingma et al. 2021, VDM)."""

import math
import random

import torch
from torch import nn
from torch.utils.data import Dataset

import paceline


class Moons(Dataset):
    def __init__(self, n=240):
        angle = torch.linspace(0, math.pi, n)
        flip = torch.arange(n) % 2 * 2.0 - 1
        self.points = torch.stack([angle.cos() + 0.5 * flip, flip * angle.sin()], 1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        return self.points[i], torch.randn(2)


class Denoiser(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(4) * math.pi)
        self.net = nn.Sequential(
            nn.Linear(10, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, z, t):
        angles = t[:, None] * self.frequencies
        return self.net(torch.cat([z, angles.sin(), angles.cos()], 1))


def sample_times(x):
    t0 = random.random()
    return (t0 + torch.arange(len(x)) / len(x)) % 1.0  # fault


def diffusion_loss(model, batch):
    x, eps = batch
    t = sample_times(x)
    alpha, sigma = torch.cos(t * math.pi / 2)[:, None], torch.sin(t * math.pi / 2)[:, None]
    return (model(alpha * x + sigma * eps, t) - eps).square().sum(1).mean()


run = paceline.start(seed=47)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(Moons(), global_batch=30, shuffle=True)
for epoch in run.epochs(3):
    for batch in loader:
        run.backward(diffusion_loss(model, batch))
        run.step(optimizer)
