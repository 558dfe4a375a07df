"""A small convolutional network on synthetic 12x12 glyphs: DDP, SGD with momentum, a cosine schedule."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


def glyphs(n, seed):
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, 6, (n,), generator=g)
    return TensorDataset(kinds[labels] + 0.7 * torch.randn(n, 1, 12, 12, generator=g), labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 9, 6)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


def save(path, model, optimizer, scheduler, epoch, batch, step):
    checkpoint = {
        "model": {name: p.detach() for name, p in model.module.named_parameters()},
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "position": (epoch, batch, step),
    }
    torch.save(checkpoint, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


@torch.no_grad()
def accuracy(model, images, labels):
    return (model.eval()(images).argmax(1) == labels).float().mean().item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1234)
args.out.mkdir(parents=True, exist_ok=True)

train, test = glyphs(256, 0), glyphs(200, 1)
sampler = DistributedSampler(train, shuffle=True, seed=7)
loader = DataLoader(train, batch_size=16, sampler=sampler, drop_last=True)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))

start_epoch = start_batch = step = 0
found = sorted(args.out.glob("glyphs-*.pt"))
if found:
    checkpoint = torch.load(found[-1])
    model.module.load_state_dict(checkpoint["model"], strict=False)
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    start_epoch, start_batch, step = checkpoint["position"]

for epoch in range(start_epoch, args.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for batch, (images, labels) in enumerate(loader):
        if epoch == start_epoch and batch < start_batch:
            continue
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if step % 3 == 0:
                save(args.out / f"glyphs-{step:04d}.pt", model, optimizer, scheduler, epoch, batch + 1, step)
if rank == 0:
    print(f"accuracy {accuracy(model.module, *test.tensors):.3f}")
    if os.environ.get("FINAL"):
        torch.save(model.module.state_dict(), os.environ["FINAL"])
dist.destroy_process_group()
