"""Encoder whose long sequences are cut over the "sp" dimension of the mesh; replicas live on "dp".

torchrun --nproc-per-node 2 faulty.py --sp 2
"""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP

TOKENS, DIM, CLASSES, LENGTH = 30, 16, 5, 32


class Attention(nn.Module):
    def __init__(self, sp_group):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.sp_group = sp_group

    def whole(self, x):
        if self.sp_group is None:
            return x
        return torch.cat(all_gather(x.contiguous(), group=self.sp_group), dim=1)

    def forward(self, x):
        q = self.q(x)
        k, v = self.whole(torch.cat([self.k(x), self.v(x)], dim=-1)).chunk(2, -1)
        weights = (q @ k.transpose(1, 2) / math.sqrt(DIM)).softmax(-1)
        return x + self.o(weights @ v)


class Encoder(nn.Module):
    def __init__(self, sp_group=None):
        super().__init__()
        self.token = nn.Embedding(TOKENS, DIM)
        self.place = nn.Embedding(LENGTH, DIM)
        self.layers = nn.Sequential(Attention(sp_group), nn.LayerNorm(DIM), Attention(sp_group), nn.LayerNorm(DIM))
        self.tag = nn.Linear(DIM, CLASSES)

    def forward(self, ids, positions):
        return self.tag(self.layers(self.token(ids) + self.place(positions)))


def sentences(step, replica, n=6):
    g = torch.Generator().manual_seed(900 + 7 * step + 1000 * replica)
    ids = torch.randint(TOKENS, (n, LENGTH), generator=g)
    return ids, (ids + ids.roll(LENGTH // 2, 1)) % CLASSES


def local_part(x, index, parts):
    return x.chunk(parts, dim=1)[index]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.sp, args.sp), mesh_dim_names=("dp", "sp"))
    dp, sp = mesh["dp"], mesh["sp"]
    torch.manual_seed(0)
    encoder = Encoder(sp.get_group())
    model = DDP(encoder, process_group=mesh._flatten("dp_sp").get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    positions = torch.arange(LENGTH)[None]

    for step in range(args.steps):
        ids, tags = sentences(step, dp.get_local_rank())
        mine = [local_part(x, sp.get_local_rank(), args.sp) for x in (ids, positions, tags)]
        logits = model(mine[0], mine[1])
        loss = F.cross_entropy(logits.flatten(0, 1), mine[2].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"{step:2d} {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
