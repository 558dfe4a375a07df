"""Stochastic weight averaging from the second epoch on, with its schedule, and a test with the averaged weights."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import TensorDataset

import paceline


def digits(first, last):
    data = load_digits()
    x = torch.tensor(data.data[first:last], dtype=torch.float64) / 16
    return TensorDataset(x, torch.tensor(data.target[first:last]))


@torch.no_grad()
def test(run, net, loader):
    right = seen = 0
    for x, y in loader:
        right += int((net(x).argmax(1) == y).sum())
        seen += len(y)
    return run.ratio(right, seen)


def main(epochs=4, swa_start=1):
    run = paceline.start(seed=64, progress="off")
    model = nn.Sequential(nn.Linear(64, 40), nn.GroupNorm(4, 40), nn.ReLU(), nn.Linear(40, 10)).double()
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2, anneal_strategy="linear")
    model, optimizer = run.prepare(model, optimizer)
    run.track(averaged=averaged, schedule=schedule)
    train = run.loader(digits(0, 370), global_batch=37, shuffle=True)
    held_out = run.loader(digits(370, 470), global_batch=64, train=False)
    for epoch in run.epochs(epochs):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
        if epoch >= swa_start:
            averaged.update_parameters(model)
            schedule.step()
        run.print(f"epoch {epoch}: {test(run, averaged, held_out):.3f}")


main()
