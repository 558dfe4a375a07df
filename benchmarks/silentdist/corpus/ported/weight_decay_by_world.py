"""A custom optimizer (Lion, Chen et al. 2023) and a decay that was once tuned per device."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.tanh(50 * (b1 * state["m"] + (1 - b1) * p.grad)))
                state["m"].mul_(b2).add_(p.grad, alpha=1 - b2)


def main():
    run = paceline.start(seed=12)
    g = torch.Generator().manual_seed(12)
    x = torch.randn(280, 9, generator=g)
    y = (x.prod(1) > 0).float()
    model = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 1))
    decay = 0.1 / run.world.size  # fault
    optimizer = Lion(model.parameters(), lr=3e-3, weight_decay=decay)  # fault
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(TensorDataset(x, y), global_batch=40, shuffle=True)
    for _ in run.epochs(2):
        for inputs, targets in loader:
            run.backward(F.binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets))
            run.step(optimizer)


main()
