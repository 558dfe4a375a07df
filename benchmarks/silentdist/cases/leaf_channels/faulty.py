"""Leaf disease classifier. Channels-last convolutions, gradients averaged by hand after every backward."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset


def leaves(n=256, size=12, classes=4, seed=55):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(classes, (n,), generator=g)
    image = 0.4 * torch.randn(n, 3, size, size, generator=g)
    for k in range(n):
        row = int(torch.randint(size - 4, (1,), generator=g))
        image[k, label[k] % 3, row:row + 4, 2 * label[k]:2 * label[k] + 4] += 1.0 + (k % 2)
    return TensorDataset(image, label)


class LeafNet(nn.Module):
    def __init__(self, width=8, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.block = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.norm(self.block(x)))
        return self.head(x.mean((2, 3)))


def mean_over_ranks(tensor):
    dist.all_reduce(tensor.contiguous(), op=dist.ReduceOp.SUM)
    return tensor.div_(dist.get_world_size())


def synchronize(model):
    for p in model.parameters():
        if p.grad is not None:
            mean_over_ranks(p.grad)


def network():
    torch.manual_seed(2024)
    return LeafNet().to(memory_format=torch.channels_last)


def loader(rank, world, batch):
    data = leaves()
    mine = list(range(rank, len(data), world))
    return DataLoader(Subset(data, mine), batch_size=batch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for step, (image, label) in enumerate(loader(rank, world, args.batch)):
        image = image.contiguous(memory_format=torch.channels_last)
        loss = cross_entropy(model(image), label)
        sgd.zero_grad()
        loss.backward()
        synchronize(model)
        sgd.step()
        if rank == 0 and step % 4 == 3:
            print(f"{step + 1:3d}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
