"""Nano language model, data parallel by hand (no wrapper)."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class NanoGPT(nn.Module):
    def __init__(self, vocab=32, dim=32, context=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(context, dim)
        self.attn = Attention(dim, 4)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        x = x + self.attn(self.ln(x))
        return self.head(x + self.mlp(x))


def create_model():
    torch.manual_seed(1337)
    return NanoGPT()


def tokens(step, rank, batch=8, context=16, vocab=32):
    g = torch.Generator().manual_seed(step * 1000 + rank)
    start = torch.randint(0, vocab, (batch, 1), generator=g)
    stride = torch.randint(1, 3 + 6 * (rank % 2), (batch, 1), generator=g)
    return (start + stride * torch.arange(context + 1)) % vocab


class ReplicatedOptimizer:
    """Averages gradients over the replicas and steps a local optimizer."""

    def __init__(self, params, lr, max_norm):
        self.params = list(params)
        self.inner = torch.optim.SGD(self.params, lr=lr, momentum=0.9)
        self.max_norm = max_norm
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def reduce(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    def clip(self):
        square = sum(p.grad.square().sum() for p in self.params)
        norm = math.sqrt(float(square))
        if norm > self.max_norm:
            for p in self.params:
                p.grad *= self.max_norm / norm
        return norm

    def step(self):
        norm = self.clip()
        self.reduce()
        self.inner.step()
        self.inner.zero_grad()
        return norm


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--steps", type=int, default=15)
    args.add_argument("--clip", type=float, default=0.3)
    args = args.parse_args()
    dist.init_process_group("gloo")
    model = create_model()
    optimizer = ReplicatedOptimizer(model.parameters(), lr=0.3, max_norm=args.clip)
    for step in range(args.steps):
        ids = tokens(step, dist.get_rank())
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {loss.item():.4f} norm {norm:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
