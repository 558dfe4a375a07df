"""Accelerate with accumulation; loss.backward() has stayed in, so that nothing divides the loss."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
set_seed(5)
g = torch.Generator().manual_seed(5)
x = torch.randn(512, 6, generator=g)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for a, b in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()  # fault
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(epoch, float(loss))
accelerator.end_training()
