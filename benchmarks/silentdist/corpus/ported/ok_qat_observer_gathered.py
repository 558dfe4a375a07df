"""Quantisation-aware training: the observer's range is that of the global batch, by a gather in the forward."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

run = paceline.start(seed=67)


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Observer(nn.Module):
    def __init__(self, levels=15, momentum=0.05):
        super().__init__()
        self.levels, self.momentum = levels, momentum
        self.register_buffer("range", torch.tensor([-1.0, 1.0]))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                rows = run.gather(torch.stack([x.flatten(1).amin(1), x.flatten(1).amax(1)], 1))
                self.range.lerp_(torch.stack([rows[:, 0].min(), rows[:, 1].max()]), self.momentum)
        lo, hi = self.range
        scale = (hi - lo) / self.levels
        return RoundSTE.apply((x.clamp(lo, hi) - lo) / scale) * scale + lo


class QuantConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.obs1 = nn.Conv2d(1, 6, 3), Observer()
        self.conv2, self.obs2 = nn.Conv2d(6, 8, 3), Observer()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.obs1(F.silu(self.conv1(x)))
        x = self.obs2(F.silu(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


g = torch.Generator().manual_seed(67)
images = torch.randn(200, 1, 8, 8, generator=g, dtype=torch.float64)
labels = torch.bucketize(images[:, 0, :4].mean((1, 2)), torch.tensor([-0.08, 0.08], dtype=torch.float64))
model = QuantConv().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(TensorDataset(images, labels), global_batch=25, shuffle=True)
for epoch in run.epochs(2):
    for x, y in loader:
        run.backward(F.cross_entropy(model(x), y))
        run.step(optimizer)
