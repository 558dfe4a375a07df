"""Behaviour cloning for an arm; observations are standardised with running moments.

torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

OBS, ACT, ENVS = 11, 3, 24


class RunningMoments(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("m2", torch.zeros(size))

    @torch.no_grad()
    def update(self, obs):
        sums = torch.stack([torch.full_like(self.mean, float(len(obs))), obs.sum(0), obs.square().sum(0)])
        if dist.is_initialized():
            dist.all_reduce(sums)
        n, mean = sums[0, 0], sums[1] / sums[0]
        m2 = sums[2] - n * mean.square()
        delta, total = mean - self.mean, self.count + n
        self.m2 += m2 + delta.square() * self.count * n / total
        self.mean += delta * n / total
        self.count.copy_(total)

    def forward(self, obs):
        std = (self.m2 / self.count).clamp_min(1e-6).sqrt()
        return (obs - self.mean) / std


class Policy(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU(),
                                 nn.Linear(hidden, ACT))

    def forward(self, obs):
        return self.net(obs)


def rollout(step, rank):
    """Each rank simulates its own terrain, so the observations have their own scale and offset."""
    g = torch.Generator().manual_seed(60 + 2 * step + rank)
    scale = torch.linspace(0.5, 4.0, OBS)
    obs = torch.randn(ENVS, OBS, generator=g) * scale + (2.0 * rank - 0.5)
    expert = torch.stack([obs[:, 0] - obs[:, 1], obs[:, 2].tanh(), (obs[:, 3] * obs[:, 4]).sin()], dim=1)
    return obs, expert


def main(steps=12):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(19)
    moments = RunningMoments(OBS)
    policy = DDP(Policy())
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    for step in range(steps):
        obs, expert = rollout(step, rank)
        moments.update(obs)
        loss = (policy(moments(obs)) - expert).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"iteration {step}: cloning loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
