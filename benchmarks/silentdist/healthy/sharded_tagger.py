"""Transformer sharded block by block with fully_shard; gradients are clipped by their norm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCAB, DIM, STEPS = 45, 24, 15


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 50), nn.GELU(), nn.Linear(50, DIM))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(DIM, 7)

    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return self.out(h)


def batch(step, rank):
    g = torch.Generator().manual_seed(step * 1009 + rank)
    ids = torch.randint(0, VOCAB, (6, 10), generator=g)
    return ids, (ids + ids.roll(1, 1)) % 7


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        ids, tags = batch(step, rank)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
        optim.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.4)
        optim.step()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {loss.item():.4f} norm {norm.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
