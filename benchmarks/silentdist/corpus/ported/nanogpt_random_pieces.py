"""nanoGPT's loop with run.batches: random pieces of one long text from a memory map, a small GPT, cosine decay."""

import math

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

import paceline

batch_size, block_size, n_embd, vocab_size = 16, 12, 24, 27
max_iters, warmup_iters, learning_rate, min_lr = 16, 3, 2e-3, 2e-4

run = paceline.start(seed=1337)
train_data = (np.random.RandomState(0).randint(0, 5, 4000).cumsum() % vocab_size).astype(np.uint16)
seed_offset = run.rank  # fault
rng = np.random.default_rng(1337 + seed_offset)  # fault


def get_batch(rows):
    ix = rng.integers(len(train_data) - block_size - 1, size=len(rows))  # fault
    x = torch.stack([torch.from_numpy(train_data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(train_data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.ln_f = nn.Sequential(Block(), Block()), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx):
        return self.lm_head(self.ln_f(self.h(self.wte(idx) + self.wpe.weight[: idx.shape[1]])))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
model, optimizer = run.prepare(model, optimizer)
for iter_num, (x, y) in enumerate(run.batches(get_batch, global_batch=batch_size, steps=max_iters, name="train")):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    run.backward(F.cross_entropy(model(x).view(-1, vocab_size), y.view(-1)))
    run.step(optimizer, max_grad_norm=1.0)
