"""Character-level GPT in one file: gradient accumulation, warm-up and cosine decay, clipping."""

import contextlib
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
batch_size = 4
block_size = 24
gradient_accumulation_steps = 6  # of all processes together
n_embd, n_head, n_layer = 32, 4, 2
learning_rate, min_lr, warmup_iters, max_iters = 3e-3, 3e-4, 4, 16
grad_clip = 1.0
# -----------------------------------------------------------------------------
TEXT = "shall i compare thee to a summer's day thou art more lovely and more temperate rough winds do shake "
TEXT = TEXT * 4
chars = sorted(set(TEXT))
data = torch.tensor([chars.index(c) for c in TEXT])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, n_head, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(att.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        logits = self.lm_head(self.ln_f(self.h(self.wte(idx) + self.wpe.weight)))
        return F.cross_entropy(logits.view(-1, len(chars)), targets.view(-1))


def get_batch(generator):
    ix = torch.randint(len(data) - block_size, (batch_size,), generator=generator)
    return torch.stack([data[i : i + block_size] for i in ix]), torch.stack(
        [data[i + 1 : i + 1 + block_size] for i in ix]
    )


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert gradient_accumulation_steps % world == 0
gradient_accumulation_steps //= world
torch.manual_seed(1337)
model = DDP(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
stream = torch.Generator().manual_seed(1337 + rank)

for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    for micro in range(gradient_accumulation_steps):
        last = micro == gradient_accumulation_steps - 1
        X, Y = get_batch(stream)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(X, Y) / gradient_accumulation_steps
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0 and it % 5 == 0:
        print(f"iter {it}: loss {loss.item() * gradient_accumulation_steps:.4f}")
dist.destroy_process_group()
