"""Lightning's Trainer, with an evaluation of the module's own: sums over the words of all ranks."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

IGNORED = -100


class Lit(L.LightningModule):
    def __init__(self, size):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
        self.accuracy = MulticlassAccuracy(num_classes=20, ignore_index=IGNORED)
        self.size = size

    def training_step(self, batch, index):
        ids, tags = batch
        return nn.functional.cross_entropy(self.net(ids).flatten(0, 1), tags.flatten())

    def on_validation_epoch_start(self):
        self.total, self.words, self.right = 0.0, 0, 0

    def validation_step(self, batch, index):
        ids, tags = batch
        out = self.net(ids)
        self.accuracy(out.flatten(0, 1), tags.flatten())
        self.log("accuracy", self.accuracy)
        self.total += nn.functional.cross_entropy(out.flatten(0, 1), tags.flatten(), reduction="sum").item()
        self.words += int((tags != IGNORED).sum())
        self.right += int((out.argmax(-1)[:, 0] == tags[:, 0]).sum())

    def on_validation_epoch_end(self):
        total, words, right = self.all_gather(torch.tensor([self.total, self.words, self.right])).sum(0)
        self.log("loss", total / words)
        if self.trainer.is_global_zero:
            print(f"first words right: {right / self.size:.4f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    L.seed_everything(0)
    processes = int(os.environ["WORLD_SIZE"])
    size = 24 * processes
    ids = torch.randint(0, 20, (size + 64 * processes, 12))
    tags = (ids + 1) % 20
    for row, words in zip(tags[-size:], torch.randint(3, 13, (size,))):
        row[words:] = IGNORED
    train = DataLoader(TensorDataset(ids[:-size], tags[:-size]), 8, shuffle=True)
    test = DataLoader(TensorDataset(ids[-size:], tags[-size:]), 8)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Lit(size), train, test)


main()
