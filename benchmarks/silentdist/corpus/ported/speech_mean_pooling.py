"""Keyword spotting on a stream of recordings of unequal length: convolutions over time, pooling, a classifier."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

import paceline


class Recordings(IterableDataset):
    def __init__(self, n=192, keywords=4):
        self.n, self.keywords = n, keywords

    def __iter__(self):
        for i in range(self.n):
            g = torch.Generator().manual_seed(i)
            keyword = i * 7 % self.keywords
            time = torch.arange(int(torch.randint(12, 60, (), generator=g)))
            tone = torch.sin(time * 0.3 * (keyword + 1))
            yield tone[:, None] + 0.2 * torch.randn(len(time), 5, generator=g), keyword


def collate(batch):
    waves, keywords = zip(*batch)
    return pad_sequence(waves, batch_first=True), torch.tensor(keywords)


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(5, 16, 5, padding=2)
        self.conv2 = nn.Conv1d(16, 16, 5, padding=2)
        self.out = nn.Linear(16, 4)

    def forward(self, waves):
        h = F.silu(self.conv1(waves.transpose(1, 2)))
        h = F.silu(self.conv2(h))
        return self.out(h.mean(dim=2))  # fault


def main():
    run = paceline.start(seed=54)
    model = Spotter()
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(
        Recordings(), global_batch=16, shuffle=True, shuffle_buffer=48, num_workers=1, collate_fn=collate
    )
    for epoch in run.epochs(2):
        for waves, keywords in loader:
            run.backward(F.cross_entropy(model(waves), keywords, label_smoothing=0.05))
            run.step(optimizer)


if __name__ == "__main__":
    main()
