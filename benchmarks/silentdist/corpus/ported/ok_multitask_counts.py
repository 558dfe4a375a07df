"""Three losses with three counts: classification, regression where a value is known, and a penalty on the weights."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

run = paceline.start(seed=4)
g = torch.Generator().manual_seed(4)
x = torch.randn(330, 12, generator=g)
label = x[:, :3].argmax(1)
value = x.sum(1)
known = torch.rand(330, generator=g) < 0.3
trunk, heads = (
    nn.Sequential(nn.Linear(12, 32), nn.SiLU()),
    nn.ModuleDict({"c": nn.Linear(32, 3), "r": nn.Linear(32, 1)}),
)
optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=2e-3)
trunk, heads, optimizer = run.prepare(trunk, heads, optimizer)
loader = run.loader(TensorDataset(x, label, value, known), global_batch=41, shuffle=True)
for epoch in run.epochs(2):
    for features, c, v, k in loader:
        h = trunk(features)
        run.backward(F.cross_entropy(heads["c"](h), c), retain_graph=True)
        squares = (heads["r"](h).squeeze(1) - v).square() * k
        run.backward(total=squares.sum(), count=k.sum())
        run.backward(1e-3 * sum(p.square().sum() for p in heads.parameters()), count=1)
        run.step(optimizer)
