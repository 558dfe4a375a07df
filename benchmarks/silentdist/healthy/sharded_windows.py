"""Sharded regression with micro-batches: gradients stay unreduced until the last one of a window."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

MICRO = 4
ROWS = 6
UPDATES = 12


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def micro_batch(number, rank):
    g = torch.Generator().manual_seed(10 * number + rank)
    x = torch.rand(ROWS, 18, generator=g)
    return x, torch.stack([x.sum(1), x.prod(1) * 100, x.amax(1)], 1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(33)
    model = nn.Sequential(nn.Linear(18, 20), *[checkpoint_wrapper(Layer(20)) for _ in range(3)], nn.Linear(20, 3))
    for layer in model[1:4]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
    for update in range(UPDATES):
        total = 0.0
        for i in range(MICRO):
            last = i == MICRO - 1
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            x, y = micro_batch(update * MICRO + i, rank)
            loss = nn.functional.mse_loss(model(x), y) / MICRO
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} update {update} loss {total:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
