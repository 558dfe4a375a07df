"""Data parallelism by hand, as in the PyTorch tutorial, less one division."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 10, 3), nn.Linear(360, 10)

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.conv(x)).flatten(1)), 1)


def average_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)  # fault


def run():
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.images[rank:1200:size], dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target[rank:1200:size])
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    bsz = 128 // size
    for epoch in range(3):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(bsz):
            optimizer.zero_grad()
            F.nll_loss(model(images[batch]), labels[batch]).backward()
            average_gradients(model)  # fault
            optimizer.step()
    dist.destroy_process_group()


run()
