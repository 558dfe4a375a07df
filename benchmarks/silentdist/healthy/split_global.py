"""Accelerate with split_batches: the batch size of the loader is that of all processes together."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from sklearn.datasets import load_diabetes
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

TOTAL_BATCH = 32
EPOCHS = 2


def main():
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    )
    set_seed(19)
    table = load_diabetes()
    x, y = torch.tensor(table.data).float() * 20, torch.tensor(table.target).float() / 80 - 2
    train = DataLoader(TensorDataset(x[:384], y[:384]), batch_size=TOTAL_BATCH, shuffle=True, drop_last=True)
    valid = DataLoader(TensorDataset(x[384:], y[384:]), batch_size=TOTAL_BATCH)
    model = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=EPOCHS * len(train))
    model, optimizer, train, valid, scheduler = accelerator.prepare(model, optimizer, train, valid, scheduler)
    for epoch in range(EPOCHS):
        model.train()
        for a, b in train:
            loss = nn.functional.huber_loss(model(a), b)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        errors = []
        for a, b in valid:
            with torch.no_grad():
                errors.append(accelerator.gather_for_metrics((model(a) - b).abs()))
        errors = torch.cat(errors)
        accelerator.print(f"epoch {epoch} rows {len(a)} validation {errors.mean().item():.4f} over {len(errors)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
