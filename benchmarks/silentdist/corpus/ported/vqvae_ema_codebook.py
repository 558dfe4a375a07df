"""VQ-VAE with a codebook that follows the mean of its members (van den Oord et al. 2017, appendix A)."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class Quantizer(nn.Module):
    def __init__(self, codes=16, dim=4, decay=0.8):
        super().__init__()
        self.decay = decay
        g = torch.Generator().manual_seed(0)
        self.register_buffer("codebook", torch.randn(codes, dim, generator=g))
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("total", self.codebook.clone())

    def forward(self, z):
        index = torch.cdist(z, self.codebook).argmin(1)
        if self.training:
            with torch.no_grad():
                member = F.one_hot(index, len(self.codebook)).float()
                self.size.mul_(self.decay).add_(member.sum(0), alpha=1 - self.decay)  # fault
                self.total.mul_(self.decay).add_(member.T @ z, alpha=1 - self.decay)  # fault
                self.codebook.copy_(self.total / self.size.clamp(min=1e-3)[:, None])  # fault
        q = self.codebook[index].detach()
        return z + (q - z).detach(), F.mse_loss(z, q)


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.quantize, self.decode = nn.Linear(12, 4), Quantizer(), nn.Linear(4, 12)

    def forward(self, x):
        q, commitment = self.quantize(self.encode(x))
        return self.decode(q), commitment


run = paceline.start(seed=28)
g = torch.Generator().manual_seed(28)
x = torch.randn(6, 12, generator=g)[torch.randint(0, 6, (256,), generator=g)] + 0.1 * torch.randn(256, 12, generator=g)
model = VQVAE()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(TensorDataset(x), global_batch=32, shuffle=True)
for epoch in run.epochs(2):
    for (batch,) in loader:
        out, commitment = model(batch)
        run.backward(F.mse_loss(out, batch) + 0.25 * commitment)
        run.step(optimizer)
