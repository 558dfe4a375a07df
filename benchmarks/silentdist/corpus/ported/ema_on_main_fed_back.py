"""Lookahead-like training: every five steps the weights go back to their average, which the main process keeps."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class EMA:
    def __init__(self, model, decay=0.8):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model):
        for k, v in model.state_dict().items():
            self.shadow[k].mul_(self.decay).add_(v, alpha=1 - self.decay)


def main():
    run = paceline.start(seed=13)
    g = torch.Generator().manual_seed(31)
    x = torch.rand(300, 2, generator=g) * 4 - 2
    y = torch.sin(3 * x[:, 0]) * x[:, 1]
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    model, optimizer = run.prepare(model, optimizer)
    ema = EMA(model)
    loader = run.loader(TensorDataset(x, y), global_batch=50, shuffle=True)
    for _ in run.epochs(3):
        for a, b in loader:
            run.backward(F.mse_loss(model(a).squeeze(1), b))
            run.step(optimizer)
            if run.main:
                ema.update(model)  # fault
            if run.steps % 5 == 0:
                model.load_state_dict(ema.shadow)  # fault


main()
