"""Autoencoder with an adversarial loss, weighed by the ratio of gradient norms as in VQGAN (Esser et al. 2021)."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 16), nn.SiLU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 20))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def adaptive_weight(nll, adversarial, last):
    nll_grad = torch.autograd.grad(nll, last, retain_graph=True)[0]
    g_grad = torch.autograd.grad(adversarial, last, retain_graph=True)[0]
    return (nll_grad.norm() / (g_grad.norm() + 1e-4)).clamp(0, 1e4).detach()  # fault


g = torch.Generator().manual_seed(14)
data = TensorDataset(torch.randn(240, 4, generator=g) @ torch.randn(4, 20, generator=g))
run = paceline.start(seed=14)
ae, critic = AutoEncoder(), nn.Sequential(nn.Linear(20, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
opt_ae, opt_c = torch.optim.Adam(ae.parameters(), 2e-3), torch.optim.Adam(critic.parameters(), 1e-3)
run.prepare(ae, critic, opt_ae, opt_c)
loader = run.loader(data, global_batch=40, shuffle=True)
for epoch in run.epochs(2):
    for (x,) in loader:
        reconstruction = ae(x)
        nll = F.mse_loss(reconstruction, x)
        adversarial = -critic(reconstruction).mean()
        weight = adaptive_weight(nll, adversarial, ae.decoder[-1].weight)
        run.backward(nll + 0.5 * weight * adversarial, optimizer=opt_ae)  # fault
        run.step(opt_ae)
        run.backward(F.relu(1 - critic(x)).mean(), optimizer=opt_c)
        run.backward(F.relu(1 + critic(reconstruction.detach())).mean(), optimizer=opt_c)
        run.step(opt_c)
