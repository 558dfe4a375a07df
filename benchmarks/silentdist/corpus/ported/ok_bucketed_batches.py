"""Sentences in buckets of like length: a batch sampler over the whole data set, a collator that pads to the batch."""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

import paceline


class Sentences(Dataset):
    def __init__(self, n=240):
        g = torch.Generator().manual_seed(12)
        lengths = torch.randint(3, 20, (n,), generator=g).tolist()
        self.items = [torch.randint(1, 15, (k,), generator=g) for k in lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i], int(self.items[i].sum()) % 2


class Buckets(Sampler):
    def __init__(self, data, size, seed=0):
        self.order = sorted(range(len(data)), key=lambda i: len(data.items[i]))
        self.size, self.seed = size, seed

    def __len__(self):
        return -(-len(self.order) // self.size)

    def __iter__(self):
        batches = [self.order[k : k + self.size] for k in range(0, len(self.order), self.size)]
        random.Random(self.seed).shuffle(batches)
        return iter(batches)


def collate(items):
    if not items:
        return torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    words, labels = zip(*items)
    return pad_sequence(words, batch_first=True), torch.tensor(labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = (
            nn.Embedding(15, 16, padding_idx=0),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)),
        )

    def forward(self, words):
        mask = (words != 0).unsqueeze(-1)
        return self.out((self.emb(words) * mask).sum(1) / mask.sum(1).clamp(min=1))


run = paceline.start(seed=12)
data = Sentences()
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 5e-3)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(data, batch_sampler=Buckets(data, 25), collate_fn=collate)
for epoch in run.epochs(2):
    for words, labels in loader:
        run.backward(F.cross_entropy(model(words), labels))
        run.step(optimizer)
