"""Gait classification from accelerometers: train the head first, then the backbone as well (Lightning)."""
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Walks(L.LightningDataModule):
    def __init__(self, n=128, batch_size=8):
        super().__init__()
        self.n, self.batch_size = n, batch_size

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(60)
        kind = torch.randint(3, (self.n,), generator=g)
        t = torch.arange(24) / 24
        rate = (2.0 + kind)[:, None, None] * torch.tensor([1.0, 2.0])[None, :, None]
        limp = (torch.arange(self.n) % 2)[:, None, None] * 0.8 * torch.cos(25 * t)
        x = torch.sin(6.28 * rate * t) + limp + 0.2 * torch.randn(self.n, 2, 24, generator=g)
        self.walks = TensorDataset(x, kind)

    def train_dataloader(self):
        return DataLoader(self.walks, batch_size=self.batch_size)


class GaitModel(L.LightningModule):
    def __init__(self, lr=0.1, thaw_epoch=1):
        super().__init__()
        self.lr, self.thaw_epoch = lr, thaw_epoch
        self.backbone = nn.Sequential(nn.Conv1d(2, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 12, 3, stride=2))
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
        self.head(self.backbone(torch.zeros(1, 2, 24)))

    def forward(self, x):
        return self.head(torch.relu(self.backbone(x)))

    def on_train_epoch_start(self):
        thawed = self.current_epoch >= self.thaw_epoch
        self.optimizers().param_groups[0]["lr"] = self.lr if thawed else 0.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(
            [
                {"params": self.backbone.parameters(), "lr": self.lr},
                {"params": self.head.parameters(), "lr": self.lr},
            ]
        )

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch} loss {float(self.trainer.callback_metrics['loss']):.4f}")


def build():
    L.seed_everything(21, verbose=False)
    return GaitModel()


def main():
    model = build()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=Walks())


if __name__ == "__main__":
    main()
