"""Signature pairs: the wrapped network runs once for each half of a pair before one backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAIRS, STEPS = 12, 20
MARGIN = 1.0


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 6, 5)
        self.fc = nn.Sequential(nn.Linear(6 * 16, 24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x.unsqueeze(1))).flatten(1))


def pairs(step, rank):
    g = torch.Generator().manual_seed(step * 4 + rank)
    writer = torch.rand(2, PAIRS, 1, generator=g) * 6
    same = torch.rand(PAIRS, generator=g) < 0.5
    writer[1, same] = writer[0, same]
    stroke = torch.sin(torch.linspace(0, 8, 20) + writer) + 0.1 * torch.randn(2, PAIRS, 20, generator=g)
    return stroke[0], stroke[1], same


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(61)
    model = DDP(Encoder(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-6)
    for step in range(STEPS):
        a, b, same = pairs(step, rank)
        distance = (model(a) - model(b)).square().sum(1).add(1e-6).sqrt()
        loss = torch.where(same, distance.square(), (MARGIN - distance).clamp(min=0).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
