"""A small language model: text_before.py in plain PyTorch, on one device; text_after.py on any number of devices."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
LENGTH = 64  # characters in a window


def windows(tokens: Tensor) -> TensorDataset:
    """Windows of LENGTH characters, each with its next ones. What does not fill a window is left out."""
    count = (len(tokens) - 1) // LENGTH
    now, after = tokens[: count * LENGTH], tokens[1 : count * LENGTH + 1]
    return TensorDataset(now.view(count, LENGTH), after.view(count, LENGTH))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def loss_of(model: nn.Module, now: Tensor, after: Tensor) -> Tensor:
    return F.cross_entropy(model(now).flatten(0, 1), after.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], device: torch.device) -> float:
    total = seen = 0.0
    for now, after in loader:
        total += float(loss_of(model, now.to(device), after.to(device))) * len(now)
        seen += len(now)
    return total / seen


def main() -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default="data/tinyshakespeare/input.txt", help="a text")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if not options.data.is_file():
        parser.error(f"there is no text {options.data}. Name one with --data. To fetch one: curl -O {URL}")
    text = options.data.read_text(encoding="utf-8")
    number = {character: n for n, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text])

    run = paceline.start(seed=0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    end = len(tokens) * 9 // 10
    train_loader = DataLoader(windows(tokens[:end]), batch_size=32, shuffle=True)
    test_loader = DataLoader(windows(tokens[end:]), batch_size=256)

    model = LanguageModel(len(number)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_loader = run.prepare(model, optimizer, train_loader)

    for epoch in range(options.epochs):
        for now, after in train_loader:
            loss = loss_of(model, now.to(device), after.to(device))
            optimizer.zero_grad()
            run.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.step(optimizer)
        print(f"epoch {epoch + 1:2}  held-out loss {held_out_loss(model, test_loader, device):.4f}")
    return model


if __name__ == "__main__":
    main()
