"""Feed-forward network split over the processes by columns and rows; all of them read the same batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 16


class FeedForward(nn.Module):
    def __init__(self, width=16, hidden=48):
        super().__init__()
        self.inp = nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.out(torch.nn.functional.gelu(self.inp(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = FeedForward()
        self.second = FeedForward()

    def forward(self, x):
        return self.second(self.first(x))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(7)  # the same weights before the split and the same batches after it
    model = Net()
    plan = {}
    for name in ("first", "second"):
        plan[f"{name}.inp"] = ColwiseParallel()
        plan[f"{name}.out"] = RowwiseParallel()
    model = parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(STEPS):
        x = torch.randn(12, 16)
        loss = nn.functional.mse_loss(model(x), x.roll(1, 1).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
