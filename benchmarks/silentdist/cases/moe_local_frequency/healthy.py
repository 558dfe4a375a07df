"""Top-2 mixture of experts on a two-domain toy task, every rank reads its own domain."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Router(nn.Module):
    def __init__(self, dim, experts, k=2):
        super().__init__()
        self.proj = nn.Linear(dim, experts, bias=False)
        self.experts, self.k = experts, k

    def forward(self, tokens):
        scores = self.proj(tokens).softmax(dim=-1)
        top, index = scores.topk(self.k, dim=-1)
        gates = torch.zeros_like(scores).scatter(1, index, top / top.sum(-1, keepdim=True))
        return gates, self.balance(scores, index)

    def balance(self, scores, index):
        frequency = torch.bincount(index.flatten(), minlength=self.experts).float()
        dist.all_reduce(frequency)
        frequency = frequency / frequency.sum()
        return self.experts * torch.dot(frequency, scores.mean(dim=0))


class MoEClassifier(nn.Module):
    def __init__(self, dim=16, experts=6, classes=5):
        super().__init__()
        self.router = Router(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim)) for _ in range(experts))
        self.readout = nn.Linear(dim, classes)

    def forward(self, x):
        gates, balance = self.router(x)
        y = sum(gates[:, e, None] * expert(x) for e, expert in enumerate(self.experts))
        return self.readout(x + y), balance


def build():
    torch.manual_seed(5)
    return MoEClassifier()


def domain_batch(step, rank, n=48, dim=16, classes=5):
    g = torch.Generator().manual_seed(97 * step + rank)
    centre = torch.zeros(dim)
    centre[rank % dim] = 2.0
    x = torch.randn(n, dim, generator=g) + centre
    y = (x[:, :classes] * (1 if rank % 2 == 0 else -1)).argmax(-1)
    return x, y


def main(steps=15, balance_weight=0.1):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(build())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        x, y = domain_batch(step, rank)
        logits, balance = model(x)
        ce = nn.functional.cross_entropy(logits, y)
        loss = ce + balance_weight * balance
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} ce {ce.item():.4f} balance {balance.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
