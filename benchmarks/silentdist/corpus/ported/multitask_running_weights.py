"""Two tasks; each loss is divided by its running mean so that they weigh alike."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class LossBalancer:
    def __init__(self, tasks, momentum=0.9):
        self.momentum = momentum
        self.running = dict.fromkeys(tasks)

    def __call__(self, losses):
        total = 0
        for task, loss in losses.items():
            value = loss.item()
            old = self.running[task]
            self.running[task] = value if old is None else self.momentum * old + (1 - self.momentum) * value  # fault
            total = total + loss / self.running[task]  # fault
        return total


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 48), nn.GELU())
        self.classify, self.regress = nn.Linear(48, 3), nn.Linear(48, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.classify(h), self.regress(h).squeeze(-1)


run = paceline.start(seed=0)
g = torch.Generator().manual_seed(21)
x = torch.randn(320, 12, generator=g)
label, value = x[:, :3].argmax(1), x.square().sum(1) / 5
model = MultiTask()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
model, optimizer = run.prepare(model, optimizer)
balance = LossBalancer(["class", "value"])
loader = run.loader(TensorDataset(x, label, value), global_batch=40, shuffle=True)
for epoch in run.epochs(2):
    for features, c, v in loader:
        logits, prediction = model(features)
        losses = {"class": F.cross_entropy(logits, c), "value": F.mse_loss(prediction, v)}
        run.backward(balance(losses))
        run.step(optimizer)
