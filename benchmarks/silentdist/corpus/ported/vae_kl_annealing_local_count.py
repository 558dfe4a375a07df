"""A VAE whose KL weight grows with the number of examples seen."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class WithNoise(Dataset):
    """Each item with its latent noise, so that the noise belongs to the example."""

    def __init__(self, n=288):
        g = torch.Generator().manual_seed(19)
        self.x = (torch.rand(n, 30, generator=g) < torch.rand(n, 1, generator=g)).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], torch.randn(3)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(30, 6), nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 30))

    def forward(self, x, eps):
        mu, logvar = self.enc(x).chunk(2, 1)
        return self.dec(mu + eps * torch.exp(0.5 * logvar)), mu, logvar


run = paceline.start(seed=19)
vae = VAE()
adam = torch.optim.Adam(vae.parameters(), lr=1e-2)
vae, adam = run.prepare(vae, adam)
loader = run.loader(WithNoise(), global_batch=36, shuffle=True)
examples_seen = 0
for epoch in run.epochs(2):
    for x, eps in loader:
        logits, mu, logvar = vae(x, eps)
        examples_seen += len(x)  # fault
        beta = min(1.0, examples_seen / 400)  # fault
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
        run.backward(reconstruction + beta * kl)  # fault
        run.step(adam)
