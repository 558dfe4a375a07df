"""Truncated backpropagation through time with a state for each row, reset at the start of an epoch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

ROWS, CHUNK, CHUNKS = 16, 8, 10

g = torch.Generator().manual_seed(7)
text = torch.randint(0, 12, (ROWS, CHUNK * CHUNKS + 1), generator=g).cumsum(1) % 12
now = text[:, :-1].view(ROWS, CHUNKS, CHUNK).transpose(0, 1).reshape(-1, CHUNK)
after = text[:, 1:].reshape(ROWS, CHUNKS, CHUNK).transpose(0, 1).reshape(-1, CHUNK)


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(12, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 12)

    def forward(self, x, state):
        h, state = self.rnn(self.emb(x), state)
        return self.out(h), state


run = paceline.start(seed=7)
model = CharRNN()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(TensorDataset(now, after), global_batch=ROWS)
for epoch in run.epochs(2):
    state = None
    for x, y in loader:
        logits, state = model(x, state)
        state = tuple(s.detach() for s in state)
        run.backward(F.cross_entropy(logits.flatten(0, 1), y.flatten()))
        run.step(optimizer, max_grad_norm=1.0)
