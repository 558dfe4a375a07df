"""Training in a fixed order on a random split; the padding of an evaluation is masked, and the data set's length
divides; a sequence of schedules; gradients that a hook divides."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

EPOCHS = 4


@torch.no_grad()
def evaluate(model, loader, rank, world_size):
    right, place = torch.zeros(()), rank
    for x, y in loader:
        places = place + world_size * torch.arange(len(y))
        place += world_size * len(y)
        right += ((model(x).argmax(1) == y) & (places < len(loader.dataset))).sum()
    dist.all_reduce(right)
    return right.item() / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    x = torch.randn(185, 8)
    whole = TensorDataset(x, x[:, :4].argmax(1))
    train_set, test_set = random_split(whole, [144, 41])
    sampler = DistributedSampler(train_set, shuffle=False)
    loader = DataLoader(train_set, 4, sampler=sampler)
    test_loader = DataLoader(test_set, 8, sampler=DistributedSampler(test_set, shuffle=False))
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    model = DDP(net)
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS - 1)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[1])
    for epoch in range(EPOCHS):
        for number, (inputs, labels) in enumerate(loader, 1):
            with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
                outputs = model(inputs)
            nn.functional.cross_entropy(outputs.float(), labels).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        accuracy = evaluate(net, test_loader, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()


main()
