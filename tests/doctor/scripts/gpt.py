"""A language model in the manner of nanoGPT: no DataLoader, random crops, accumulation, evaluation on rank 0 alone."""

import math
import os
import sys

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, vocabulary, width = 16, 6, 40, 24
gradient_accumulation_steps, max_iters, learning_rate, grad_clip = 2, 24, 1e-3, 1.0
dtype = torch.bfloat16 if "--bf16" in sys.argv else torch.float32

init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
seed_offset = ddp_rank
data = torch.randint(vocabulary, (4000,), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, targets):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def get_batch():
    starts = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in starts])
    return x, torch.stack([data[i + 1 : i + 1 + block_size] for i in starts])


def get_lr(iteration):
    if iteration < 4:
        return learning_rate * (iteration + 1) / 4
    return 1e-4 + 0.5 * (1 + math.cos(math.pi * iteration / max_iters)) * (learning_rate - 1e-4)


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = torch.stack([model(*get_batch())[1] for _ in range(3)])
    model.train()
    return losses.mean().item()


torch.manual_seed(1337)
raw_model = GPT()
torch.manual_seed(1337 + seed_offset)
model = DDP(raw_model)
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=learning_rate, weight_decay=0.1)
X, Y = get_batch()
for iteration in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iteration)
    if iteration % 8 == 0 and master_process:
        print(f"step {iteration}: loss {estimate_loss(raw_model):.3f}")
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is torch.bfloat16):
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
destroy_process_group()
