"""A script that is written for Paceline: its own loader, closure, schedule, metrics and checkpoints."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(x))))


def examples(size, seed):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def main():
    run = paceline.start(precision="bf16" if "--bf16" in sys.argv else "fp32", progress="off")
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = run.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    loader = run.loader(examples(120, 1), global_batch=18, shuffle=True)
    test_loader = run.loader(examples(37, 2), global_batch=24, train=False)
    for epoch in run.epochs(4):
        model.train()
        for batch in loader:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
        scheduler.step()
        right = count = 0
        model.eval()
        with torch.no_grad():
            for inputs, targets in test_loader:
                right += (model(inputs).argmax(1) == targets).sum()
                count += len(targets)
        accuracy = run.ratio(right, count)
        if run.main:
            print(f"epoch {epoch}: accuracy {float(accuracy):.3f}")


main()
