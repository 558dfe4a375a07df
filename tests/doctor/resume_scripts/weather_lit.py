"""Tomorrow's temperature from the last days: a Lightning module, a DataLoader, ModelCheckpoint and ckpt_path."""

import argparse
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Days(Dataset):
    def __init__(self, days=230, window=14):
        t = torch.arange(days + window, dtype=torch.float32)
        noise = torch.randn(len(t), generator=torch.Generator().manual_seed(30))
        self.series = torch.sin(t / 9) + 0.5 * torch.sin(t / 2.3) + 0.2 * noise
        self.days, self.window = days, window

    def __len__(self):
        return self.days

    def __getitem__(self, i):
        return self.series[i : i + self.window], self.series[i + self.window]


class Forecast(L.LightningModule):
    def __init__(self, window=14, hidden=40, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(window, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )

    def forward(self, days):
        return self.net(days).squeeze(-1)

    def training_step(self, batch, batch_idx):
        days, tomorrow = batch
        loss = nn.functional.mse_loss(self(days), tomorrow)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--ckpt_path", default=None)
    parser.add_argument("--max_epochs", type=int, default=2)
    args = parser.parse_args()

    L.seed_everything(30, workers=True)
    loader = DataLoader(Days(), batch_size=10, shuffle=True, drop_last=True)
    model = Forecast()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp",
        max_epochs=args.max_epochs,
        callbacks=[ModelCheckpoint(dirpath=args.out, filename="{epoch}-{step}", every_n_train_steps=4, save_top_k=-1)],
        default_root_dir=args.out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=args.ckpt_path)
    if trainer.is_global_zero:
        print(f"finished at step {trainer.global_step}, loss {float(trainer.callback_metrics['loss']):.4f}")
        if os.environ.get("FINAL"):
            torch.save(model.state_dict(), os.environ["FINAL"])


if __name__ == "__main__":
    main()
