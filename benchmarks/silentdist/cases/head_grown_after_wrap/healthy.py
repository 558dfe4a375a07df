"""Task-incremental learning: one trunk, a fresh classifier for every task."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, TASKS = 14, 3


class IncrementalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU())
        self.heads = nn.ModuleDict()

    def add_task(self, task, classes):
        torch.manual_seed(100 + task)
        self.heads[str(task)] = nn.Linear(20, classes)

    def forward(self, x, task):
        return self.heads[str(task)](self.trunk(x))


def task_data(task, classes):
    g = torch.Generator().manual_seed(300 + task)
    y = torch.randint(0, classes, (80,), generator=g)
    means = 2 * torch.randn(classes, FEATURES, generator=g)
    return TensorDataset(means[y] + torch.randn(80, FEATURES, generator=g), y)


def task_loader(task, classes, rank, world):
    data = task_data(task, classes)
    return DataLoader(data, batch_size=10, sampler=DistributedSampler(data, world, rank, seed=task))


def parallel(net):
    return DistributedDataParallel(net, find_unused_parameters=True)


def new_network():
    torch.manual_seed(55)
    net = IncrementalNet()
    net.add_task(0, 2)
    return net


def learn_task(ddp, task, classes, rank, world):
    optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.05, momentum=0.9)
    last = None
    for x, y in task_loader(task, classes, rank, world):
        optimizer.zero_grad()
        last = nn.functional.cross_entropy(ddp(x, task), y)
        last.backward()
        optimizer.step()
    return last.detach()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = new_network()
    ddp = parallel(net)
    for task in range(TASKS):
        classes = 2 + task
        if task > 0:
            net.add_task(task, classes)
            ddp = parallel(net)
        loss = learn_task(ddp, task, classes, rank, world)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"task {task}: {classes} classes, final loss {loss.item() / world:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
