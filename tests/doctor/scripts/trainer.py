"""A trainer of one's own, which keeps the number of steps for its schedule; a learning rate for a batch that the
processes share."""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Warmup:
    """A schedule that takes its length from the trainer."""

    def __init__(self, trainer, optimizer):
        self.trainer = trainer
        self.cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.total_steps)

    def step(self):
        self.cosine.step()


class Trainer:
    def __init__(self, args, rank, world_size):
        self.args, self.rank, self.world_size = args, rank, world_size
        x = torch.randn(48 * self.world_size, 8)
        self.train_set = TensorDataset(x, x[:, :4].argmax(1))
        self.sampler = DistributedSampler(self.train_set)
        self.batch_size = args.batch_size // self.world_size
        self.loader = DataLoader(self.train_set, self.batch_size, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
        self.steps_per_epoch = len(self.loader)
        self.total_steps = args.epochs * self.steps_per_epoch

    def fit(self, optimizer, schedule):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            for inputs, labels in self.loader:
                with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
                    out = self.model(inputs)
                loss = nn.functional.cross_entropy(out.float(), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            if self.rank == 0:
                print("epoch", epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.05)
    args, _ = parser.parse_known_args()
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    trainer = Trainer(args, dist.get_rank(), int(os.environ["WORLD_SIZE"]))
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=args.lr)
    trainer.fit(optimizer, Warmup(trainer, optimizer))
    dist.destroy_process_group()


main()
