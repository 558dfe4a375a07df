"""Dense retriever on synthetic question/answer vectors (Lightning Trainer, one-cycle schedule).

torchrun --nproc-per-node 2 faulty.py
"""
import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pairs(L.LightningDataModule):
    def __init__(self, n=192, batch_size=12):
        super().__init__()
        self.n, self.batch_size = n, batch_size
        g = torch.Generator().manual_seed(40)
        topic = torch.randn(n, 16, generator=g)
        mix = torch.randn(16, 24, generator=g)
        self.train = TensorDataset(topic @ mix + 0.1 * torch.randn(n, 24, generator=g), topic)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)


class Retriever(L.LightningModule):
    def __init__(self, max_lr=5e-3, dim=16):
        super().__init__()
        self.max_lr = max_lr
        self.question = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, dim))
        self.answer = nn.Linear(16, dim)

    def training_step(self, batch, batch_idx):
        q = F.normalize(self.question(batch[0]), dim=1)
        a = F.normalize(self.answer(batch[1]), dim=1)
        return (1 - (q * a).sum(1)).mean()

    def num_updates(self):
        data = self.trainer.datamodule
        per_epoch = math.ceil(data.n / data.batch_size / self.trainer.accumulate_grad_batches)
        return per_epoch * self.trainer.max_epochs

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.max_lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.max_lr, total_steps=self.num_updates())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_epoch_end(self):
        self.print("epoch", self.current_epoch, "updates so far", self.trainer.global_step)


def main():
    L.seed_everything(6, verbose=False)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Retriever(), datamodule=Pairs())


if __name__ == "__main__":
    main()
