"""A variational autoencoder whose dropout and noise belong to the examples."""

import torch
from torch import nn
from torch.nn import functional as F

import paceline


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mu, self.logvar, self.fc2 = (nn.Linear(*s) for s in ((12, 16), (16, 4), (16, 4), (4, 12)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = F.dropout(F.relu(self.fc1(x)), 0.2, self.training)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.fc2(mu + torch.exp(logvar / 2) * torch.randn_like(mu)), mu, logvar


run = paceline.start(seed=3, noise="example")
model = VAE()
model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-3))
loader = run.loader(torch.utils.data.TensorDataset(torch.rand(60, 12)), global_batch=16, shuffle=True)
for _ in run.epochs(5):
    for (x,) in loader:
        made, mu, logvar = model(x)
        divergence = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
        run.backward(F.mse_loss(made, x, reduction="none").sum(1).mean() + divergence)
        run.step(optimizer)
