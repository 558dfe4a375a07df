"""Load forecasts with FSDP2 and a loss scaler of our own (gradients have to fit into half precision).

    torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

HALF_MAX = torch.finfo(torch.float16).max
STEPS, BATCH, INPUTS, SITES = 24, 16, 12, 8


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh())
        self.decode = nn.Linear(32, SITES)

    def forward(self, x):
        return self.decode(self.encode(x))


def meters(step, rank):
    """The last sites are factories, whose load is much larger on some days."""
    g = torch.Generator().manual_seed(7 * step + rank)
    x = torch.randn(BATCH, INPUTS, generator=g)
    rule = torch.randn(INPUTS, SITES, generator=torch.Generator().manual_seed(12))
    size = torch.ones(SITES)
    size[-2:] = 12.0 if step % 7 == 3 else 3.0
    return x, torch.tanh(x @ rule) * size


class ShardedScaler:
    """Multiplies the loss; leaves a step out and halves the factor if a scaled gradient overflows."""

    def __init__(self, scale=2.0**17, interval=8):
        self.scale, self.interval, self.good = scale, interval, 0

    def scaled(self, loss):
        return loss * self.scale

    def overflow(self, params):
        found = torch.zeros(1)
        for p in params:
            shard = p.grad.to_local()
            if shard.numel() and not bool((shard.abs() <= HALF_MAX).all()):
                found.fill_(1.0)
        skip = found.clone()
        work = dist.all_reduce(found, op=dist.ReduceOp.MAX, async_op=True)
        work.wait()
        return bool(skip)

    def step(self, optimizer, params):
        params = list(params)
        if self.overflow(params):
            self.scale, self.good = self.scale / 2, 0
            return False
        for p in params:
            p.grad.to_local().div_(self.scale)
        optimizer.step()
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0
        return True


def make_model():
    torch.manual_seed(99)
    return Forecaster()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model()
    fully_shard(model.encode)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = ShardedScaler()
    for step in range(STEPS):
        x, y = meters(step, rank)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        scaler.scaled(loss).backward()
        stepped = scaler.step(optimizer, model.parameters())
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1} loss {loss.item():.4f} scale {scaler.scale:.0f} stepped {stepped}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
