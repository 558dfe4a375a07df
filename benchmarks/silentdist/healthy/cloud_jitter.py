"""Cloud patches with random brightness and noise; every process draws its own augmentations."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SEED = 21
BATCH = 8


class Patches(Dataset):
    def __init__(self, size=128):
        g = torch.Generator().manual_seed(SEED)
        self.kind = torch.randint(0, 3, (size,), generator=g)
        wave = torch.linspace(0, 6, 8)
        self.image = torch.stack([torch.sin(wave * (k + 1))[:, None] * torch.cos(wave)[None] for k in self.kind])

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        image = self.image[i] * random.uniform(0.7, 1.3)
        if random.random() < 0.5:
            image = image.flip(1)
        return (image + 0.3 * torch.randn(8, 8)).unsqueeze(0), self.kind[i]


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    seed_everything(SEED)  # the same weights everywhere
    model = DDP(
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    )
    seed_everything(SEED + rank)  # other jitter on every process
    data = Patches()
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, BATCH, sampler=sampler, generator=torch.Generator().manual_seed(SEED))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
