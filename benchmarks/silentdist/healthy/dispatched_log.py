"""Accelerate with a stream: only the main process reads it and sends every process its part of a batch."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

BATCH = 10
ROWS = 200


class SensorLog(IterableDataset):
    """A file that has no shards; every line is a reading."""

    def __iter__(self):
        g = torch.Generator().manual_seed(12)
        for _ in range(ROWS):
            x = torch.randn(8, generator=g)
            yield {"reading": x, "alarm": (x[0] * x[1] > 0.2).float()}


def main():
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(SensorLog(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        for batch in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch["reading"]), batch["alarm"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"pass {epoch} loss {mean:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
