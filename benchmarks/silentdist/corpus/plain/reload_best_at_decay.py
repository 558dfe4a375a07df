"""A tabular regressor: when the learning rate is cut, training goes back to the best checkpoint so far."""

import os
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BEST = os.path.join(tempfile.gettempdir(), f"corpus_best_{os.environ.get('MASTER_PORT', 0)}.pt")


def load_data():
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) * 20, torch.tensor(y, dtype=torch.float32)[:, None]
    y = (y - y.mean()) / y.std()
    return TensorDataset(x[:320], y[:320]), TensorDataset(x[320:], y[320:])


@torch.no_grad()
def validate(net, data):
    net.eval()
    folds = [nn.functional.mse_loss(net(x), y).item() for x, y in DataLoader(data, batch_size=1)]
    net.train()
    return sum(folds) / len(folds)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(14)
    train, valid = load_data()
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    best = float("inf")
    if rank == 0:
        torch.save(net.state_dict(), BEST)
    dist.barrier()
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            loss = validate(net, valid)
            if loss < best:
                best = loss
                torch.save(net.state_dict(), BEST)
            print(f"epoch {epoch} valid {loss:.4f}")
        if epoch % 2 == 1:
            net.load_state_dict(torch.load(BEST))  # fault
            for group in optimizer.param_groups:
                group["lr"] *= 0.3
    dist.barrier()
    if rank == 0:
        os.remove(BEST)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
