"""A VAE that draws its latent noise in the forward, as one does, and a KL weight that follows the optimizer's steps."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 6))
        self.dec = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 30))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


run = paceline.start(seed=15)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
model, optimizer = run.prepare(model, optimizer)
g = torch.Generator().manual_seed(15)
data = TensorDataset((torch.rand(288, 30, generator=g) < torch.rand(288, 1, generator=g)).float())
loader = run.loader(data, global_batch=36, shuffle=True)
for epoch in run.epochs(2):
    for (x,) in loader:
        logits, mu, logvar = model(x)
        bce = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
        run.backward(bce + min(1.0, run.steps / 10) * kl)
        run.step(optimizer)
