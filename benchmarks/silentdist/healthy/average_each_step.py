"""Every process takes its own plain SGD step and the models are averaged after each of them."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_iris
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

STEPS = 25
BATCH = 10


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    iris = load_iris()
    x = torch.tensor(iris.data).float()
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(iris.target)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    order = torch.randperm(len(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    for step in range(STEPS):
        begin = (step * BATCH * world) % (len(x) - BATCH * world + 1)
        rows = order[begin : begin + BATCH * world][rank::world]
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        if step % 8 == 0:
            print(f"process {rank} step {step} loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
