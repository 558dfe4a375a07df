"""Causal model on long sequences: every rank of the context group keeps one half of the positions.

torchrun --nproc-per-node 2 faulty.py --cp 2
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather

VOCAB, WIDTH, LENGTH = 29, 24, 48


class Mesh:
    def __init__(self, cp):
        world = dist.get_world_size()
        self.cp, self.dp = cp, world // cp
        self.cp_rank, self.dp_rank = dist.get_rank() % cp, dist.get_rank() // cp
        self.grad_group = dist.group.WORLD


class CausalBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, WIDTH))

    def forward(self, x, offset, gather):
        y = self.norm(x)
        k, v = gather(self.kv(y)).chunk(2, -1)
        rows = offset + torch.arange(x.shape[1])
        mask = rows[:, None] >= torch.arange(k.shape[1])[None]
        x = x + F.scaled_dot_product_attention(self.q(y), k, v, attn_mask=mask)
        return x + self.mlp(x)


class LongModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.block = CausalBlock()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, offset=0, gather=lambda t: t):
        return self.head(self.block(self.embed(ids), offset, gather))


def documents(step, dp_rank, n=4):
    g = torch.Generator().manual_seed(800 + step + 50 * dp_rank)
    ids = torch.randint(VOCAB, (n, 1), generator=g) + torch.arange(LENGTH + 1) * torch.randint(1, 5, (n, 1), generator=g)
    ids = ids % VOCAB
    counted = torch.rand(n, LENGTH, generator=g) < torch.linspace(0.3, 1.0, LENGTH)
    return ids[:, :-1], ids[:, 1:], counted


def masked_loss(logits, target, counted, mesh):
    per_token = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    local_sum = (per_token * counted.flatten()).sum()
    total = counted.sum().float()
    dist.all_reduce(total)
    return local_sum / (total / mesh.dp)


def reduce_gradients(model, mesh):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.grad_group)
        p.grad.div_(mesh.dp)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = Mesh(args.cp)
    model = LongModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    part = LENGTH // args.cp
    span = slice(mesh.cp_rank * part, (mesh.cp_rank + 1) * part)
    for step in range(args.steps):
        ids, target, counted = documents(step, mesh.dp_rank)
        logits = model(ids[:, span], span.start, lambda t: torch.cat(all_gather(t.contiguous()), dim=1))
        loss = masked_loss(logits, target[:, span], counted[:, span], mesh)
        optimizer.zero_grad()
        loss.backward()
        reduce_gradients(model, mesh)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step:2d} local loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
