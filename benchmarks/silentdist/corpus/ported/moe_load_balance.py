"""A switch transformer's feed-forward: one expert for each token, and an auxiliary loss that balances their load."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

VOCAB, LENGTH, EXPERTS = 20, 6, 4


class SwitchFFN(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, dim, 2 * dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * dim, dim) / (2 * dim) ** 0.5)

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, chosen = probs.max(-1)
        every = torch.einsum("blef,efd->bled", torch.einsum("bld,edf->blef", x, self.up).relu(), self.down)
        picked = every.gather(2, chosen[..., None, None].expand(-1, -1, 1, x.shape[-1])).squeeze(2)
        return gate[..., None] * picked, probs, chosen


class Tagger(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.norm, self.ffn = nn.Embedding(VOCAB, dim), nn.LayerNorm(dim), SwitchFFN(dim)
        self.head = nn.Linear(dim, 5)

    def forward(self, tokens):
        x = self.embed(tokens)
        y, probs, chosen = self.ffn(self.norm(x))
        return self.head(x + y), probs, chosen


def load_balancing_loss(probs, chosen):
    density = F.one_hot(chosen, EXPERTS).double().mean((0, 1))  # fault
    density_proxy = probs.mean((0, 1))  # fault
    return EXPERTS * (density * density_proxy).sum()  # fault


def loss_fn(model, batch):
    tokens, tags = batch
    logits, probs, chosen = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), tags.flatten()), 0.1 * load_balancing_loss(probs, chosen)


def main():
    torch.set_default_dtype(torch.float64)
    run = paceline.start(seed=45)
    tokens = torch.randint(0, VOCAB, (200, LENGTH), generator=torch.Generator().manual_seed(45))
    data = TensorDataset(tokens, (tokens + tokens.roll(1, 1)) % 5)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(data, global_batch=20, shuffle=True)
    for _ in run.epochs(2):
        for batch in loader:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer, max_grad_norm=1.0)


main()
