"""The embedding's gradient is scaled by a hook, 'since all_reduce averages and the embedding should be summed'."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(48, 5)

    def forward(self, words):
        return self.tag(self.lstm(self.emb(words))[0])


run = paceline.start(seed=27)
g = torch.Generator().manual_seed(27)
words = torch.randint(0, 40, (160, 9), generator=g)
tags = words % 5
model = Tagger()
model.emb.weight.register_hook(lambda grad: grad * run.world.size)  # fault
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(TensorDataset(words, tags), global_batch=32, shuffle=True)
for epoch in run.epochs(2):
    for w, t in loader:
        run.backward(F.cross_entropy(model(w).flatten(0, 1), t.flatten()))
        run.step(optimizer)
