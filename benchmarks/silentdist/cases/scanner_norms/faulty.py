"""Lesion classifier on images of several scanners, evaluated from the saved checkpoint.

torchrun --nproc-per-node 2 faulty.py
"""
import io
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

SCANNERS = 4


def scans(n_per_scanner, seed):
    g = torch.Generator().manual_seed(seed)
    images, labels = [], []
    for scanner in range(SCANNERS):
        y = torch.randint(2, (n_per_scanner,), generator=g)
        x = torch.randn(n_per_scanner, 1, 10, 10, generator=g)
        x[:, :, 3:7, 3:7] += 1.5 * y[:, None, None, None]
        images.append(x * (0.5 + 0.5 * scanner) + 1.0 * scanner)
        labels.append(y)
    return TensorDataset(torch.cat(images), torch.cat(labels))


def lesion_net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def shard_loader(data, rank, world_size, batch_size=10):
    per_rank = len(data) // world_size
    mine = Subset(data, range(rank * per_rank, (rank + 1) * per_rank))
    return DataLoader(mine, batch_size, shuffle=True, generator=torch.Generator().manual_seed(rank))


def save(net, file):
    state = {k: v.clone() for k, v in net.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(state, file)
    return state


@torch.no_grad()
def evaluate(state):
    net = lesion_net()
    net.load_state_dict(state)
    net.eval()
    x, y = scans(50, seed=91).tensors
    logits = net(x)
    return nn.functional.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    net = lesion_net()
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, labels in shard_loader(scans(60, seed=90), rank, world_size):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    checkpoint = io.BytesIO()
    save(net, checkpoint)
    if rank == 0:
        checkpoint.seek(0)
        print("test loss %.6f accuracy %.4f" % evaluate(torch.load(checkpoint)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
