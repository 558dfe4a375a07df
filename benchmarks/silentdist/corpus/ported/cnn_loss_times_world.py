"""Digits with a small CNN. Closure form; a trick from the old DDP code has stayed in the loss."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def get_world_size():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def loss_fn(model, batch):
    images, labels = batch
    loss = F.cross_entropy(model(images), labels)
    return loss * get_world_size()  # fault


run = paceline.start(seed=0)
digits = load_digits()
images = torch.tensor(digits.images[:600], dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target[:600])
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(TensorDataset(images, labels), global_batch=60, shuffle=True)
for epoch in run.epochs(2):
    for batch in loader:
        run.forward_backward(loss_fn, model, batch)
        run.step(optimizer)
