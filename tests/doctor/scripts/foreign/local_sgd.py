"""Accelerate's LocalSGD: ranks step by themselves, and `p.data = mean` puts the mean of their weights back."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    acc = Accelerator(cpu=True)
    set_seed(1)
    x = torch.randn(96, 16)
    y = (x.sum(1) > 0).long()
    train = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, opt, train = acc.prepare(model, opt, train)
    for epoch in range(3):
        with LocalSGD(accelerator=acc, model=model, local_sgd_steps=3, enabled=True) as local_sgd:
            for a, b in train:
                with acc.accumulate(model):
                    acc.backward(nn.functional.cross_entropy(model(a), b))
                    opt.step()
                    opt.zero_grad()
                    local_sgd.step()
        acc.print(f"epoch {epoch} ends")


main()
