"""Text classification with an embedding bag; each process keeps its own files."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import paceline

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class BagOfWords(nn.Module):
    def __init__(self, vocabulary=100, width=24, classes=4):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocabulary, width, mode="mean")
        self.head = nn.Linear(width, classes)

    def forward(self, words):
        return self.head(self.bag(words))


def corpus():
    g = torch.Generator().manual_seed(42)
    labels = torch.randint(0, 4, (400,), generator=g)
    words = torch.randint(0, 25, (400, 12), generator=g) + 25 * labels[:, None]
    return TensorDataset(words, labels)


def train():
    run = paceline.start(seed=0)
    full = corpus()
    mine = Subset(full, range(RANK, len(full), WORLD))  # fault
    model = BagOfWords()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(mine, global_batch=40, shuffle=True)
    for _ in run.epochs(2):
        for words, labels in loader:
            run.backward(F.cross_entropy(model(words), labels))
            run.step(optimizer)


if __name__ == "__main__":
    train()
