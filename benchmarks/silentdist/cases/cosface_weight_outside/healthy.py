import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

IDENTITIES, EMBED = 8, 16


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 48), nn.PReLU(), nn.Linear(48, EMBED))

    def forward(self, x):
        return F.normalize(self.layers(x), dim=1)


class CosFace(nn.Module):
    def __init__(self, scale=16.0, margin=0.2):
        super().__init__()
        self.scale, self.margin = scale, margin
        self.W = nn.Parameter(torch.randn(IDENTITIES, EMBED) * 0.1)

    def forward(self, embeddings, who):
        cosine = embeddings @ F.normalize(self.W, dim=1).T
        shifted = cosine - self.margin * F.one_hot(who, IDENTITIES)
        return F.cross_entropy(self.scale * shifted, who)


def faces(n=192):
    g = torch.Generator().manual_seed(33)
    who = torch.randint(0, IDENTITIES, (n,), generator=g)
    centres = torch.randn(IDENTITIES, 20, generator=g)
    return TensorDataset(centres[who] + 0.5 * torch.randn(n, 20, generator=g), who)


def make_modules():
    torch.manual_seed(14)
    return Backbone(), CosFace()


def make_loader(rank, world):
    data = faces()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=0)
    return DataLoader(data, batch_size=12, sampler=sampler, drop_last=True)


def train():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backbone, loss_fn = make_modules()
    backbone, loss_fn = DDP(backbone), DDP(loss_fn)
    optimizer = torch.optim.SGD([
        {"params": backbone.parameters(), "lr": 0.1},
        {"params": loss_fn.parameters(), "lr": 0.5},
    ], momentum=0.9)
    loader = make_loader(rank, world)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, who in loader:
            loss = loss_fn(backbone(x), who)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} loss {shown.item() / world:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.barrier()
    dist.destroy_process_group()
