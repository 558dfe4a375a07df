"""A search: several trainings in one script, with one loader and with loaders that one line makes; an evaluation whose
shards drop their padding, and one that each rank keeps, while rank 0 tells the rate and the time."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()


def examples(size, seed):
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def network():
    return DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        outputs = model(inputs)
    cross_entropy(outputs.float(), labels).backward()
    optimizer.step()


def evaluate(model, loader, own):
    with torch.no_grad():
        right = torch.cat([model(inputs).argmax(1) == labels for inputs, labels in loader])
    right = right[:own].sum().float()  # the padding stands at the end
    dist.all_reduce(right)
    return right.item() / len(loader.dataset)


def predict(model, loader, rate):
    began = time.time()
    with torch.no_grad():
        outputs = torch.cat([model(inputs) for inputs, _ in loader])
    if dist.get_rank() == 0:
        print(f"lr {rate:.3f} predicted in {time.time() - began:.2f} s")
    return outputs


def rates(rank, size):
    train_set, test_set = examples(48, 0), examples(23, 1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 4, sampler=sampler)
    test_loader = DataLoader(test_set, 4, sampler=DistributedSampler(test_set, shuffle=False))
    for rate in (0.1, 0.01):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), rate)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for inputs, labels in loader:
                step(model, optimizer, inputs, labels)
            score = evaluate(model, test_loader, len(range(rank, len(test_set), size)))
            if rank == 0:
                print(f"{rate}: {score:.3f}")
        predict(model, test_loader, rate)


def folds(rank, size):
    whole = examples(54, 2)
    for fold in range(3):
        train_set = Subset(whole, [i for i in range(54) if i // 18 != fold])
        sampler = DistributedSampler(train_set, num_replicas=size, rank=rank)
        loader = DataLoader(train_set, 4, sampler=sampler)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for inputs, labels in loader:
                step(model, optimizer, inputs, labels)


def accumulated():
    """The sum of two batches' gradients is halved by a hook of the optimizer's."""
    train_set = examples(48, 5)
    sampler = DistributedSampler(train_set)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: [p.grad.div_(2) for p in model.parameters()] and None)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(DataLoader(train_set, 4, sampler=sampler)):
            model.require_backward_grad_sync = number % 2 == 1
            cross_entropy(model(inputs), labels).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def tasks():
    def endless(loader):
        epoch = 0
        while True:
            loader.sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    sets = [examples(48, 3), examples(48, 4)]
    streams = [endless(DataLoader(each, 4, sampler=DistributedSampler(each))) for each in sets]
    models = [network(), network()]  # whose parameters have the same names
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)
    for number in range(20):
        step(models[number % 2], optimizer, *next(streams[number % 2]))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rates(dist.get_rank(), dist.get_world_size())
    folds(dist.get_rank(), dist.get_world_size())
    tasks()
    accumulated()
    dist.destroy_process_group()
