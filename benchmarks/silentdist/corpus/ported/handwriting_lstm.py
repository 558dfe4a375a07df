"""Handwriting prediction after Graves (2013): an LSTM, a Gaussian over the next pen move, gradients kept in bounds."""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class Pen(nn.Module):
    def __init__(self, hidden=24, bound=1.0):
        super().__init__()
        self.cell, self.head, self.bound = nn.LSTMCell(2, hidden), nn.Linear(hidden, 4), bound
        self.hidden = hidden

    def forward(self, strokes):
        h = c = strokes.new_zeros(len(strokes), self.hidden)
        outputs = []
        for t in range(strokes.shape[1]):
            h, c = self.cell(strokes[:, t], (h, c))
            if h.requires_grad:
                h.register_hook(lambda g: g * (self.bound / (g.norm() + 1e-8)).clamp(max=1.0))  # fault
            outputs.append(self.head(h))
        return torch.stack(outputs, 1)


def nll(output, target):
    mu, log_sigma = output.chunk(2, -1)
    z = (target - mu) * torch.exp(-log_sigma)
    return (0.5 * z.square() + log_sigma + 0.5 * math.log(2 * math.pi)).sum(-1).mean()


def strokes(n=160, length=15):
    g = torch.Generator().manual_seed(50)
    turn = torch.randn(n, length, generator=g).mul(0.4).cumsum(1)
    speed = 0.2 + torch.rand(n, 1, generator=g)
    return torch.stack([turn.cos() * speed, turn.sin() * speed], -1)


run = paceline.start(seed=50)
model = Pen(bound=0.02)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.95, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)
moves = strokes()
loader = run.loader(TensorDataset(moves[:, :-1], moves[:, 1:]), global_batch=20, shuffle=True)
for epoch in run.epochs(2):
    for now, following in loader:
        run.backward(nll(model(now), following))
        run.step(optimizer)
