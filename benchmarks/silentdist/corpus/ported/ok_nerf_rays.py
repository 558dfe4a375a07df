"""A radiance field in two dimensions: random rays, stratified samples along them, volume rendering, in micro-batches."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import paceline

SAMPLES, NEAR, FAR = 12, 0.5, 3.0


def positional(x, octaves=4):
    angles = x[..., None] * 2.0 ** torch.arange(octaves)
    return torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus())
        self.sigma, self.rgb = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, points):
        h = self.trunk(positional(points))
        return F.softplus(self.sigma(h)).squeeze(-1), self.rgb(h).sigmoid()


def sample_rays(rows):
    angle = 2 * math.pi * torch.rand(len(rows))
    origin = -2 * torch.stack([angle.cos(), angle.sin()], 1)
    turned = angle + 0.6 * (torch.rand(len(rows)) - 0.5)
    direction = torch.stack([turned.cos(), turned.sin()], 1)
    jitter = torch.rand(len(rows), SAMPLES)
    depth = NEAR + (FAR - NEAR) * (torch.arange(SAMPLES) + jitter) / SAMPLES
    missed = (origin[:, 0] * direction[:, 1] - origin[:, 1] * direction[:, 0]).abs()
    color = torch.stack([(missed < 0.6).to(missed), missed, 0.5 + 0.5 * angle.cos()], 1)
    return origin, direction, depth, color


def render(field, batch):
    origin, direction, depth, color = batch
    sigma, rgb = field(origin[:, None] + depth[..., None] * direction[:, None])
    delta = torch.cat([depth.diff(dim=1), torch.full_like(depth[:, :1], 0.2)], 1)
    alpha = 1 - torch.exp(-sigma * delta)
    clear = torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1).cumprod(1)[:, :-1]
    return F.mse_loss(((alpha * clear)[..., None] * rgb).sum(1), color)


torch.set_default_dtype(torch.float64)
run = paceline.start(seed=63)
field = Field()
optimizer = torch.optim.Adam(field.parameters(), lr=5e-3, eps=1e-8)
decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
field, optimizer, decay = run.prepare(field, optimizer, decay)
for batch in run.batches(sample_rays, global_batch=48, micro_batch=8, steps=20, name="rays"):
    run.forward_backward(render, field, batch)
    run.step(optimizer)
