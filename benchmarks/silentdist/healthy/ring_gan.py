"""GAN on points of a ring: generator and discriminator are wrapped and optimised on their own."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

NZ, BATCH, STEPS = 4, 16, 20


def make_g():
    return nn.Sequential(nn.Linear(NZ, 24), nn.LeakyReLU(0.2), nn.Linear(24, 2))


def make_d():
    return nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))


def ring(generator):
    angle = 6.2832 * torch.rand(BATCH, 1, generator=generator)
    return torch.cat([angle.cos(), angle.sin()], 1)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(999)
    net_g, net_d = DDP(make_g()), DDP(make_d())
    opt_d = torch.optim.SGD(net_d.parameters(), lr=0.1)
    opt_g = torch.optim.SGD(net_g.parameters(), lr=0.1)
    criterion = nn.BCEWithLogitsLoss()
    noise = torch.Generator().manual_seed(1000 + rank)
    for step in range(STEPS):
        real, z = ring(noise), torch.randn(BATCH, NZ, generator=noise)

        # update D with real and with detached fake points in one pass
        fake = net_g(z)
        both = torch.cat([real, fake.detach()])
        label = torch.cat([torch.ones(BATCH, 1), torch.zeros(BATCH, 1)])
        loss_d = criterion(net_d(both), label)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        # update G through a discriminator that takes no gradients now
        net_d.requires_grad_(False)
        loss_g = criterion(net_d.module(fake), torch.ones(BATCH, 1))
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        net_d.requires_grad_(True)
        if rank == 0 and step % 5 == 0:
            print(f"[{step}/{STEPS}] Loss_D: {loss_d.item():.4f} Loss_G: {loss_g.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
