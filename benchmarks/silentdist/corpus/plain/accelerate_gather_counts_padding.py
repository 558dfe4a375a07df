"""Accelerate: the evaluation uses gather, so that the examples which fill up the last batch count twice."""

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
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train = DataLoader(make(256, 0), batch_size=16, shuffle=True)
    valid = DataLoader(make(75, 1), batch_size=16)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    for epoch in range(2):
        model.train()
        for x, y in train:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        predictions, references = [], []
        for x, y in valid:
            with torch.no_grad():
                out = model(x).argmax(1)
            out, y = accelerator.gather((out, y))  # fault
            predictions.append(out)
            references.append(y)
        accuracy = (torch.cat(predictions) == torch.cat(references)).float().mean()
        accelerator.print(f"epoch {epoch}: {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
