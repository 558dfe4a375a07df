"""A class that accumulates: label smoothing, weighted losses, a scaler, a cosine over the updates; a stream
that is evaluated in parts; predictions that are put to their places; files that each rank keeps."""

import argparse
import contextlib
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset


def examples(size, seed):
    x = torch.randn(size, 10, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1), torch.arange(size))


class Stream(IterableDataset):
    def __iter__(self):
        order = random.Random(dist.get_rank())
        kept = []
        for number, (x, y, _) in enumerate(examples(90, 3)):
            if number % dist.get_world_size() == dist.get_rank():
                kept.append((x, y))
                if len(kept) > 8:
                    yield kept.pop(order.randrange(8))
        yield from kept


class Runner:
    def __init__(self, args):
        self.args, self.rank = args, dist.get_rank()
        self.train_set, self.test_set = examples(192, 0), examples(35, 1)
        self.sampler = DistributedSampler(self.train_set)
        self.loader = DataLoader(self.train_set, 8, sampler=self.sampler)
        shard = DistributedSampler(self.test_set, shuffle=False)
        self.test_loader = DataLoader(self.test_set, 8, sampler=shard)
        self.stream = DataLoader(Stream(), 5)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        self.model = DDP(net)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 2e-3)
        updates = args.epochs * (len(self.loader) // args.accumulate)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, updates)
        self.scaler = torch.amp.GradScaler("cpu", enabled=not args.bf16, init_scale=1024.0)

    def batch(self, number, x, y):
        last = (number + 1) % self.args.accumulate == 0
        with contextlib.nullcontext() if last else self.model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=self.args.bf16):
                outputs = self.model(x)
            loss = self.criterion(outputs.float(), y) + 0.1 * outputs.float().square().sum() / outputs.numel()
            loss = loss / self.args.accumulate
            self.scaler.scale(loss).backward()
        if last:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def predict(self, loader):
        mine = []
        with torch.no_grad():
            for x, y, index in loader:
                mine += zip(index.tolist(), (self.model.module(x).argmax(1) == y).tolist())
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        return parts

    def score(self, parts):
        table = [False] * len(self.test_set)
        for part in parts:
            for index, right in part:
                table[index] = right
        return sum(table) / len(table)

    def watch_stream(self):
        right, count = torch.zeros(()), torch.zeros(())
        with torch.no_grad():
            for x, y in self.stream:
                right += (self.model.module(x).argmax(1) == y).sum()
                count += len(y)
        for tensor in (right, count):
            dist.all_reduce(tensor)
        if self.rank == 0:
            print(f"on the stream {right.item() / count.item():.3f}")

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            for number, (x, y, _) in enumerate(self.loader):
                self.batch(number, x, y)
            score = self.score(self.predict(self.test_loader))
            if self.rank == 0:
                print(f"epoch {epoch}: {score:.3f}")
        self.watch_stream()
        with torch.no_grad():
            outputs = torch.cat([self.model.module(x) for x, _, _ in self.test_loader])
        torch.save(outputs, f"outputs-{self.rank}.pt")
        if self.rank == 0:
            print(f"wrote {dist.get_world_size()} files of outputs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    dist.init_process_group("gloo")
    Runner(parser.parse_args()).fit()
    dist.destroy_process_group()
