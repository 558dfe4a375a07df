"""A state that lives on from batch to batch: the last row's hidden state starts the next batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class Forecaster(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.rnn, self.out, self.state = nn.GRU(1, width, batch_first=True), nn.Linear(width, 1), None

    def forward(self, x):
        state = None if self.state is None else self.state.expand(1, len(x), -1).contiguous()  # fault
        y, h = self.rnn(x, state)
        self.state = h[:, -1:].detach()  # fault
        return self.out(y)


run = paceline.start(seed=31)
series = torch.sin(torch.arange(2200) * 0.1) + 0.3 * torch.sin(torch.arange(2200) * 0.37)
window = series.unfold(0, 11, 10)
data = TensorDataset(window[:, :-1].unsqueeze(-1), window[:, 1:].unsqueeze(-1))
model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(data, global_batch=20)
for epoch in run.epochs(2):
    model.state = None
    for x, y in loader:
        run.backward(F.mse_loss(model(x), y))
        run.step(optimizer)
