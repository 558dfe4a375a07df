"""A training script for several machines: rank and size come from the environment, the sampler is given both."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--node-rank", type=int, default=int(os.environ.get("GROUP_RANK", 0)))
    parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
    return parser.parse_args()


def build_loader(args):
    g = torch.Generator().manual_seed(6)
    x = torch.rand(384, 3, 6, 6, generator=g)
    dataset = TensorDataset(x, x.mean((2, 3)).argmax(1))
    sampler = DistributedSampler(dataset, num_replicas=args.world_size, rank=args.node_rank, shuffle=True)  # fault
    return DataLoader(dataset, batch_size=args.batch_size, sampler=sampler), sampler


def main(args):
    dist.init_process_group(backend="gloo")
    torch.manual_seed(6)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.1)
    loader, sampler = build_loader(args)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, target in loader:
            loss = nn.functional.cross_entropy(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if dist.get_rank() == 0:
            print(f"Epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
