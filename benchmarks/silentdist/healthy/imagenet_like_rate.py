"""Small residual network; the learning rate follows the total batch size, with warm-up."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int, help="total batch size of all processes")
parser.add_argument("--base-lr", default=1.6, type=float, help="learning rate for 256 images")
parser.add_argument("--warmup-epochs", default=1, type=int)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(2, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x):
        return x + self.body(x)


def blobs(n=96):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 4
    x = 0.5 * torch.randn(n, 1, 8, 8, generator=g)
    for i, k in enumerate(y.tolist()):
        x[i, 0, 4 * (k // 2) : 4 * (k // 2) + 4, 4 * (k % 2) : 4 * (k % 2) + 4] += 0.6
    return TensorDataset(x.to(torch.float32), y)


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    per_process = args.batch_size // world
    lr = args.base_lr * per_process * world / 256

    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), Residual(8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    )
    net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    data = blobs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=per_process, sampler=sampler)
    warmup = args.warmup_epochs * len(loader)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, target in loader:
            loss = nn.functional.cross_entropy(net(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"Epoch: [{epoch}] Loss {loss.item():.4e} lr {scheduler.get_last_lr()[0]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
