"""Lightning with manual optimisation: two optimizers, accumulation by hand, schedulers stepped by hand."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, DEVICES = 8, 2


class Denoiser(L.LightningModule):
    def __init__(self, every=2):
        super().__init__()
        self.automatic_optimization = False
        self.every = every
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 24))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        noisy, clean = batch
        loss = nn.functional.mse_loss(self(noisy), clean)
        self.manual_backward(loss / self.every)
        if (batch_idx + 1) % self.every:
            return
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers()):
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        self.log("loss", loss, sync_dist=True, prog_bar=False)

    def configure_optimizers(self):
        slow = torch.optim.SGD(self.encoder.parameters(), lr=0.2, momentum=0.9)
        fast = torch.optim.SGD(self.decoder.parameters(), lr=0.5, momentum=0.9)
        return [slow, fast], [torch.optim.lr_scheduler.ExponentialLR(o, 0.97) for o in (slow, fast)]


def curves(n=256):
    g = torch.Generator().manual_seed(3)
    clean = torch.sin(torch.linspace(0, 6, 24) * (1 + torch.rand(n, 1, generator=g)))
    return TensorDataset(clean + 0.3 * torch.randn(n, 24, generator=g), clean)


if __name__ == "__main__":
    L.seed_everything(31)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Denoiser(), DataLoader(curves(), batch_size=BATCH, shuffle=True))
    if trainer.is_global_zero:
        print({k: round(float(v), 4) for k, v in trainer.callback_metrics.items()})
