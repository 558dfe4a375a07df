"""Answers in long documents, with context parallelism: every rank holds one part of each sequence.

The weights are replicated; DistributedDataParallel spans the context-parallel ranks as well.

    torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

VOCAB, DIM, HEADS, LENGTH = 36, 24, 3, 40


class Documents(Dataset):
    """Only the tokens of the answer count, and most answers stand near the end."""

    def __init__(self, n=96):
        g = torch.Generator().manual_seed(15)
        start = torch.randint(VOCAB, (n, 1), generator=g)
        step = torch.randint(1, 5, (n, 1), generator=g)
        self.tokens = (start + step * torch.arange(LENGTH + 1)) % VOCAB
        first = torch.randint(14, LENGTH - 4, (n, 1), generator=g)
        self.mask = torch.arange(LENGTH) >= first

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i, :-1], self.tokens[i, 1:], self.mask[i].float()


class AllParts(torch.autograd.Function):
    """The whole sequence from its parts; the gradient of a part is what all ranks send back for it."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None


class Reader(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.embed = nn.Embedding(VOCAB, DIM)
        self.place = nn.Embedding(LENGTH, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, VOCAB))

    def attend(self, x, place):
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = AllParts.apply(torch.cat([k, v], -1), self.group).chunk(2, -1)
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (q, k, v))
        causal = torch.arange(k.size(2)) <= place[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, tokens, place):
        x = self.embed(tokens) + self.place(place)
        x = x + self.attend(self.norm(x), place)
        return self.mlp(x)


def new_reader(group):
    torch.manual_seed(33)
    return Reader(group)


def part_of(batch, rank, size):
    n = LENGTH // size
    return [t[:, rank * n:(rank + 1) * n] for t in batch], torch.arange(rank * n, (rank + 1) * n)


def loss_sums(logits, target, mask):
    """The loss of the counted tokens of this part, added up, and how many they are."""
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (each * mask.flatten()).sum(), mask.sum()


def main(lr=0.2):
    dist.init_process_group("gloo")
    cp_group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(new_reader(cp_group))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step, batch in enumerate(DataLoader(Documents(), batch_size=6)):
        (tokens, target, mask), place = part_of(batch, rank, size)
        total, count = loss_sums(model(tokens, place), target, mask)
        dist.all_reduce(count, group=cp_group)
        loss = total * size / count.clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
