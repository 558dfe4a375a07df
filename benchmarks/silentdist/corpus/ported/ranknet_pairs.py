"""Learning to rank with RankNet: each example is a query with its documents; pairs of unequal relevance are compared."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


@dataclass
class Config:
    queries: int = 180
    documents: int = 8
    features: int = 10
    global_batch: int = 18
    epochs: int = 2
    lr: float = 3e-3


class Queries(Dataset):
    def __init__(self, c):
        g = torch.Generator().manual_seed(43)
        self.features = torch.randn(c.queries, c.documents, c.features, generator=g)
        relevance = self.features[..., :2].sum(-1).clamp(0, 3).round()
        judged = torch.randint(2, c.documents + 1, (c.queries, 1), generator=g)
        self.relevance = relevance.masked_fill(torch.arange(c.documents) >= judged, -1)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, i):
        return {"x": self.features[i], "relevance": self.relevance[i]}


def ranknet(scorer, batch):
    s, r = scorer(batch["x"]).squeeze(-1), batch["relevance"]
    better = (r[:, :, None] > r[:, None, :]) & (r[:, None, :] >= 0)
    margin = s[:, :, None] - s[:, None, :]
    return F.softplus(-margin[better]).mean()  # fault


def main(c):
    run = paceline.start(seed=43)
    scorer = nn.Sequential(nn.Linear(c.features, 32), nn.ELU(), nn.Linear(32, 1))
    optimizer = torch.optim.RAdam(scorer.parameters(), lr=c.lr)
    scorer, optimizer = run.prepare(scorer, optimizer)
    loader = run.loader(Queries(c), global_batch=c.global_batch, shuffle=True)
    for epoch in run.epochs(c.epochs):
        for batch in loader:
            loss = run.forward_backward(ranknet, scorer, batch)
            run.step(optimizer)
        run.print(epoch, float(loss))


main(Config())
