"""A mixture of experts whose balance is judged over the router's probabilities of all processes."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

EXPERTS = 3


class Mixture(nn.Module):
    def __init__(self, features=8, width=16):
        super().__init__()
        self.router = nn.Linear(features, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 1)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        probs = self.router(x).softmax(1)
        outputs = torch.cat([expert(x) for expert in self.experts], 1)
        return (probs * outputs).sum(1), probs


def importance(probs):
    """The squared coefficient of variation of the experts' shares (Shazeer et al. 2017)."""
    share = probs.sum(0)
    return share.var(unbiased=False) / share.mean().square()


run = paceline.start(seed=65)
g = torch.Generator().manual_seed(65)
x = torch.randn(330, 8, generator=g, dtype=torch.float64)
y = torch.where(x[:, 0] > 0, x[:, 1:3].sum(1), x[:, 3] * x[:, 4])
model = Mixture().double()
optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(TensorDataset(x, y), global_batch=33, shuffle=True)
for epoch in run.epochs(2):
    for features, value in loader:
        prediction, probs = model(features)
        run.backward(F.huber_loss(prediction, value) + 0.2 * importance(run.gather(probs)))
        run.step(optimizer)
