"""Accelerate: the main process watches the mean loss and asks all of them to stop."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
LIMIT = 0.12


class EarlyStoppingCallback:
    def __init__(self, limit, patience):
        self.limit, self.patience, self.count = limit, patience, 0

    def check(self, loss):
        self.count = self.count + 1 if loss < self.limit else 0
        return self.count >= self.patience


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(320, 9, generator=g)
    y = (x[:, :3].sum(1) > x[:, 3:6].sum(1)).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    model = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    stopper = EarlyStoppingCallback(LIMIT, patience=2)
    step, epoch, stopped = 0, 0, False
    while epoch < 2 and not stopped:
        for a, b in loader:
            loss = nn.functional.cross_entropy(model(a), b)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            if accelerator.is_main_process and stopper.check(mean.item()):
                accelerator.set_trigger()
            if accelerator.check_trigger():
                stopped = True
                break
        epoch += 1
    accelerator.print(f"{step} steps in {epoch} epochs, stopped early: {stopped}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
