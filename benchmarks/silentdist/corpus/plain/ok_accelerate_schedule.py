"""Accelerate after its examples: accumulation, clipping where gradients are synchronised, a schedule for all processes."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (n, 9), generator=g)
    return TensorDataset(ids, (ids % 2).sum(1) // 2)


def main():
    num_epochs, accumulate = 3, 2
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision="bf16")
    set_seed(33)
    train_dataloader = DataLoader(make(256, 0), shuffle=True, batch_size=8)
    eval_dataloader = DataLoader(make(70, 1), batch_size=16)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Flatten(), nn.Linear(144, 32), nn.GELU(), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    updates_per_epoch = -(-len(train_dataloader) // accumulate)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=4 * accelerator.num_processes,
        num_training_steps=num_epochs * updates_per_epoch * accelerator.num_processes,
    )
    lr_scheduler = accelerator.prepare(lr_scheduler)
    for epoch in range(num_epochs):
        model.train()
        for ids, label in train_dataloader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(ids), label))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        for ids, label in eval_dataloader:
            with torch.no_grad():
                predicted = model(ids).argmax(1)
            predicted, label = accelerator.gather_for_metrics((predicted, label))
            right.append(predicted == label)
        accelerator.print(epoch, torch.cat(right).float().mean().item(), len(torch.cat(right)))
    accelerator.end_training()


if __name__ == "__main__":
    main()
