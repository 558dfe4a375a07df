"""A GRU language model on sentences of unequal length, padded with 0."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

PAD, VOCAB, LENGTH = 0, 29, 24


def sentences(count=300):
    g = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, VOCAB, (count, LENGTH), generator=g)
    lengths = torch.randint(3, LENGTH + 1, (count,), generator=g)
    tokens[torch.arange(LENGTH)[None, :] >= lengths[:, None]] = PAD
    return TensorDataset(tokens)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 32)
        self.gru = nn.GRU(32, 48, batch_first=True)
        self.out = nn.Linear(48, VOCAB)

    def forward(self, x):
        return self.out(self.gru(self.emb(x))[0])


run = paceline.start(seed=3)
model = LM()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
model, opt = run.prepare(model, opt)
loader = run.loader(sentences(), global_batch=48, shuffle=True)

for epoch in run.epochs(2):
    for (tokens,) in loader:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)
        run.backward(loss)  # fault
        run.step(opt)
