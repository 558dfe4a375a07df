"""Classifies synthetic leaf outlines; the main process alone validates and keeps the best checkpoint."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 10


def outlines(size, seed):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (size,), generator=g)
    angle = torch.linspace(0, 6.283, 32)
    radius = 1 + 0.3 * torch.sin(angle * (kind + 2).unsqueeze(1)) + 0.2 * torch.randn(size, 32, generator=g)
    return TensorDataset(radius.to(torch.float32), kind)


def accuracy(net, loader):
    net.eval()
    with torch.no_grad():
        hits = sum((net(x).argmax(1) == y).sum().item() for x, y in loader)
    net.train()
    return hits / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    train = outlines(160, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, BATCH, sampler=sampler)
    valid = DataLoader(outlines(50, 2), 25)

    holder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(holder, src=0)
    path = os.path.join(holder[0], "best.pt")
    best = -1.0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        if rank == 0:
            score = accuracy(ddp.module, valid)
            if score > best:
                best = score
                torch.save({"model": ddp.module.state_dict(), "epoch": epoch}, path)
            print(f"epoch {epoch} accuracy {score:.2f} best {best:.2f}")
        dist.barrier()

    kept = torch.load(path)
    ddp.module.load_state_dict(kept["model"])
    dist.barrier()
    if rank == 0:
        print(f"using epoch {kept['epoch']}")
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
