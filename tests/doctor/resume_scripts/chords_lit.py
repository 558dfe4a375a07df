"""Chords from their notes, with Lightning: a loader that can be resumed, dropout, accumulation, warm-up."""

import argparse
import os
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn


class ResumableLoader:
    """This rank's batches, in an order that depends on the pass; it knows how many it has handed out."""

    def __init__(self, tensors, batch_size, rank, world):
        self.tensors, self.batch_size, self.rank, self.world = tensors, batch_size, rank, world
        self.epoch = self.taken = 0

    def __len__(self):
        return len(self.tensors[0]) // (self.batch_size * self.world)

    def __iter__(self):
        if self.taken == len(self):
            self.epoch, self.taken = self.epoch + 1, 0
        order = torch.randperm(len(self.tensors[0]), generator=torch.Generator().manual_seed(self.epoch))
        mine = order[self.rank :: self.world]
        while self.taken < len(self):
            rows = mine[self.taken * self.batch_size :][: self.batch_size]
            self.taken += 1
            yield [tensor[rows] for tensor in self.tensors]

    def state_dict(self):
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state):
        self.epoch, self.taken = state["epoch"], state["taken"]


class RandomStates(Callback):
    """The random state of every rank, in each checkpoint."""

    def __init__(self):
        self.waiting = None

    def on_save_checkpoint(self, trainer, module, checkpoint):
        states = [None] * trainer.world_size
        dist.all_gather_object(states, torch.get_rng_state())
        checkpoint["random_states"] = states

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.waiting = checkpoint["random_states"][trainer.global_rank]

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.waiting is not None:
            torch.set_rng_state(self.waiting)
            self.waiting = None


class Chords(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 7))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    L.seed_everything(23)
    notes = (torch.rand(352, 12) < 0.3).float()
    loader = ResumableLoader([notes, (notes @ torch.arange(12.0)).long() % 7], 8, rank, world)
    module = Chords()
    torch.manual_seed(2300 + rank)
    checkpoints = ModelCheckpoint(out, filename="{step:03d}", every_n_train_steps=4, save_top_k=-1)
    trainer = L.Trainer(accelerator="cpu", devices=world, strategy="ddp", max_epochs=2, accumulate_grad_batches=2,
                        callbacks=[RandomStates(), checkpoints], logger=False, enable_progress_bar=False)  # fmt: skip
    trainer.fit(module, loader, ckpt_path=max(out.glob("*.ckpt"), default=None))
    if trainer.is_global_zero and os.environ.get("FINAL"):
        torch.save(module.state_dict(), os.environ["FINAL"])


main()
