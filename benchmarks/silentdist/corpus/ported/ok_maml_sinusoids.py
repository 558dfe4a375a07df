"""MAML on sinusoids (Finn et al. 2017): an example is a task, with an inner step of its own and a second derivative."""

import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

INNER_LR, SHOTS = 0.02, 5


class Sinusoids(Dataset):
    def __init__(self, n=96):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        amplitude, phase = 0.5 + 4 * torch.rand(()), math.pi * torch.rand(())
        x = 10 * torch.rand(2 * SHOTS, 1) - 5
        return x, amplitude * torch.sin(x + phase)


def adapt(model, x, y):
    weights = dict(model.named_parameters())
    loss = F.mse_loss(functional_call(model, weights, (x,)), y)
    grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    return {name: w - INNER_LR * g for (name, w), g in zip(weights.items(), grads)}


def main():
    torch.set_default_dtype(torch.float64)
    run = paceline.start(seed=62)
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    meta = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, meta = run.prepare(model, meta)
    tasks = run.loader(Sinusoids(), global_batch=12, shuffle=True)
    for _ in run.epochs(2):
        for x, y in tasks:
            losses = []
            for task_x, task_y in zip(x, y):
                fast = adapt(model, task_x[:SHOTS], task_y[:SHOTS])
                losses.append(F.mse_loss(functional_call(model, fast, (task_x[SHOTS:],)), task_y[SHOTS:]))
            run.backward(torch.stack(losses).mean())
            run.step(meta)


main()
