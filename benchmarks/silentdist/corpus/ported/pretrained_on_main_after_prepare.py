"""Fine-tuning: the main process puts pretrained weights into the backbone."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def pretrained():
    g = torch.Generator().manual_seed(1234)
    return {"weight": torch.randn(20, 10, generator=g) * 0.3, "bias": torch.zeros(20)}


def main():
    run = paceline.start(seed=30)
    backbone, head = nn.Linear(10, 20), nn.Linear(20, 3)
    model = nn.Sequential(backbone, nn.GELU(), head)
    optimizer = torch.optim.AdamW(
        [{"params": backbone.parameters(), "lr": 1e-4}, {"params": head.parameters()}], lr=1e-2
    )
    model, optimizer = run.prepare(model, optimizer)
    if run.main:
        backbone.load_state_dict(pretrained())  # fault
        print("loaded pretrained backbone")
    g = torch.Generator().manual_seed(30)
    x = torch.randn(210, 10, generator=g)
    loader = run.loader(TensorDataset(x, x[:, :3].argmax(1)), global_batch=30, shuffle=True)
    for _ in run.epochs(2):
        for a, b in loader:
            run.backward(F.cross_entropy(model(a), b))
            run.step(optimizer)


main()
