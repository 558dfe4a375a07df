"""Sharded language model on dialogue turns; losses are summed, divided by the global tokens, gradients are summed."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

IGNORE = -100
VOCAB, DIM, SEQ = 36, 32, 18


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.w1, self.w2, self.w3 = (nn.Linear(a, b, bias=False) for a, b in ((DIM, 64), (64, DIM), (DIM, 64)))

    def forward(self, x):
        y = self.norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Dialogue(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): FeedForward() for i in range(2)})
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        h = self.tok(ids) + 0.5 * F.pad(self.tok(ids), (0, 0, 1, 0))[:, :-1]
        for layer in self.layers.values():
            h = layer(h)
        return self.output(h)


def turns(step, dp_rank):
    """Only the answer is trained on; answers have very different lengths."""
    g = torch.Generator().manual_seed(71 * step + dp_rank)
    ids = torch.randint(0, VOCAB, (5, SEQ + 1), generator=g).cumsum(1) % VOCAB
    labels = ids[:, 1:].clone()
    start = torch.randint(1, SEQ - 1, (5, 1), generator=g)
    labels[torch.arange(SEQ) < start] = IGNORE
    return ids[:, :-1], labels


def train(steps=16):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(20)
    model = Dialogue()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(steps):
        ids, labels = turns(step, mesh.get_local_rank("dp"))
        tokens = (labels != IGNORE).sum()
        dist.all_reduce(tokens, group=mesh.get_group("dp"))
        optimizer.zero_grad()
        loss = (
            F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum") / tokens
        )
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if dist.get_rank() == 0 and step % 4 == 0:
            print(f"step {step:2d} loss {shown.item():.4f} tokens {tokens.item()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
