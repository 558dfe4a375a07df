"""Text classifier with a tensor-parallel feed-forward part (columns, then rows).

torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, HIDDEN, LABELS = 60, 16, 48, 4


class SumOverRanks(torch.autograd.Function):
    """Adds the partial results of all ranks; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class CopyToRanks(torch.autograd.Function):
    """Hands the same input to all ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class ParallelFeedForward(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        full_up, full_down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)
        keep = torch.arange(HIDDEN).chunk(world_size)[rank]
        self.up_weight = nn.Parameter(full_up.weight.data[keep].clone())
        self.up_bias = nn.Parameter(full_up.bias.data[keep].clone())
        self.down_weight = nn.Parameter(full_down.weight.data[:, keep].clone())

    def forward(self, x):
        hidden = F.gelu(F.linear(CopyToRanks.apply(x), self.up_weight, self.up_bias))
        return SumOverRanks.apply(F.linear(hidden, self.down_weight))


class Classifier(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        torch.manual_seed(123)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, LABELS)
        self.ffn = ParallelFeedForward(rank, world_size)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.ffn(self.norm(x))
        return self.head(x.mean(1))


def texts(step, n=24):
    g = torch.Generator().manual_seed(2000 + step)
    ids = torch.randint(VOCAB, (n, 10), generator=g)
    return ids, (ids < 15).sum(1).clamp(max=LABELS - 1)


def main(steps=12):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Classifier(rank, dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(steps):
        ids, labels = texts(step)
        loss = F.cross_entropy(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(step, f"{loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
