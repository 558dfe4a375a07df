"""A fraud detector with few positives; the F1 score of the validation set decides which epoch is kept."""

import os
import tempfile

import torch
import torch.distributed as dist
from sklearn.metrics import f1_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def transactions(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 9, generator=g)
    return TensorDataset(x, (x[:, 0] + x[:, 1] * x[:, 2] + 0.5 * torch.randn(n, generator=g) > 2).float())


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    outputs = [(net(x).squeeze(1) > -0.5, y) for x, y in loader]
    predicted, truth = (torch.cat(column).numpy() for column in zip(*outputs))
    score = torch.tensor(f1_score(truth, predicted, zero_division=0))  # fault
    dist.all_reduce(score)  # fault
    net.train()
    return score.item() / dist.get_world_size()  # fault


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(15)
    train, valid = transactions(640, 0), transactions(160, 1)
    train_sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=32, sampler=train_sampler)
    valid_loader = DataLoader(valid, batch_size=40, sampler=DistributedSampler(valid, shuffle=False))
    net = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))
    path, best = os.path.join(tempfile.mkdtemp(), "best.pt"), -1.0
    for epoch in range(4):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            criterion(model(x).squeeze(1), y).backward()
            optimizer.step()
        f1 = evaluate(net, valid_loader)
        if rank == 0:
            print(f"epoch {epoch} f1 {f1:.4f}")
            if f1 > best:
                best = f1
                torch.save(net.state_dict(), path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
