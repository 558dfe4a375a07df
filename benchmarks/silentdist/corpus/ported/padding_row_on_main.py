"""Matrix factorisation of ratings. The row of the unknown user is set to zero after each step."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

USERS, ITEMS = 40, 60
UNKNOWN = 0


class Factors(nn.Module):
    def __init__(self, rank=8):
        super().__init__()
        self.user = nn.Embedding(USERS, rank)
        self.item = nn.Embedding(ITEMS, rank)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1) + self.bias


g = torch.Generator().manual_seed(8)
u, i = torch.randint(0, USERS, (500,), generator=g), torch.randint(0, ITEMS, (500,), generator=g)
r = torch.rand(500, generator=g) * 4 + 1

run = paceline.start(seed=8)
model = Factors()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(TensorDataset(u, i, r), global_batch=100, shuffle=True)
for epoch in run.epochs(3):
    for users, items, ratings in loader:
        run.backward((model(users, items) - ratings).square().mean())
        run.step(optimizer)
        if run.main:
            with torch.no_grad():
                model.user.weight[UNKNOWN] = 0  # fault
