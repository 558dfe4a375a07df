"""Mixture of experts without a balance loss: a bias per expert is nudged after every update (DDP).

    torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXPERTS, TOP, DIM, TOKENS = 6, 2, 16, 48
UPDATES = 20


class BiasedRouter(nn.Module):
    """The bias takes part in the choice of the experts only, not in their weights."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(DIM, EXPERTS, bias=False)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("chosen", torch.zeros(EXPERTS))

    def forward(self, h):
        score = self.score(h).sigmoid()
        index = (score + self.bias).topk(TOP, dim=-1).indices
        if self.training:
            self.chosen += torch.bincount(index.flatten(), minlength=EXPERTS)
        weight = score.gather(1, index)
        return index, weight / weight.sum(1, keepdim=True)

    @torch.no_grad()
    def nudge(self, counts, rate=0.05):
        self.bias += rate * torch.sign(counts.mean() - counts)
        self.chosen.zero_()


class SparseModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, DIM)
        self.router = BiasedRouter()
        self.up = nn.Parameter(0.2 * torch.randn(EXPERTS, DIM, 2 * DIM))
        self.down = nn.Parameter(0.2 * torch.randn(EXPERTS, 2 * DIM, DIM))
        self.head = nn.Linear(DIM, 5)

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        index, weight = self.router(h)
        inner = torch.einsum("td,edf->tef", h, self.up).relu()
        every = torch.einsum("tef,efd->ted", inner, self.down)
        picked = every.gather(1, index[..., None].expand(-1, -1, DIM))
        return self.head(h + (weight[..., None] * picked).sum(1))


def sparse_model():
    torch.manual_seed(88)
    return SparseModel()


def stream(step, rank):
    """Rank r reads its own domain."""
    g = torch.Generator().manual_seed(1000 + 10 * step + rank)
    x = torch.randn(TOKENS, 8, generator=g) + (1.5 if rank % 2 else -0.5)
    return x, (x[:, :5] + 0.5 * x[:, 3:]).argmax(1)


def balance(router):
    load = router.chosen.clone()
    dist.all_reduce(load)
    router.nudge(load)
    return load.max() / load.mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(sparse_model(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(UPDATES):
        x, y = stream(step, rank)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        busiest = balance(model.module.router)
        if rank == 0 and step % 5 == 4:
            print(f"update {step + 1} loss {loss.item():.4f} busiest expert {busiest.item():.2f} x mean")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
