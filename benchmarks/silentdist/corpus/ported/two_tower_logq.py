"""A two-tower recommender; softmax over the items of the batch, with the correction for popular items (Yi et al. 2019)."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

USERS, ITEMS, DIM = 60, 40, 12


class Tower(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.table = nn.Embedding(rows, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 24), nn.ReLU(), nn.Linear(24, DIM))

    def forward(self, ids):
        return F.normalize(self.mlp(self.table(ids)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, popularity, temperature=0.2):
        super().__init__()
        self.user_tower, self.item_tower = Tower(USERS), Tower(ITEMS)
        self.temperature = temperature
        self.register_buffer("log_q", popularity.log())

    def forward(self, user, item):
        return self.user_tower(user), self.item_tower(item)

    def compute_loss(self, user, item, u, v):
        scores = u @ v.t() / self.temperature - self.log_q[item]  # fault
        same = (item[:, None] == item[None, :]) & ~torch.eye(len(item), dtype=torch.bool)
        labels = torch.arange(len(item), device=scores.device)
        return F.cross_entropy(scores.masked_fill(same, -1e9), labels)  # fault


run = paceline.start(seed=44)
g = torch.Generator().manual_seed(44)
clicks_user = torch.randint(0, USERS, (384,), generator=g)
clicks_item = (clicks_user * 7 + torch.randint(0, 6, (384,), generator=g)) % ITEMS
popularity = (torch.bincount(clicks_item, minlength=ITEMS) + 1.0) / (384 + ITEMS)
model = TwoTower(popularity)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(TensorDataset(clicks_user, clicks_item), global_batch=48, shuffle=True, drop_last=True)
for epoch in run.epochs(2):
    for user, item in loader:
        run.backward(model.compute_loss(user, item, *model(user, item)))
        run.step(optimizer)
