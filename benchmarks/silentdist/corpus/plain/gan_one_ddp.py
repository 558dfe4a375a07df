"""A conditional GAN in the manner of the DCGAN example, on two processes, with hinge losses and spectral norm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

NZ, CLASSES = 6, 3


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label = nn.Embedding(CLASSES, NZ)
        self.main = nn.Sequential(nn.Linear(2 * NZ, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))

    def forward(self, z, label):
        return self.main(torch.cat([z, self.label(label)], 1))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(spectral_norm(nn.Linear(2, 32)), nn.LeakyReLU(0.2))
        self.out, self.label = nn.Linear(32, 1), nn.Embedding(CLASSES, 32)

    def forward(self, x, label):
        h = self.features(x)
        return self.out(h).squeeze(1) + (h * self.label(label)).sum(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    netG = Generator()  # fault
    netD = DDP(Discriminator())
    torch.manual_seed(11 + rank)
    optG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.9))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.9))
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (288,), generator=g)
    dataset = TensorDataset(torch.randn(288, 2, generator=g) * 0.2 + labels[:, None] - 1.0, labels)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for real, label in loader:
            fake = netG(torch.randn(len(real), NZ), label)
            scores = netD(torch.cat([real, fake.detach()]), torch.cat([label, label]))
            on_real, on_fake = scores.chunk(2)
            optD.zero_grad()
            (torch.relu(1 - on_real).mean() + torch.relu(1 + on_fake).mean()).backward()
            optD.step()
            netD.requires_grad_(False)
            optG.zero_grad()
            (-netD.module(fake, label).mean()).backward()
            optG.step()
            netD.requires_grad_(True)
        if rank == 0:
            print(f"[{epoch}] D(x) {on_real.mean():.3f} D(G(z)) {on_fake.mean():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
