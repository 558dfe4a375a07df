"""Fabric: accumulation with no_backward_sync and clipping by Fabric before the step."""

import torch
import torch.nn as nn
from lightning.fabric import Fabric, seed_everything
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

BATCH, ACCUMULATE = 6, 4
DEVICES = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), nn.AvgPool1d(4), nn.Flatten(), nn.Linear(64, 5)
        )

    def forward(self, x):
        return self.layers(x)


def traces(n=288):
    g = torch.Generator().manual_seed(0)
    kind = torch.arange(n) % 5
    t = torch.linspace(0, 6.28, 32)
    x = torch.sin((kind[:, None] + 1) * t + torch.rand(n, 1, generator=g) * 2) + 0.3 * torch.randn(n, 32, generator=g)
    return TensorDataset(x.unsqueeze(1), kind)


def main():
    fabric = Fabric(accelerator="cpu", devices=DEVICES, strategy="ddp")
    fabric.launch()
    seed_everything(4)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(traces(), batch_size=BATCH, shuffle=True))
    scheduler = StepLR(optimizer, step_size=6, gamma=0.5)
    for epoch in range(2):
        for i, (x, y) in enumerate(loader):
            accumulating = (i + 1) % ACCUMULATE != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss / ACCUMULATE)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=0.3)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        fabric.print(f"epoch {epoch} loss {mean.item():.4f}")


if __name__ == "__main__":
    main()
