"""Despeckling of ultrasound frames; speckle is drawn on the fly in the loader workers.

torchrun --nproc-per-node 2 faulty.py
"""
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SEED = 2024
NUM_WORKERS = 2
BATCH_SIZE = 6
SIDE = 16


class Frames(Dataset):
    def __init__(self, count):
        rng = np.random.default_rng(55)
        yy, xx = np.mgrid[:SIDE, :SIDE] / SIDE
        phase = rng.uniform(0, 6, (count, 1, 1))
        freq = rng.integers(1, 5, (count, 1, 1))
        self.clean = (np.sin(freq * 6.28 * xx + phase) * np.cos(freq * yy)).astype(np.float32)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        clean = self.clean[i]
        speckle = np.random.standard_normal(clean.shape).astype(np.float32)
        strength = random.uniform(0.2, 0.6)
        noisy = clean + strength * speckle
        return torch.from_numpy(noisy)[None], torch.from_numpy(clean)[None], torch.from_numpy(speckle)[None]


def init_worker(worker_id):
    seed = SEED + int(os.environ["RANK"]) * NUM_WORKERS + worker_id
    np.random.seed(seed)
    random.seed(seed)


def get_loader(rank, world_size):
    frames = Frames(144)
    sampler = DistributedSampler(frames, world_size, rank, shuffle=True, seed=SEED)
    return DataLoader(frames, batch_size=BATCH_SIZE, sampler=sampler, num_workers=NUM_WORKERS,
                      worker_init_fn=init_worker)


def get_network():
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.SiLU(),
        nn.Conv2d(12, 12, 3, padding=1), nn.SiLU(),
        nn.Conv2d(12, 1, 3, padding=1),
    )


def run(rank, world_size):
    loader = get_loader(rank, world_size)
    net = DDP(get_network())
    opt = torch.optim.Adam(net.parameters(), 2e-3)
    loader.sampler.set_epoch(0)
    for it, (noisy, clean, _) in enumerate(loader):
        opt.zero_grad()
        loss = nn.functional.l1_loss(net(noisy), clean)
        loss.backward()
        opt.step()
        if rank == 0 and it % 4 == 0:
            print("iteration", it, "l1", round(loss.item(), 4))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
