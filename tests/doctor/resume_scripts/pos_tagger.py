"""A tagger for short sentences (LSTM) with Accelerate; save_state every few updates."""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    """Where we are; registered with the Accelerator, so that it is in each saved state."""

    def __init__(self):
        self.epoch, self.batches_done, self.updates = 0, 0, 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class Tagger(nn.Module):
    def __init__(self, words=50, tags=6, dim=24):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(2 * dim, tags)

    def forward(self, ids):
        return self.tags(self.lstm(self.words(ids))[0])


def sentences(n=208, length=9):
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (n, length), generator=g)
    return TensorDataset(ids, (ids + ids.roll(1, 1)) % 6)


def save(accelerator, out, updates):
    accelerator.save_state(str(out / ".saving"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (out / ".saving").rename(out / f"state-{updates:04d}")
    accelerator.wait_for_everyone()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(42)
    args.out.mkdir(parents=True, exist_ok=True)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(sentences(), batch_size=8, shuffle=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    states = sorted(args.out.glob("state-*"))
    if states:
        accelerator.load_state(str(states[-1]))

    first = progress.epoch
    for epoch in range(first, args.epochs):
        loader.set_epoch(epoch)
        batches = loader
        if states and epoch == first:
            batches = accelerator.skip_first_batches(loader, progress.batches_done + 1)
        else:
            progress.epoch, progress.batches_done = epoch, 0
        for ids, tags in batches:
            loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.batches_done += 1
            progress.updates += 1
            accelerator.print(f"epoch {epoch} update {progress.updates} loss {loss.item():.4f}")
            if progress.updates % 4 == 0:
                save(accelerator, args.out, progress.updates)

    if accelerator.is_main_process and os.environ.get("FINAL"):
        torch.save(accelerator.unwrap_model(model).state_dict(), os.environ["FINAL"])
    accelerator.end_training()


if __name__ == "__main__":
    main()
