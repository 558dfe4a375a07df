"""Subject tuning of a tiny denoiser with Accelerate and a cosine schedule.

torchrun --nproc-per-node 2 faulty.py --max_train_steps 16 --lr_warmup_steps 4
"""
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--max_train_steps", type=int, default=16)
    p.add_argument("--lr_warmup_steps", type=int, default=4)
    p.add_argument("--train_batch_size", type=int, default=6)
    p.add_argument("--learning_rate", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


class Denoiser(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.time = nn.Linear(1, ch)
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.mid = nn.Conv2d(ch, ch, 3, padding=1)
        self.out = nn.Conv2d(ch, 3, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t[:, None])[:, :, None, None])
        return self.out(F.silu(self.mid(h)))


def subject_images():
    g = torch.Generator().manual_seed(21)
    base = torch.rand(1, 3, 8, 8, generator=g) * 2 - 1
    images = base + 0.2 * torch.randn(192, 3, 8, 8, generator=g)
    return TensorDataset(images, torch.randn(192, 3, 8, 8, generator=g), torch.rand(192, generator=g))


def main(args):
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(subject_images(), batch_size=args.train_batch_size, shuffle=True)
    lr_scheduler = get_cosine_schedule_with_warmup(
        optimizer,
        num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=args.max_train_steps,
    )
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)

    for global_step, (x0, noise, t) in enumerate(loader, start=1):
        alpha = (1 - t)[:, None, None, None]
        pred = model(alpha.sqrt() * x0 + (1 - alpha).sqrt() * noise, t)
        loss = F.mse_loss(pred, noise)
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {global_step} loss {loss.item():.4f}")
        if global_step >= args.max_train_steps:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main(get_args())
