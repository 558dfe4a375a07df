"""DRAGAN (Kodali et al. 2017): a discriminator with a gradient penalty around the data, and its generator."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

Z_DIM, LAMBDA = 4, 10.0


def build(*sizes):
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Softplus()]
    return nn.Sequential(*layers[:-1])


def gradient_penalty(discriminator, x):
    spread = 0.5 * x.std() * torch.rand_like(x)  # fault
    x_hat = (x + torch.rand(len(x), 1) * spread).requires_grad_(True)
    (grad,) = torch.autograd.grad(discriminator(x_hat).sum(), x_hat, create_graph=True)
    return ((grad.norm(2, dim=1) - 1) ** 2).mean()


def main():
    torch.set_default_dtype(torch.float64)
    run = paceline.start(seed=49, noise="example")
    gen = torch.Generator().manual_seed(49)
    scale = torch.rand(240, 1, generator=gen).square() * 4
    data = TensorDataset(torch.randn(240, 3, generator=gen) * scale)
    G, D = build(Z_DIM, 24, 3), build(3, 24, 24, 1)
    g_opt = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
    run.prepare(G, D, g_opt, d_opt)
    loader = run.loader(data, global_batch=30, shuffle=True)
    for _ in run.epochs(2):
        for (x,) in loader:
            fake = G(torch.randn(len(x), Z_DIM))
            d_loss = F.softplus(-D(x)).mean() + F.softplus(D(fake.detach())).mean()
            run.backward(d_loss + LAMBDA * gradient_penalty(D, x), optimizer=d_opt)
            run.step(d_opt)
            run.backward(F.softplus(-D(fake)).mean(), optimizer=g_opt)
            run.step(g_opt)


if __name__ == "__main__":
    main()
