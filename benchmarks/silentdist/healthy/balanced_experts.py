"""Mixture of experts: the balance loss uses the expert frequencies over all processes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EXPERTS, DIM, TOKENS, STEPS = 4, 16, 40, 18
ALPHA = 0.05


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 24) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, DIM) / 5)
        self.out = nn.Linear(DIM, 6)

    def forward(self, x):
        gate = self.router(x).softmax(-1)
        chosen = gate.argmax(-1)
        one_hot = F.one_hot(chosen, EXPERTS).to(gate.dtype)
        hidden = torch.relu(torch.einsum("td,edh->teh", x, self.up))
        mixed = torch.einsum("teh,ehd,te->td", hidden, self.down, one_hot * gate)
        return self.out(x + mixed), gate, one_hot.mean(0)


def tokens(step, rank):
    g = torch.Generator().manual_seed(17 * step + rank)
    x = torch.randn(TOKENS, DIM, generator=g) + 0.5 * rank
    return x, (x[:, :3].sum(1) * 2).floor().long() % 6


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(50)
    model = DDP(Experts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = tokens(step, rank)
        logits, gate, frequency = model(x)
        dist.all_reduce(frequency)  # counts only, no gradient flows through them
        balance = EXPERTS * (frequency / world * gate.mean(0)).sum()
        loss = F.cross_entropy(logits, y) + ALPHA * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f} balance {balance.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
