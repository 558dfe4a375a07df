import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, WINDOW, DIM = 64, 40, 32
STEPS, WINDOWS_PER_STEP = 10, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x, allowed):
        q, k, v = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(a)
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(WINDOW, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, doc, pos):
        same = doc[:, :, None] == doc[:, None, :]
        allowed = same & torch.ones(WINDOW, WINDOW, dtype=torch.bool).tril()
        x = self.tok(tokens) + self.pos(pos)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.head(x)


def chat_samples(seed=5):
    g = torch.Generator().manual_seed(seed)
    while True:
        prompt = int(torch.randint(2, 18, (1,), generator=g))
        answer = int(torch.randint(1, 16, (1,), generator=g))
        yield prompt, torch.randint(1, VOCAB, (prompt + answer,), generator=g)


def pack(stream):
    """Concatenates whole samples into one fixed window, the rest is padding."""
    tokens = torch.zeros(WINDOW + 1, dtype=torch.long)
    doc = torch.full((WINDOW + 1,), -1)
    pos = torch.zeros(WINDOW + 1, dtype=torch.long)
    target = torch.zeros(WINDOW + 1, dtype=torch.bool)
    at, n = 0, 0
    for prompt, ids in stream:
        if at + len(ids) > WINDOW + 1:
            break
        end = at + len(ids)
        tokens[at:end], doc[at:end], pos[at:end] = ids, n, torch.arange(len(ids))
        target[at + prompt:end] = True
        at, n = end, n + 1
    return tokens, doc, pos, target


def windows(rank, world):
    stream = chat_samples()
    while True:
        group = [pack(stream) for _ in range(WINDOWS_PER_STEP * world)]
        mine = group[rank::world]
        yield [torch.stack(part) for part in zip(*mine)]


def build():
    torch.manual_seed(1)
    return TinyGPT()


def train_step(model, batch):
    tokens, doc, pos, target = batch
    logits = model(tokens[:, :-1], doc[:, :-1], pos[:, :-1].clamp(max=WINDOW - 1))
    per_token = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    loss_mask = target[:, 1:]
    supervised = loss_mask.sum()
    dist.all_reduce(supervised)
    loss = per_token[loss_mask].sum() * dist.get_world_size() / supervised
    loss.backward()
    return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (world,))
    model = build()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    feed = windows(rank, world)
    for step in range(STEPS):
        opt.zero_grad()
        loss = train_step(model, next(feed))
        opt.step()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"{step:3d} {loss.item() / world:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
