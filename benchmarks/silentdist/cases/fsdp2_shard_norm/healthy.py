"""Sequence tagger sharded with fully_shard, own optimizer wrapper with clipping."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TAGS, WORDS, DIM = 7, 60, 32


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 2, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.tags = nn.Linear(DIM, TAGS)

    def forward(self, ids):
        h = self.words(ids)
        for layer in self.encoder:
            h = layer(h)
        return self.tags(h)


def new_tagger():
    torch.manual_seed(10)
    return Tagger()


def corpus(step, rank, rows=8, length=12):
    g = torch.Generator().manual_seed(step * 50 + rank)
    ids = torch.randint(0, WORDS, (rows, length), generator=g)
    return ids, (ids + ids.roll(1, 1)) % TAGS


class ClippedOptimizer:
    def __init__(self, model, lr, max_norm):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.opt = torch.optim.SGD(self.params, lr=lr, momentum=0.9)
        self.max_norm = max_norm

    @torch.no_grad()
    def clip(self):
        shards = [p.grad.to_local() for p in self.params if p.grad is not None]
        square = torch.stack([s.square().sum() for s in shards]).sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for s in shards:
            s.mul_(scale)
        return norm

    def step(self):
        norm = self.clip()
        self.opt.step()
        self.opt.zero_grad()
        return norm.item()


def shard(model, world):
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.encoder:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(steps=12, lr=0.2, max_norm=0.5):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = shard(new_tagger(), dist.get_world_size())
    optimizer = ClippedOptimizer(model, lr, max_norm)
    for step in range(steps):
        ids, tags = corpus(step, rank)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
        loss.backward()
        norm = optimizer.step()
        if rank == 0:
            print(f"{step:2d} loss {loss.item():.4f} grad norm {norm:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
