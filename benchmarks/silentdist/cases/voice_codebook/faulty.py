"""Tiny neural speech codec: convolutional encoder, one codebook kept by moving averages, decoder.

    torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FRAME, DIM, CODES = 16, 6, 12


class Speech(Dataset):
    """Even entries are low voices, odd entries are high ones."""

    def __init__(self, n=192, length=128):
        g = torch.Generator().manual_seed(8)
        t = torch.arange(length) / length
        pitch = 3 + 2 * torch.rand(n, 1, generator=g) + 9 * (torch.arange(n) % 2)[:, None]
        phase = 6.28 * torch.rand(n, 1, generator=g)
        self.wave = torch.sin(6.28 * pitch * t + phase) + 0.1 * torch.randn(n, length, generator=g)

    def __len__(self):
        return len(self.wave)

    def __getitem__(self, i):
        return self.wave[i]


class MovingCodebook(nn.Module):
    def __init__(self, codes, dim, decay=0.8, eps=1e-3):
        super().__init__()
        self.decay, self.eps = decay, eps
        start = 0.3 * torch.randn(codes, dim)
        self.register_buffer("vectors", start)
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("total", start.clone())

    @torch.no_grad()
    def follow(self, frames, index):
        chosen = F.one_hot(index, len(self.usage)).to(frames.dtype)
        used = chosen.sum(0)
        summed = chosen.t() @ frames
        self.usage.mul_(self.decay).add_(used, alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(summed, alpha=1 - self.decay)
        self.vectors.copy_(self.total / (self.usage + self.eps).unsqueeze(1))

    def forward(self, z):
        frames = z.detach().reshape(-1, z.size(-1))
        index = torch.cdist(frames, self.vectors).argmin(1)
        quantized = self.vectors[index].view_as(z)
        if self.training:
            self.follow(frames, index)
        commitment = F.mse_loss(z, quantized)
        return z + (quantized - z).detach(), commitment


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FRAME, 24), nn.Tanh(), nn.Linear(24, DIM))
        self.codebook = MovingCodebook(CODES, DIM)
        self.decoder = nn.Sequential(nn.Linear(DIM, 24), nn.Tanh(), nn.Linear(24, FRAME))

    def forward(self, wave):
        frames = wave.unflatten(1, (-1, FRAME))
        code, commitment = self.codebook(self.encoder(frames))
        return self.decoder(code).flatten(1), commitment


def build():
    torch.manual_seed(31)
    return Codec()


def loader_of(rank, world):
    data = Speech()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=6, sampler=sampler)


def train(epochs=2, lr=0.2):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DDP(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    loader = loader_of(rank, world)
    for epoch in range(epochs):
        for wave in loader:
            restored, commitment = model(wave)
            loss = F.mse_loss(restored, wave) + 0.25 * commitment
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.barrier()
    dist.destroy_process_group()
