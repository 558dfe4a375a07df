"""A GAN: two models, two optimizers, several backward passes in a step."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

LATENT = 4


def main():
    bf16 = "--bf16" in sys.argv
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    real_set = TensorDataset(torch.randn(160, 8) * 2 + 1)
    sampler = DistributedSampler(real_set)
    loader = DataLoader(real_set, batch_size=10, sampler=sampler, drop_last=True)
    generator = DDP(nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, 8)))
    discriminator = DDP(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), broadcast_buffers=False)
    criterion = nn.BCEWithLogitsLoss()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    fixed = torch.randn(6, LATENT)
    torch.manual_seed(11 + rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            noise = torch.randn(len(real), LATENT)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                optimizer_d.zero_grad()
                loss_real = criterion(discriminator(real), ones)
                loss_real.backward()
                fake = generator(noise)
                loss_fake = criterion(discriminator(fake.detach()), zeros)
                loss_fake.backward()
                optimizer_d.step()

                optimizer_g.zero_grad()
                for parameter in discriminator.parameters():
                    parameter.requires_grad_(False)
                loss_g = criterion(discriminator.module(fake), ones)
                loss_g.backward()
                for parameter in discriminator.parameters():
                    parameter.requires_grad_(True)
                optimizer_g.step()
        if rank == 0:
            with torch.no_grad():
                sample = generator.module(fixed)
            print(f"epoch {epoch}: d {loss_real.item():.3f} g {loss_g.item():.3f} {sample.std():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
