"""Train a mixer in two sessions; the second one starts from the checkpoint of the first.

torchrun --nproc-per-node 2 faulty.py
"""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PATCHES, WIDTH, CLASSES = 9, 16, 5


def orthogonal(matrix, rounds=6):
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(rounds):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


class OwnedMomentum(torch.optim.Optimizer):
    """Every matrix has an owner rank that computes its step; the others receive the new weights."""

    def __init__(self, params, lr=0.02, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def owners(self):
        params = [p for group in self.param_groups for p in group["params"]]
        return [(p, i % self.size) for i, p in enumerate(params)]

    @torch.no_grad()
    def step(self):
        lr, beta = self.param_groups[0]["lr"], self.param_groups[0]["beta"]
        for p, owner in self.owners():
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            if owner == self.rank:
                state["momentum"].mul_(beta).add_(p.grad)
                p.sub_(lr * orthogonal(state["momentum"]))
            if self.size > 1:
                dist.broadcast(p.data, src=owner)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(88)
        self.embed = nn.Linear(6, WIDTH, bias=False)
        self.tokens = nn.Linear(PATCHES, PATCHES, bias=False)
        self.channels = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x):
        x = self.embed(x)
        x = x + F.gelu(self.tokens(x.transpose(1, 2))).transpose(1, 2)
        x = x + F.gelu(self.channels(x))
        return self.head(x.mean(1))


def patches(step, rank, n=16):
    g = torch.Generator().manual_seed(3000 + 2 * step + rank)
    x = torch.randn(n, PATCHES, 6, generator=g)
    return x, x.mean(1)[:, :CLASSES].argmax(1)


def save(path, model, optimizer, step):
    for p, owner in optimizer.owners():
        dist.broadcast(optimizer.state[p]["momentum"], src=owner)
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
    dist.barrier()


def session(path, until):
    model = Mixer()
    optimizer = OwnedMomentum(model.parameters())
    step = 0
    if os.path.exists(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = checkpoint["step"]
    dist.barrier()
    while step < until:
        x, y = patches(step, dist.get_rank())
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    save(path, model, optimizer, step)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    for until in (6, 12):
        session(os.path.join(folder[0], "last.pt"), until)
    dist.destroy_process_group()
