"""A GAN with the R1 penalty every fourth step, weighed up for it (Karras et al. 2020), and an average of the generator."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

R1_GAMMA, D_REG_EVERY = 2.0, 4


class RealAndNoise(Dataset):
    def __init__(self, n=264):
        g = torch.Generator().manual_seed(68)
        self.x = torch.randn(n, 2, generator=g, dtype=torch.float64) * 0.2 + torch.randint(-1, 2, (n, 2), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], torch.randn(3, dtype=torch.float64)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, o)).double()


def d_r1_loss(real_pred, real_img):
    (grad_real,) = torch.autograd.grad(outputs=real_pred.sum(), inputs=real_img, create_graph=True)
    return grad_real.pow(2).reshape(grad_real.shape[0], -1).sum(1).mean()


def accumulate(average, model, decay=0.98):
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters()):
            a.mul_(decay).add_(p, alpha=1 - decay)


def main():
    run = paceline.start(seed=68)
    generator, discriminator = mlp(3, 2), mlp(2, 1)
    g_ema = copy.deepcopy(generator)
    ratio = D_REG_EVERY / (D_REG_EVERY + 1)
    g_optim = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.99))
    d_optim = torch.optim.Adam(discriminator.parameters(), lr=2e-3 * ratio, betas=(0.0, 0.99**ratio))
    generator, discriminator, g_optim, d_optim = run.prepare(generator, discriminator, g_optim, d_optim)
    run.track(g_ema=g_ema)
    loader = run.loader(RealAndNoise(), global_batch=24, shuffle=True)
    i = 0
    for _ in run.epochs(2):
        for real, z in loader:
            fake = generator(z)
            d_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
            if i % D_REG_EVERY == 0:
                real_img = real.clone().requires_grad_(True)
                r1 = d_r1_loss(discriminator(real_img), real_img)
                d_loss = d_loss + R1_GAMMA / 2 * r1 * D_REG_EVERY
            run.backward(d_loss, optimizer=d_optim)
            run.step(d_optim)
            run.backward(F.softplus(-discriminator(fake)).mean(), optimizer=g_optim)
            run.step(g_optim)
            accumulate(g_ema, generator)
            i += 1


if __name__ == "__main__":
    main()
