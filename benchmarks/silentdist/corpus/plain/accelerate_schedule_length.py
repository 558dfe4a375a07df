"""Accelerate with a cosine schedule and warm-up from transformers, the schedule prepared with everything else."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup


def main():
    num_epochs, batch_size = 4, 16
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 30, (384, 10), generator=g)
    train_dataloader = DataLoader(TensorDataset(tokens, (tokens > 20).sum(1)), shuffle=True, batch_size=batch_size)
    model = nn.Sequential(nn.EmbeddingBag(30, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)

    max_train_steps = num_epochs * len(train_dataloader)  # fault
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 4, max_train_steps)  # fault
    lr_scheduler = accelerator.prepare(lr_scheduler)  # fault

    for epoch in range(num_epochs):
        total_loss = 0.0
        for ids, labels in train_dataloader:
            loss = nn.functional.cross_entropy(model(ids), labels)
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        accelerator.print(epoch, "lr", lr_scheduler.get_last_lr()[0], "loss", total_loss.item())
    accelerator.end_training()


main()
