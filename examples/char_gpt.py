"""A character-level GPT: predicts the next character of a text, on one process or on several.

    python examples/char_gpt.py --data input.txt
    paceline run --nproc 2 examples/char_gpt.py --data input.txt --steps 2000 --checkpoints checkpoints/

The last tenth of the text is held out. The loss is a mean over characters, and the last window of a text is short. So
loss_fn returns a sum and a count: the loss is exact for any split into processes and micro-batches.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from characters import DataError, characters
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import paceline

NOTHING = -100  # a target that F.cross_entropy ignores


def windows(tokens: Tensor, length: int) -> TensorDataset:
    """Windows of `length` characters, with the next characters as targets (NOTHING after the end of the text)."""
    missing = -(len(tokens) - 1) % length
    now, after = F.pad(tokens[:-1], (0, missing)), F.pad(tokens[1:], (0, missing), value=NOTHING)
    return TensorDataset(now.view(-1, length), after.view(-1, length))


class GPT(nn.Module):
    """Pre-norm transformer blocks with a causal mask and learned positions (Radford et al. 2019)."""

    def __init__(self, vocabulary: int, length: int, layers: int, width: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        how: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = [nn.TransformerEncoderLayer(width, max(width // 32, 1), 4 * width, **how) for _ in range(layers)]
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.characters(tokens) + self.positions.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))

    @torch.no_grad()
    def sample(self, length: int) -> list[int]:
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.head.weight.device)
        for _ in range(length):
            odds = F.softmax(self(tokens[:, -len(self.positions.weight) :])[:, -1].float(), dim=1)
            tokens = torch.cat([tokens, torch.multinomial(odds, 1)], dim=1)
        return tokens[0, 1:].tolist()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> paceline.Total:
    tokens, targets = batch
    total = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=NOTHING, reduction="sum")
    return paceline.Total(total, (targets != NOTHING).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT on the characters of a text.")
    parser.add_argument("--data", type=Path, default="data/tinyshakespeare/input.txt", help="a text, or a folder")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--global-batch", type=int, default=32, help="windows per step, over all processes")
    parser.add_argument("--micro-batch", type=int, help="windows that one process computes at once (default: all)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128, help="characters in a window")
    parser.add_argument("--every", type=int, default=100, help="evaluate and save every so many steps")
    parser.add_argument("--checkpoints", type=Path, help="a folder: resume from its newest checkpoint, and save there")
    options = parser.parse_args()
    try:
        alphabet, tokens = characters(options.data, options.length)
    except DataError as error:
        parser.error(str(error))
    end = len(tokens) * 9 // 10

    run = paceline.start(seed=0)
    sizes = {"global_batch": options.global_batch, "micro_batch": options.micro_batch}
    train = run.loader(windows(tokens[:end], options.length), **sizes, shuffle=True)
    test = run.loader(windows(tokens[end:], options.length), **sizes, train=False)
    model = GPT(len(alphabet), options.length, options.layers, options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def share(step: int) -> float:  # of the learning rate: warm up for a tenth of the steps, then a cosine
        return min((step + 1) / (options.steps / 10), (1 + math.cos(math.pi * step / options.steps)) / 2)

    model, optimizer, _ = run.prepare(model, optimizer, LambdaLR(optimizer, share))
    if options.checkpoints and run.restore(options.checkpoints, missing_ok=True):
        run.print(f"resumed after step {run.steps}")
    for _ in run.epochs(math.ceil(options.steps / train.steps)):
        for batch in train:
            if run.steps >= options.steps:
                break
            run.forward_backward(loss_fn, model, batch)
            if not run.step(optimizer, max_grad_norm=1.0) or (run.steps % options.every and run.steps < options.steps):
                continue
            with torch.no_grad():
                held_out = [loss_fn(model, batch) for batch in test]
            loss = run.ratio(sum(total.sum for total in held_out), sum(total.count for total in held_out))
            run.print(f"step {run.steps}: held-out loss {loss:.4f}")
            if options.checkpoints:
                run.save(options.checkpoints, keep=2)
    run.print("".join(alphabet[token] for token in model.sample(400)))


if __name__ == "__main__":
    main()
