"""An image classifier as in PyTorch's ImageNet example: DDP, an evaluation over shards, a schedule by epochs."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Images(Dataset):
    def __init__(self, size, train):
        generator = torch.Generator().manual_seed(1 if train else 2)
        self.images = torch.randn(size, 3, 8, 8, generator=generator)
        self.labels = torch.randint(10, (size,), generator=generator)
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(self.conv2(x)).mean((2, 3))
        return self.head(x)


def train(model, loader, optimizer, args):
    model.train()
    total = 0.0
    for images, labels in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for images, labels in loader:
        counts += torch.tensor([(model(images).argmax(1) == labels).sum().item(), len(labels)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    train_set, test_set = Images(144, True), Images(53, False)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    shard = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(shard, batch_size=16)

    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer, args)
        accuracy = evaluate(model, test_loader)
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}")
            if accuracy >= best:
                torch.save({"model": model.module.state_dict(), "epoch": epoch}, args.checkpoint)
        best = max(best, accuracy)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
