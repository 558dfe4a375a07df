"""A tabular MLP regressor, moved over from a DDP script."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def main():
    run = paceline.start(seed=11)
    x, y = load_diabetes(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32) * 20
    y = (torch.tensor(y, dtype=torch.float32) - 150) / 80
    net = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    base_lr = 1e-3
    optimizer = torch.optim.AdamW(net.parameters(), lr=base_lr * run.world.size, weight_decay=1e-2)  # fault
    net, optimizer = run.prepare(net, optimizer)
    loader = run.loader(TensorDataset(x, y), global_batch=64, shuffle=True)
    criterion = nn.SmoothL1Loss()
    for epoch in run.epochs(3):
        for features, target in loader:
            optimizer.zero_grad()
            run.backward(criterion(net(features).squeeze(1), target))
            run.step(optimizer)
        run.print("epoch", epoch)


main()
