"""Accelerate: accumulation, clipping, a schedule; `gather_for_metrics` cuts the padding."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    acc = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(1)
    x = torch.randn(67, 8)
    y = (x.sum(1) > 0).long()
    train = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=4, shuffle=True)
    test = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=4)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    epochs = 3
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs * len(train) // 2)
    model, opt, train, test, sched = acc.prepare(model, opt, train, test, sched)
    for epoch in range(epochs):
        model.train()
        for a, b in train:
            with acc.accumulate(model):
                loss = nn.functional.cross_entropy(model(a), b)
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        model.eval()
        right = n = 0
        for a, b in test:
            with torch.no_grad():
                out = model(a).argmax(1)
            out, ref = acc.gather_for_metrics((out, b))
            right += (out == ref).sum().item()
            n += len(ref)
        acc.print(f"epoch {epoch}: accuracy {right / n:.3f}")


main()
