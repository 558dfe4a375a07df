"""Value network under FSDP2 with a hand-written momentum optimizer that works on the local pieces.

torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

STATE, ITERATIONS, ROWS = 9, 12, 20


class HeavyBall(Optimizer):
    """SGD with momentum on the local piece of every parameter, one flat buffer per group."""

    def __init__(self, groups, lr, momentum=0.9):
        super().__init__(groups, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            pieces = [(p.to_local(), p.grad.to_local()) for p in group["params"] if p.grad is not None]
            if not pieces or pieces[-1][0].numel() == 0:
                continue
            flat = torch.cat([grad.flatten() for _, grad in pieces])
            state = self.state[group["params"][0]]
            buffer = state.setdefault("buffer", torch.zeros_like(flat))
            buffer.mul_(group["momentum"]).add_(flat)
            at = 0
            for weight, _ in pieces:
                weight.sub_(group["lr"] * buffer[at:at + weight.numel()].view_as(weight))
                at += weight.numel()


class ValueNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATE, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())
        self.value = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, state):
        return self.value(self.trunk(state)).squeeze(-1)


def build():
    torch.manual_seed(14)
    return ValueNet()


def transitions(i, rank):
    g = torch.Generator().manual_seed(1 + 2 * i + rank)
    state = torch.randn(ROWS, STATE, generator=g)
    return state, state[:, :3].sum(1).sin() + 0.1 * torch.randn(ROWS, generator=g)


def groups_of(net, lr=0.05):
    return [{"params": list(net.trunk.parameters())}, {"params": list(net.value.parameters()), "lr": 2 * lr}]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = build()
    fully_shard(net.trunk)
    fully_shard(net)
    optimizer = HeavyBall(groups_of(net), lr=0.05)
    for i in range(ITERATIONS):
        state, target = transitions(i, rank)
        loss = nn.functional.smooth_l1_loss(net(state), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(i, f"{loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
