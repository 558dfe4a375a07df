import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCAB, DIM, EXPERTS, SEQ = 48, 24, 4, 16
ACCUM, UPDATES, AUX_COEF = 4, 10, 0.05


class SparseMLP(nn.Module):
    """Top-1 routed experts; keeps the balance term of each sequence."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.w1 = nn.Parameter(0.2 * torch.randn(EXPERTS, DIM, 2 * DIM))
        self.w2 = nn.Parameter(0.2 * torch.randn(EXPERTS, 2 * DIM, DIM))

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        weight, chosen = probs.max(-1)
        one_hot = F.one_hot(chosen, EXPERTS).to(x.dtype)
        hidden = torch.relu(torch.einsum("btd,edh->bteh", x, self.w1))
        mixed = torch.einsum("bteh,ehd,bte->btd", hidden, self.w2, one_hot)
        balance = EXPERTS * (one_hot.mean(1) * probs.mean(1)).sum(-1)
        return x + weight[..., None] * mixed, balance.mean()


class MoELM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(SparseMLP() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x.cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None]
        aux = 0.0
        for block in self.blocks:
            x, balance = block(x)
            aux = aux + balance
        return self.head(x), aux


def make_model():
    torch.manual_seed(77)
    return MoELM()


def micro_batches(update, rank):
    out = []
    for m in range(ACCUM):
        g = torch.Generator().manual_seed(update * 1000 + rank * 100 + m)
        tokens = torch.randint(0, VOCAB, (4, SEQ + 1), generator=g)
        keep = torch.arange(SEQ) < torch.randint(3, SEQ + 1, (4, 1), generator=g)
        out.append((tokens, keep))
    return out


def accumulate(model, batches, world):
    supervised = torch.stack([keep.sum() for _, keep in batches]).sum()
    dist.all_reduce(supervised)
    shown = 0.0
    for k, (tokens, keep) in enumerate(batches):
        model.require_backward_grad_sync = k == len(batches) - 1
        logits, aux = model(tokens[:, :-1])
        nll = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        lm = (nll * keep).sum() * world / supervised
        total = lm + AUX_COEF * aux
        total.backward()
        shown += lm.item()
    return shown


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    optim = torch.optim.SGD(model.parameters(), lr=0.2)
    for update in range(UPDATES):
        optim.zero_grad()
        value = accumulate(model, micro_batches(update, rank), world)
        optim.step()
        if rank == 0:
            print(f"update {update}: lm {value:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
