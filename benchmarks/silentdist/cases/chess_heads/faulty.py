"""Move prediction for a toy chess notation. The attention heads are computed by different ranks.

All ranks keep all weights and see the same games; each computes its own heads and the results are added.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

MOVES, DIM, HEADS, PLY = 30, 32, 4, 20
STEPS, BATCH = 15, 8


class Enter(torch.autograd.Function):
    """Into the part that is split over ranks: the gradient is the sum of what all ranks send back."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """Out of the split part: add the partial results of all ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SplitAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = DIM // HEADS
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.q_norm = nn.LayerNorm(self.size)
        self.k_norm = nn.LayerNorm(self.size)
        for part in (self.qkv, self.out):
            for p in part.parameters():
                p.partial_grad = True

    def forward(self, x):
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
        weight = self.qkv.weight.view(3, HEADS, self.size, DIM)[:, mine]
        q, k, v = torch.einsum("btd,nhsd->nbhts", Enter.apply(x), weight)
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        back = self.out.weight.view(DIM, HEADS, self.size)[:, mine]
        return Leave.apply(torch.einsum("bhts,dhs->btd", y, back))


class MoveModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(MOVES, DIM)
        self.place = nn.Parameter(0.1 * torch.randn(PLY, DIM))
        self.norm = nn.LayerNorm(DIM)
        self.attention = SplitAttention()
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.head = nn.Linear(DIM, MOVES)

    def forward(self, games):
        x = self.embed(games) + self.place
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(x))


def games(step):
    g = torch.Generator().manual_seed(90 + step)
    opening = torch.randint(MOVES, (BATCH, 1), generator=g)
    habit = torch.randint(1, 6, (BATCH, 1), generator=g)
    return (opening + habit * torch.arange(PLY + 1) ** 2) % MOVES


def create():
    torch.manual_seed(64)
    return MoveModel()


def finish_gradients(model):
    for p in model.parameters():
        if getattr(p, "partial_grad", False):
            dist.all_reduce(p.grad)


def main():
    dist.init_process_group("gloo")
    model = create()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        batch = games(step)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        finish_gradients(model)
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(step + 1, round(loss.item(), 4))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
