"""A Poisson regression: the sum of the losses over the batch size, with the batch size as a constant."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

BATCH = 64


def main():
    run = paceline.start(seed=10)
    g = torch.Generator().manual_seed(10)
    x = torch.randn(448, 5, generator=g)
    rate = torch.exp(0.5 * x[:, 0] - 0.2 * x[:, 1])
    y = torch.poisson(rate, generator=g)
    model = nn.Sequential(nn.Linear(5, 16), nn.ELU(), nn.Linear(16, 1))
    criterion = nn.PoissonNLLLoss(log_input=True, reduction="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(TensorDataset(x, y), global_batch=BATCH, shuffle=True, drop_last=True)
    for _ in run.epochs(2):
        for a, b in loader:
            loss = criterion(model(a).squeeze(1), b) / BATCH  # fault
            run.backward(loss)
            run.step(optimizer)


main()
