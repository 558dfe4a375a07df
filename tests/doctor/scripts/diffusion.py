"""A denoiser: augmentation in workers, timesteps, noise and dropout, all by each rank's own seed."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STEPS, WIDTH = 50, 10


class Points(Dataset):
    def __init__(self, size):
        self.points = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index] * (1 + 0.1 * torch.rand(()))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS, 8)
        self.net = nn.Sequential(nn.Linear(WIDTH + 8, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, WIDTH))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DDP(Denoiser())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    points = Points(240)
    sampler = DistributedSampler(points)
    loader = DataLoader(points, 12, sampler=sampler, num_workers=2)
    kept = torch.linspace(0.999, 0.01, STEPS)
    torch.manual_seed(5 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in loader:
            t = torch.randint(0, STEPS, (len(x),))
            noise = torch.randn_like(x)
            share = kept[t].unsqueeze(1)
            with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
                guess = model(share.sqrt() * x + (1 - share).sqrt() * noise, t)
            loss = nn.functional.mse_loss(guess.float(), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
