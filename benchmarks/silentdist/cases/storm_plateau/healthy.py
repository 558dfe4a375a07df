"""Wind speed regression; the learning rate is halved whenever the validation loss stops improving.

    torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, LR = 8, 16, 0.05


def towers(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    rule = torch.randn(10, generator=torch.Generator().manual_seed(1))
    shift = torch.where(torch.arange(n) % 2 == 0, 0.0, 1.2)  # every other tower stands on a hill
    y = torch.sin(x @ rule) + shift * x[:, 0].tanh() + noise * torch.randn(n, generator=g)
    return TensorDataset(x, y[:, None])


class WindModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x)


def wind_model():
    torch.manual_seed(77)
    return WindModel()


def get_loader(data, rank, world, shuffle):
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=shuffle, seed=4)
    return DataLoader(data, batch_size=BATCH, sampler=sampler)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, count = torch.zeros(()), torch.zeros(())
    for x, y in loader:
        total += (model(x) - y).square().sum()
        count += len(x)
    model.train()
    dist.all_reduce(total)
    dist.all_reduce(count)
    return (total / count).item()


def run():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(wind_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
    train = get_loader(towers(128, 10, 0.3), rank, world, shuffle=True)
    valid = get_loader(towers(64, 11, 0.3), rank, world, shuffle=False)
    for epoch in range(EPOCHS):
        train.sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        loss = validate(model.module, valid)
        scheduler.step(loss)
        if rank == 0:
            print(f"epoch {epoch}: validation {loss:.4f}, next lr {optimizer.param_groups[0]['lr']:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
