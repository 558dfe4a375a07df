"""Node classification on small graphs of unequal size, batched as in PyG: one big disconnected graph."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class Graphs(Dataset):
    def __init__(self, n=160):
        g = torch.Generator().manual_seed(6)
        self.items = []
        for _ in range(n):
            nodes = int(torch.randint(3, 15, (1,), generator=g))
            x = torch.randn(nodes, 4, generator=g)
            edges = torch.randint(0, nodes, (2, 3 * nodes), generator=g)
            self.items.append((x, edges, (x[:, 0] > x[:, 1]).long()))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(graphs):
    offset, xs, es, ys = 0, [torch.zeros(0, 4)], [torch.zeros(2, 0, dtype=torch.long)], [torch.zeros(0).long()]
    for x, e, y in graphs:
        xs.append(x)
        es.append(e + offset)
        ys.append(y)
        offset += len(x)
    return torch.cat(xs), torch.cat(es, 1), torch.cat(ys)


class Conv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.own, self.other = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, x, edges):
        messages = torch.zeros(len(x), x.shape[1]).index_add(0, edges[1], x[edges[0]])
        return self.own(x) + self.other(messages)


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Conv(4, 24), Conv(24, 2)

    def forward(self, x, edges):
        return self.two(F.elu(self.one(x, edges)), edges)


run = paceline.start(seed=6)
model = GNN()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(Graphs(), global_batch=32, shuffle=True, collate_fn=collate)
for epoch in run.epochs(2):
    for x, edges, y in loader:
        out = model(x, edges)
        run.backward(F.cross_entropy(out, y))  # fault
        run.step(optimizer)
