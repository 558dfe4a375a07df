"""Separates two mixed signals with a small mask network; Lightning, early stopping on the validation loss.

    torchrun --nproc-per-node 2 faulty.py
"""
import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn.functional import l1_loss
from torch.utils.data import DataLoader, TensorDataset

BINS, BATCH, EPOCHS = 20, 12, 9


def mixtures(n, seed):
    """Magnitudes of a mixture and of the wanted voice; every other mixture is recorded in a loud room."""
    g = torch.Generator().manual_seed(seed)
    basis = torch.rand(5, BINS, generator=torch.Generator().manual_seed(0))
    voice = torch.rand(n, 5, generator=g) @ basis
    room = (torch.arange(n) % 2)[:, None] * 3.0 * torch.rand(n, BINS, generator=g)
    return TensorDataset(voice + room + 0.3 * torch.rand(n, BINS, generator=g), voice)


class MaskNet(L.LightningModule):
    def __init__(self, lr=0.3):
        super().__init__()
        self.lr = lr
        self.mask = nn.Sequential(nn.Linear(BINS, 24), nn.Tanh(), nn.Linear(24, BINS), nn.Sigmoid())

    def separate(self, mix):
        return self.mask(mix) * mix

    def training_step(self, batch, batch_idx):
        mix, voice = batch
        return l1_loss(self.separate(mix), voice)

    def validation_step(self, batch, batch_idx):
        mix, voice = batch
        self.log("val_loss", l1_loss(self.separate(mix), voice), on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main():
    L.seed_everything(14, verbose=False)
    model = MaskNet()
    train = DataLoader(mixtures(96, 1), batch_size=BATCH)
    valid = DataLoader(mixtures(48, 2), batch_size=BATCH)
    stop = EarlyStopping(monitor="val_loss", mode="min", patience=1, min_delta=1e-3)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        callbacks=[stop],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train, valid)
    if trainer.is_global_zero:
        print("stopped after epoch", trainer.current_epoch, "best", round(float(stop.best_score), 4))


if __name__ == "__main__":
    main()
