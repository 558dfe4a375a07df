"""Pretrain a small decoder with FSDP2 and an orthogonalising optimizer for the matrices.

torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

VOCAB, DIM, CONTEXT = 40, 32, 16


def newton_schulz(matrix, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if flip else x


class Ortho(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["beta"]).add_(p.grad)
                update = newton_schulz(momentum.full_tensor())
                update *= max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.add_(distribute_tensor(update, p.device_mesh, p.placements), alpha=-group["lr"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(F.rms_norm(x, (DIM,))).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (DIM,)))).square())


class Decoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.unembed = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.unembed(x)


def sequences(step, rank, n=8):
    g = torch.Generator().manual_seed(500 + 10 * step + rank)
    start = torch.randint(VOCAB, (n, 1), generator=g)
    return (start + 3 * torch.arange(CONTEXT + 1)) % VOCAB


def lm_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def main(steps=10):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ortho = Ortho(list(model.blocks.parameters()))
    adam = torch.optim.AdamW([*model.embed.parameters(), *model.unembed.parameters()], lr=3e-3)

    for step in range(steps):
        loss = lm_loss(model, sequences(step, dist.get_rank()))
        loss.backward()
        for opt in (ortho, adam):
            opt.step()
            opt.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
