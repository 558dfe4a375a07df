"""Mixture of experts with one expert per rank: tokens travel to the expert and back.

torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F

FEATURES, TARGETS, TOKENS = 12, 5, 30


class Expert(nn.Module):
    def __init__(self, index):
        super().__init__()
        torch.manual_seed(300 + index)
        self.inner = nn.Linear(FEATURES, 24)
        self.outer = nn.Linear(24, FEATURES)

    def forward(self, x):
        return self.outer(F.silu(self.inner(x)))


class SharedPart(nn.Module):
    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(299)
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.gate = nn.Linear(FEATURES, experts)
        self.head = nn.Linear(FEATURES, TARGETS)


class MoE(nn.Module):
    def __init__(self, rank, ep_size):
        super().__init__()
        self.rank, self.ep_size = rank, ep_size
        self.shared = SharedPart(ep_size)
        self.expert = Expert(rank)

    def forward(self, x):
        h = torch.tanh(self.shared.stem(x))
        probs = self.shared.gate(h).softmax(-1)
        weight, choice = probs.max(-1)
        picked = F.one_hot(choice, self.ep_size).to(h.dtype) * weight[:, None]
        all_h = torch.cat(dist_fn.all_gather(h))
        all_picked = torch.cat(dist_fn.all_gather(picked))
        mine = all_picked[:, self.rank, None] * self.expert(all_h)
        mixed = dist_fn.all_reduce(mine)
        return self.shared.head(h + mixed.chunk(self.ep_size)[self.rank])


def sync_gradients(model, world_size, ep_size):
    for p in model.shared.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size
    for p in model.expert.parameters():
        p.grad /= world_size


def tokens(step, rank):
    g = torch.Generator().manual_seed(4000 + 2 * step + rank)
    x = torch.randn(TOKENS, FEATURES, generator=g)
    return x, (x[:, :TARGETS] * x[:, 5:5 + TARGETS]).argmax(1)


def main(steps=10):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = MoE(rank, ep_size=world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        x, y = tokens(step, rank)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        sync_gradients(model, world_size, model.ep_size)
        optimizer.step()
        if rank == 0:
            print(f"{step:2d}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
