"""Lightning told not to touch the sampler: the data module deals the rows out itself."""

import lightning as L
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH, DEVICES = 16, 2


class EveryNth(Sampler):
    def __init__(self, size, rank, world):
        self.size, self.rank, self.world = size, rank, world

    def __len__(self):
        return self.size // self.world

    def __iter__(self):
        usable = len(self) * self.world
        return iter(range(self.rank, usable, self.world))


class Tumours(L.LightningDataModule):
    def setup(self, stage):
        table = load_breast_cancer()
        x = torch.tensor(table.data).float()
        x = (x - x.mean(0)) / x.std(0)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
        self.rows = TensorDataset(x[order][:448], torch.tensor(table.target)[order][:448].float())

    def train_dataloader(self):
        sampler = EveryNth(len(self.rows), self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(self.rows, batch_size=BATCH, sampler=sampler)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        plan = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.2, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plan, "interval": "step"}}


def main():
    L.seed_everything(2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy="ddp",
        use_distributed_sampler=False,
        max_epochs=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), datamodule=Tumours())
    if trainer.is_global_zero:
        print(f"train loss {trainer.callback_metrics['train_loss'].item():.4f}")


if __name__ == "__main__":
    main()
