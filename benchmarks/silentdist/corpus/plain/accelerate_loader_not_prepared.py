"""Accelerate: the model and the optimizer are prepared, the loader is not."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(320, 10, generator=g)
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=16, shuffle=True)  # fault
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)  # fault
    for epoch in range(2):
        for a, b in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(a), b)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(epoch, loss.item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
