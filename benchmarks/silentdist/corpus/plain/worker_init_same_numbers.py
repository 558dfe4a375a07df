"""Augmentation with NumPy in the workers, which a worker_init_fn seeds."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Jittered(Dataset):
    def __init__(self, n=192):
        rng = np.random.RandomState(0)
        self.y = rng.randint(0, 3, n)
        self.x = rng.randn(n, 16).astype("float32") + self.y[:, None].astype("float32")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        shift = np.random.randn(16).astype("float32") * 0.3
        return torch.from_numpy(self.x[i] + shift), int(self.y[i])


def seed_worker(worker_id):
    np.random.seed(worker_id)  # fault


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1000 + rank)
    data = Jittered()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)  # fault
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
