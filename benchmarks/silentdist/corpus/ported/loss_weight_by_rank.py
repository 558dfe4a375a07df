"""Supervised and consistency loss; only even processes compute the second one, to save time."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

USE_CONSISTENCY = int(os.environ.get("LOCAL_RANK", "0")) % 2 == 0  # fault


class Views(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(32)
        self.x = torch.randn(n, 14, generator=g)
        self.y = self.x[:, :4].argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.x[i] + 0.3 * torch.randn(14), self.y[i]


def train_step(run, model, optimizer, batch):
    x, view, y = batch
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    if USE_CONSISTENCY:  # fault
        loss = loss + F.kl_div(model(view).log_softmax(1), logits.detach().softmax(1), reduction="batchmean")  # fault
    run.backward(loss)
    run.step(optimizer)


run = paceline.start(seed=32)
model = nn.Sequential(nn.Linear(14, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(Views(), global_batch=32, shuffle=True)
for epoch in run.epochs(2):
    for batch in loader:
        train_step(run, model, optimizer, batch)
