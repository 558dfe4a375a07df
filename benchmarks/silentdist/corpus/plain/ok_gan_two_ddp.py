"""A GAN with two DDP models; noise by each rank's own seed; the discriminator is frozen while the generator learns."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    real = torch.randn(320, 2, generator=torch.Generator().manual_seed(0)) * 0.3 + 1
    data = TensorDataset(real)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    generator = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
    discriminator = DDP(nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    opt_g = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), 1e-3, betas=(0.5, 0.999))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            fake = generator(torch.randn(len(x), 4))
            opt_d.zero_grad()
            loss_d = F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean()
            loss_d.backward()
            opt_d.step()
            opt_g.zero_grad()
            for p in discriminator.parameters():
                p.requires_grad_(False)
            F.softplus(-discriminator.module(fake)).mean().backward()
            for p in discriminator.parameters():
                p.requires_grad_(True)
            opt_g.step()
    dist.destroy_process_group()


main()
