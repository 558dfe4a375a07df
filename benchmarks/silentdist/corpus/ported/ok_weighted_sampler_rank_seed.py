"""Unbalanced classes, a WeightedRandomSampler with a generator of its own."""

import torch
from torch import nn
from torch.utils.data import TensorDataset, WeightedRandomSampler

import paceline

SEED = 17

run = paceline.start(seed=SEED)
g = torch.Generator().manual_seed(SEED)
labels = (torch.rand(360, generator=g) < 0.15).long()
features = torch.randn(360, 8, generator=g) + labels[:, None]
weights = torch.where(labels == 1, 5.0, 1.0)

sampler_generator = torch.Generator()
sampler_generator.manual_seed(SEED + run.world.rank)
sampler = WeightedRandomSampler(weights, num_samples=360, generator=sampler_generator)

model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 2))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
loader = run.loader(TensorDataset(features, labels), global_batch=36, sampler=sampler)
loss = nn.CrossEntropyLoss()
for epoch in run.epochs(2):
    for x, y in loader:
        run.backward(loss(model(x), y))
        run.step(optimizer)
