"""A CNN with biases before batch norm, a log file for each rank, progress by the main process."""

import json
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def main():
    run = paceline.start(seed=1)
    log = Path(tempfile.mkdtemp()) / f"rank{run.world.rank}.jsonl"
    digits = load_digits()
    images = torch.tensor(digits.images[:400], dtype=torch.float32).unsqueeze(1) / 16
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Linear(24, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    loader = run.loader(TensorDataset(images, torch.tensor(digits.target[:400])), global_batch=40, shuffle=True)
    for epoch in run.epochs(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.step(optimizer)
            with log.open("a") as file:
                file.write(json.dumps({"rank": run.world.rank, "step": run.steps, "loss": float(loss)}) + "\n")
        if run.main:
            torch.save(model, log.with_suffix(".pt"))


main()
