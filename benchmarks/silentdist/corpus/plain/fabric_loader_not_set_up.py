"""Lightning Fabric: setup() for the model and the optimizer, the loader as it is."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    g = torch.Generator().manual_seed(0)
    x = torch.rand(320, 1, 8, 8, generator=g)
    data = TensorDataset(x, x.flatten(1)[:, :5].argmax(1))
    loader = DataLoader(data, batch_size=20, shuffle=True)  # fault
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    for epoch in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
        fabric.print(epoch, loss.item())


if __name__ == "__main__":
    main()
