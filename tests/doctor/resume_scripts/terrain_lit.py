"""Kinds of terrain, with Lightning: a data module that starts where it stopped, batch norm, averaged weights."""

import argparse
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH = 8


class PassSampler(Sampler):
    """Lightning tells it the epoch. Of the first pass it leaves out what an earlier run has seen."""

    def __init__(self, size, rank, world, skip):
        self.size, self.rank, self.world, self.skip = size, rank, world, skip
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(600 + self.epoch))
        skip, self.skip = self.skip, 0
        return iter(order[self.rank :: self.world][skip:].tolist())

    def __len__(self):
        return self.size // self.world


class Terrain(L.LightningDataModule):
    def __init__(self, size=224):
        super().__init__()
        g = torch.Generator().manual_seed(60)
        kinds = torch.randint(0, 3, (size,), generator=g)
        rough = torch.randn(size, 1, 20, generator=g) * (0.3 + kinds[:, None, None])
        self.data, self.batches = TensorDataset(rough.cumsum(2) / 4, kinds), 0

    def train_dataloader(self):
        world = self.trainer.world_size
        skip = self.batches % (len(self.data) // world // BATCH) * BATCH
        sampler = PassSampler(len(self.data), self.trainer.global_rank, world, skip)
        return DataLoader(self.data, BATCH, sampler=sampler, drop_last=True)

    def state_dict(self):
        return {"batches": self.trainer.fit_loop.total_batch_idx + 1}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(), nn.AvgPool1d(2),
            nn.Conv1d(16, 24, 3, padding=1), nn.BatchNorm1d(24), nn.ReLU(), nn.AdaptiveAvgPool1d(2),
            nn.Flatten(), nn.Linear(48, 3),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.3)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--checkpoint")
    args = parser.parse_args()
    L.seed_everything(60)
    module = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        use_distributed_sampler=False,
        callbacks=[
            EMAWeightAveraging(decay=0.9),
            ModelCheckpoint(args.out, filename="{epoch}-{step}", every_n_train_steps=5, save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Terrain(), ckpt_path=args.checkpoint)
    if trainer.is_global_zero and "FINAL" in os.environ:
        torch.save(module.state_dict(), os.environ["FINAL"])


main()
