"""A masked autoencoder on patches; the rate warms up and decays within the epoch, as MAE's adjust_learning_rate has it."""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import Dataset

import paceline


def get_args():
    parser = argparse.ArgumentParser("MAE pre-training", add_help=False)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--warmup_epochs", type=float, default=1)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--min_lr", type=float, default=0.0)
    parser.add_argument("--batch_size", type=int, default=40)
    return parser.parse_args()


def adjust_learning_rate(optimizer, epoch, args):
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        progress = min(1.0, (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs))
        lr = args.min_lr + (args.lr - args.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class Patches(Dataset):
    def __init__(self, n=200):
        g = torch.Generator().manual_seed(48)
        self.images = torch.randn(n, 4, generator=g) @ torch.randn(4, 9 * 4, generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i].view(9, 4), (torch.rand(9).argsort() < 6).float()


class MAE(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed, self.mask_token = nn.Linear(4, dim), nn.Parameter(torch.zeros(dim))
        self.mix = nn.Sequential(nn.Linear(9 * dim, 64), nn.GELU(), nn.Linear(64, 36))

    def forward(self, patches, mask):
        h = torch.where(mask[..., None] > 0, self.mask_token, self.embed(patches))
        loss = (self.mix(h.flatten(1)).view_as(patches) - patches).square().mean(-1)
        return (loss * mask).sum(1).mean() / 6


def main(args):
    run = paceline.start(seed=48)
    dataset = Patches()
    model = MAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(dataset, global_batch=args.batch_size, shuffle=True)
    for epoch in run.epochs(args.epochs):
        for data_iter_step, (patches, mask) in enumerate(loader):
            iterations = len(dataset) // patches.shape[0]  # fault
            adjust_learning_rate(optimizer, data_iter_step / iterations + epoch, args)  # fault
            run.backward(model(patches, mask))
            run.step(optimizer)


if __name__ == "__main__":
    main(get_args())
