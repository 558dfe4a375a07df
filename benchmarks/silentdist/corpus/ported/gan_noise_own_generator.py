"""A GAN whose latent noise comes from a generator with a fixed seed, 'for reproducibility'."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

LATENT = 6

run = paceline.start(seed=29)
g = torch.Generator().manual_seed(29)
real = torch.randn(256, 2, generator=g) * 0.2 + torch.tensor([[1.0, -1.0]])
generator = nn.Sequential(nn.Linear(LATENT, 24), nn.SiLU(), nn.Linear(24, 2))
discriminator = nn.Sequential(nn.Linear(2, 24), nn.SiLU(), nn.Linear(24, 1))
opt_g = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(discriminator.parameters(), 1e-3, betas=(0.5, 0.99))
generator, discriminator, opt_g, opt_d = run.prepare(generator, discriminator, opt_g, opt_d)
loader = run.loader(TensorDataset(real), global_batch=32, shuffle=True)
latent = torch.Generator().manual_seed(1)
for epoch in run.epochs(2):
    for (x,) in loader:
        z = torch.randn(len(x), LATENT, generator=latent)  # fault
        fake = generator(z)
        run.backward(
            F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean(), optimizer=opt_d
        )
        run.step(opt_d)
        run.backward(F.softplus(-discriminator(fake)).mean(), optimizer=opt_g)
        run.step(opt_g)
