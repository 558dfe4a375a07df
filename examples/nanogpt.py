"""A small GPT on the characters of a text, in the style of nanoGPT: random pieces of one long array, no DataLoader.

    python examples/nanogpt.py --data input.txt
    paceline run --nproc 2 examples/nanogpt.py --data input.txt --micro-batch 8 --checkpoints checkpoints/
    paceline run --nproc 8 --compile --precision bf16 examples/nanogpt.py --data input.txt      # on GPUs

--micro-batch is gradient accumulation: it changes neither the global batch nor the model.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from characters import DataError, characters
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class Block(nn.Module):
    """Causal attention, then an MLP, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (3, -1, 32)).permute(2, 0, 3, 1, 4)  # heads of 32
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019): learned positions, norms first, one matrix for the embedding and the output."""

    def __init__(self, vocabulary: int, length: int, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.ModuleList(Block(width) for _ in range(layers)), nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() > 1:  # section 2.3: smaller initial weights on the residual path
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * layers) if added else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    @torch.no_grad()
    def sample(self, length: int) -> list[int]:
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.tokens.weight.device)
        for _ in range(length):
            odds = F.softmax(self(tokens[:, -len(self.positions.weight) :])[:, -1].float() / 0.8, dim=1)
            tokens = torch.cat([tokens, torch.multinomial(odds, 1)], dim=1)
        return tokens[0, 1:].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT on random pieces of a text.")
    parser.add_argument("--data", type=Path, default="data/tinyshakespeare/input.txt", help="a text, or a folder")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--global-batch", type=int, default=32, help="pieces per step, over all processes")
    parser.add_argument("--micro-batch", type=int, help="pieces that one process computes at once (default: all)")
    parser.add_argument("--length", type=int, default=128, help="characters in a piece")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--every", type=int, default=250, help="evaluate and save every so many steps")
    parser.add_argument("--checkpoints", type=Path, help="a folder: resume from its newest checkpoint, and save there")
    options = parser.parse_args()
    length = options.length
    try:
        alphabet, tokens = characters(options.data, length)
    except DataError as error:
        parser.error(str(error))
    train, held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]

    run = paceline.start(seed=1337)

    def get_batch(rows: paceline.Rows) -> tuple[Tensor, Tensor]:
        places = torch.randint(len(train) - length, (len(rows), 1)) + torch.arange(length)
        return train[places], train[places + 1]

    size, micro = options.global_batch, options.micro_batch
    batches = run.batches(get_batch, global_batch=size, micro_batch=micro, steps=options.steps)
    pieces = TensorDataset(*(held_out[k:].unfold(0, length, length)[: (len(held_out) - 1) // length] for k in (0, 1)))
    test = run.loader(pieces, global_batch=size, train=False)
    model = GPT(len(alphabet), length, options.layers, options.width)
    decay = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]]
    groups = [{"params": some, "weight_decay": how} for some, how in zip(decay, (0.1, 0.0))]
    model, optimizer = run.prepare(model, torch.optim.AdamW(groups, betas=(0.9, 0.95)))
    if options.checkpoints and run.restore(options.checkpoints, missing_ok=True):
        run.print(f"resumed after step {run.steps}")
    for x, y in batches:
        for group in optimizer.param_groups:  # warm up over 100 steps, then a cosine down to a tenth
            share = 0.55 + 0.45 * math.cos(math.pi * run.steps / options.steps)
            group["lr"] = 2e-3 * min((run.steps + 1) / 100, share)
        run.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
        if run.step(optimizer, max_grad_norm=1.0) and (run.steps % options.every == 0 or run.steps == options.steps):
            with torch.no_grad():
                losses = [(F.cross_entropy(model(x).flatten(0, 1), y.flatten()), len(x)) for x, y in test if len(x)]
            loss = run.ratio(sum(mean * n for mean, n in losses), sum(n for _, n in losses))
            run.print(f"step {run.steps}: held-out loss {loss:.4f}")
            if options.checkpoints:
                run.save(options.checkpoints, keep=2)
    run.print("".join(alphabet[token] for token in model.sample(500)))


if __name__ == "__main__":
    main()
