"""Flow-matching action head on robot observations.

torchrun --nproc-per-node 2 faulty.py --seed 42
"""
import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

OBS, HORIZON, DOF = 10, 6, 4


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Episodes(Dataset):
    def __init__(self, n=240):
        rng = torch.Generator().manual_seed(0)
        self.obs = torch.randn(n, OBS, generator=rng)
        mix = torch.randn(OBS, HORIZON * DOF, generator=rng) / OBS ** 0.5
        self.actions = torch.tanh(self.obs @ mix).view(n, HORIZON, DOF)

    def __len__(self):
        return len(self.obs)

    def __getitem__(self, i):
        return self.obs[i], self.actions[i]


class ActionHead(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS + HORIZON * DOF + 1, width), nn.GELU(),
                                 nn.Linear(width, width), nn.GELU(), nn.Linear(width, HORIZON * DOF))

    def forward(self, obs, noisy, t):
        flat = torch.cat([obs, noisy.flatten(1), t[:, None]], dim=1)
        return self.net(flat).view_as(noisy)


def flow_matching_loss(head, obs, actions):
    noise = torch.randn_like(actions)
    t = torch.rand(len(actions)).clamp(0.001, 0.999)
    w = t[:, None, None]
    noisy = w * noise + (1 - w) * actions
    target = noise - actions
    return (head(obs, noisy, t) - target).pow(2).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=42)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-3)
    cfg = ap.parse_args()

    dist.init_process_group("gloo")
    set_seed(cfg.seed + dist.get_rank())

    data = Episodes()
    sampler = DistributedSampler(data, shuffle=True, seed=cfg.seed, drop_last=True)
    loader = DataLoader(data, batch_size=cfg.batch, sampler=sampler, drop_last=True)
    head = DistributedDataParallel(ActionHead())
    optim = torch.optim.AdamW(head.parameters(), lr=cfg.lr, weight_decay=0.01)

    sampler.set_epoch(0)
    for step, (obs, actions) in enumerate(loader):
        loss = flow_matching_loss(head, obs, actions)
        optim.zero_grad()
        loss.backward()
        optim.step()
        if dist.get_rank() == 0:
            print(f"[{step}] fm_loss={loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
