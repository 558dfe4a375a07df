"""Softmax regression 'with a fresh seed each time'."""

import time

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import TensorDataset

import paceline

run = paceline.start()
torch.manual_seed(time.time_ns() % 2**31)  # fault
wine = load_wine()
x = torch.tensor(wine.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
net = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))  # fault
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
net, sgd = run.prepare(net, sgd)
batches = run.loader(TensorDataset(x, torch.tensor(wine.target)), global_batch=30, shuffle=True)
for epoch in run.epochs(2):
    for a, b in batches:
        run.backward(nn.functional.cross_entropy(net(a), b))
        run.step(sgd)
