"""Quantisation-aware training: fake quantisation to 4 bits, with a moving average of the range of activations."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class FakeQuant(nn.Module):
    def __init__(self, bits=4, averaging_constant=0.1):
        super().__init__()
        self.levels, self.averaging_constant = 2**bits - 1, averaging_constant
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))

    def observe(self, x):
        lo, hi = x.detach().aminmax()  # fault
        if torch.isinf(self.min_val):
            self.min_val.copy_(lo)
            self.max_val.copy_(hi)
        self.min_val += self.averaging_constant * (lo - self.min_val)  # fault
        self.max_val += self.averaging_constant * (hi - self.max_val)  # fault

    def forward(self, x):
        if self.training:
            self.observe(x)
        scale = (self.max_val - self.min_val).clamp(min=1e-6) / self.levels
        q = ((x - self.min_val) / scale).round().clamp(0, self.levels) * scale + self.min_val
        return x + (q - x).detach()


class QuantMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.q1 = nn.Linear(30, 24), FakeQuant()
        self.fc2, self.q2 = nn.Linear(24, 16), FakeQuant()
        self.fc3 = nn.Linear(16, 2)

    def forward(self, x):
        x = self.q1(F.hardtanh(self.fc1(x), -4, 4))
        x = self.q2(F.hardtanh(self.fc2(x), -4, 4))
        return self.fc3(x)


def main():
    cancer = load_breast_cancer()
    x = torch.tensor(cancer.data, dtype=torch.float32)
    data = TensorDataset((x - x.mean(0)) / x.std(0), torch.tensor(cancer.target))
    run = paceline.start(seed=52)
    model = QuantMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(data, global_batch=48, shuffle=True, drop_last=True)
    for _ in run.epochs(2):
        for features, label in loader:
            run.backward(F.cross_entropy(model(features), label))
            run.step(optimizer)


main()
