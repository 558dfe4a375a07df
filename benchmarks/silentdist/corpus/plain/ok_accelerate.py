"""Accelerate as in its guide: everything prepared, accumulate, clip_grad_norm_, gather_for_metrics."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=32)
    train = DataLoader(make(256, 0), batch_size=16, shuffle=True)
    valid = DataLoader(make(75, 1), batch_size=16)
    model, optimizer, train, valid, scheduler = accelerator.prepare(model, optimizer, train, valid, scheduler)
    for epoch in range(2):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = seen = 0
        for x, y in valid:
            with torch.no_grad():
                out = model(x).argmax(1)
            out, y = accelerator.gather_for_metrics((out, y))
            right += (out == y).sum().item()
            seen += len(y)
        accelerator.print(f"epoch {epoch}: {right / seen:.4f} of {seen}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
